"""One decode step for three requests whose keys and values lie in pages of one cache."""

import torch

import flashinfer_core

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
LENGTHS = torch.tensor([5, 17, 64], dtype=torch.int32)


def main() -> None:
    """Fill the cache, attend to it, and compare with torch."""
    torch.manual_seed(0)
    tokens = int(LENGTHS.sum())
    key, value = torch.randn(2, tokens, KV_HEADS, DIM)
    query = torch.randn(len(LENGTHS), HEADS, DIM)

    # The page table: request r owns pages indices[indptr[r]:indptr[r + 1]], in any order.
    pages = (LENGTHS + PAGE - 1) // PAGE
    indptr = torch.cat([torch.zeros(1), pages.cumsum(0)]).int()
    indices = torch.randperm(int(indptr[-1])).int()
    last_page_len = (LENGTHS - 1) % PAGE + 1

    cache = torch.zeros(int(indptr[-1]), 2, PAGE, KV_HEADS, DIM)
    token_indptr = torch.cat([torch.zeros(1), LENGTHS.cumsum(0)]).int()
    batch_indices, positions = flashinfer_core.get_batch_indices_positions(token_indptr, LENGTHS, tokens)
    flashinfer_core.append_paged_kv_cache(key, value, batch_indices, positions, cache, indices, indptr, last_page_len)

    # Plan once for a step of the model, then run for each of its layers.
    decode = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    decode.plan(indptr, indices, last_page_len, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32)
    output = decode.run(query, cache)

    start = 0
    for request, length in enumerate(LENGTHS.tolist()):
        rows = slice(start, start + length)
        start += length
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[request, :, None], key[rows].transpose(0, 1), value[rows].transpose(0, 1), enable_gqa=True
        )
        torch.testing.assert_close(output[request], expected[:, 0], atol=1e-5, rtol=1e-5)
        print(f"request {request}: {length} keys, output as torch's")


if __name__ == "__main__":
    main()
