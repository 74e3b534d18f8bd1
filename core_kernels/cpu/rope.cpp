// Rotary position embedding of queries and keys.
//
// One thread takes whole tokens. A token's cosines and sines are made once, in blocks of kBlock pairs on the stack, and
// then serve all of its query and key heads. Half-split pairs are two vectors half a rotary_dim apart. Interleaved
// pairs stay in place: out = x * cos + swapped(x) * signed sin, with cosines and sines stored twice for it.
//
// Angles are position * frequency rounded to float32, as the models were trained with; their reduction to a quarter
// turn is made in float64, so sines stay correct to 1e-7 or so at any position.
//
// Roofline: an element moves twice and costs 3 operations; the angles' 40 operations a pair are shared by all heads.
// Memory bounds it.
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace flashinfer_core::FIC_ISA {
namespace {

constexpr int64_t kBlock = 256;  // pairs: 4 KiB of stack, and every usual rotary_dim in one block

typedef double VecD __attribute__((vector_size(W * 8)));
typedef int64_t VecL __attribute__((vector_size(W * 8)));
typedef uint64_t VecPairs __attribute__((vector_size(W * 4)));  // W / 2 pairs of floats

FIC_INLINE void sin_cos(VecF x, VecF* sine, VecF* cosine) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer kept in the low bits
  const VecD wide = __builtin_convertvector(x, VecD);
  const VecD shifted = wide * 0.63661977236758134 + magic;
  const VecD turns = shifted - magic;  // quarter turns
  // pi / 2 in two parts.
  const VecD reduced = (wide - turns * 1.5707963267948966) - turns * 6.123233995736766e-17;
  const VecI quarter = __builtin_convertvector(reinterpret_cast<VecL>(shifted) & 3, VecI);
  const VecF r = __builtin_convertvector(reduced, VecF);
  const VecF r2 = r * r;

  // Relative-error fits on [-pi / 4, pi / 4]: 4e-9 for the sine, 2e-10 for the cosine.
  VecF s = splat(-1.951521664e-4f);
  s = s * r2 + 8.332160281e-3f;
  s = s * r2 - 1.666665460e-1f;
  s = s * r2 * r + r;
  VecF c = splat(2.443308132e-5f);
  c = c * r2 - 1.388731560e-3f;
  c = c * r2 + 4.166664567e-2f;
  c = c * r2 * r2 + (1.0f - 0.5f * r2);

  const VecI odd = (quarter & 1) != 0;
  const VecF sin_value = odd ? c : s, cos_value = odd ? s : c;
  *sine = as_float(as_int(sin_value) ^ ((quarter & 2) << 30));
  *cosine = as_float(as_int(cos_value) ^ (((quarter + 1) & 2) << 30));
}

// Cosines and sines of pairs [first, first + n) of one token.
FIC_INLINE void angles(const RopeParams& p, int64_t token, int64_t first, int64_t n, float* cosines, float* sines) {
  const int64_t position = p.positions[token];
  if (p.frequencies == nullptr) {
    const float* row = p.cos_sin_cache + position * p.cos_sin_stride + first;
    memcpy(cosines, row, static_cast<size_t>(n) * sizeof(float));
    memcpy(sines, row + p.rotary_dim / 2, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const float* frequencies = p.frequencies + first;
  const float x = static_cast<float>(position);
  for (int64_t i = 0; i < n; i += W) {  // kBlock is a multiple of W, so whole vectors fit the buffers
    VecF s, c;
    sin_cos(x * (i + W <= n ? load(frequencies + i) : load_n(frequencies + i, static_cast<int>(n - i))), &s, &c);
    store(cosines + i, c);
    store(sines + i, s);
  }
}

template <class T>
FIC_INLINE void rotate_halves(const T* in, T* out, int64_t half, int64_t n, const float* cosines, const float* sines) {
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const VecF a = load(in + i), b = load(in + half + i), c = load(cosines + i), s = load(sines + i);
    store(out + i, a * c - b * s);
    store(out + half + i, b * c + a * s);
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    const VecF a = load_n(in + i, rest), b = load_n(in + half + i, rest), c = load(cosines + i), s = load(sines + i);
    store_n(out + i, a * c - b * s, rest);
    store_n(out + half + i, b * c + a * s, rest);
  }
}

FIC_INLINE VecF rotate_pairs(VecF x, const float* cosines, const float* sines) {
  const VecPairs pairs = reinterpret_cast<VecPairs>(x);
  const VecF swapped = reinterpret_cast<VecF>((pairs << 32) | (pairs >> 32));
  return x * load(cosines) + swapped * load(sines);
}

// n pairs; cosines and sines are in their doubled form.
template <class T>
FIC_INLINE void rotate_interleaved(const T* in, T* out, int64_t n, const float* cosines, const float* sines) {
  int64_t i = 0;
  for (; i + W <= 2 * n; i += W) store(out + i, rotate_pairs(load(in + i), cosines + i, sines + i));
  if (i < 2 * n) {
    const int rest = static_cast<int>(2 * n - i);
    store_n(out + i, rotate_pairs(load_n(in + i, rest), cosines + i, sines + i), rest);
  }
}

template <class T, bool kInterleave>
void rotate_token(const RopeParams& p, int64_t token) {
  float cosines[kBlock], sines[kBlock];
  float pair_cosines[2 * kBlock], pair_sines[2 * kBlock];
  const int64_t half = p.rotary_dim / 2;
  for (int64_t first = 0; first < half; first += kBlock) {
    const int64_t n = min_of(kBlock, half - first);
    angles(p, token, first, n, cosines, sines);
    if (kInterleave) {
      for (int64_t i = 0; i < n; ++i) {
        pair_cosines[2 * i] = pair_cosines[2 * i + 1] = cosines[i];
        pair_sines[2 * i] = -sines[i];
        pair_sines[2 * i + 1] = sines[i];
      }
    }
    for (const RopeParams::Heads& x : p.heads) {
      const T* in = static_cast<const T*>(x.in) + token * x.in_stride_token;
      T* out = static_cast<T*>(x.out) + token * x.out_stride_token;
      for (int64_t h = 0; h < x.num_heads; ++h, in += x.in_stride_head, out += x.out_stride_head) {
        if (kInterleave) {
          rotate_interleaved(in + 2 * first, out + 2 * first, n, pair_cosines, pair_sines);
        } else {
          rotate_halves(in + first, out + first, half, n, cosines, sines);
        }
      }
    }
  }
  if (p.rotary_dim == p.head_dim) return;
  for (const RopeParams::Heads& x : p.heads) {
    if (x.in == x.out) continue;
    const T* in = static_cast<const T*>(x.in) + token * x.in_stride_token + p.rotary_dim;
    T* out = static_cast<T*>(x.out) + token * x.out_stride_token + p.rotary_dim;
    for (int64_t h = 0; h < x.num_heads; ++h, in += x.in_stride_head, out += x.out_stride_head)
      memcpy(out, in, static_cast<size_t>(p.head_dim - p.rotary_dim) * sizeof(T));
  }
}

template <class T>
void run(const RopeParams& p) {
  const int64_t heads = p.heads[0].num_heads + p.heads[1].num_heads;
  const int64_t token_bytes = 2 * heads * p.head_dim * static_cast<int64_t>(sizeof(T));
  parallel_ranges(p.num_tokens, rows_per_range(token_bytes), [&p](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (p.interleave) {
        rotate_token<T, true>(p, token);
      } else {
        rotate_token<T, false>(p, token);
      }
    }
  });
}

}  // namespace

void rope(const RopeParams& p) {
  if (p.dtype == DType::f32)
    run<float>(p);
  else if (p.dtype == DType::f16)
    run<f16>(p);
  else
    run<bf16>(p);
}

}  // namespace flashinfer_core::FIC_ISA
