"""What ``flashinfer-core explain`` says of a call, beside what plans and runs choose."""

from __future__ import annotations

import pytest

from flashinfer_core.cli import main


def told(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["explain", *arguments.split()]) == 0
    return {name: text for name, _, text in (line.partition(" ") for line in capsys.readouterr().out.splitlines())}


@pytest.mark.parametrize(
    ("arguments", "kernel", "why"),
    [
        ("", "attention_sm80_bf16_d128_m16", "tiles of 128 rows"),
        ("--q-len 512", "attention_sm90_bf16_d128_k160", "all that the kernel for SM90 needs"),
        ("--q-len 512 --page-size 16 --soft-cap", "attention_sm90_bf16_d128_k160_softcap", "all that"),
        ("--q-len 512 --page-size 1", "attention_sm80_bf16_d128_m128", "pages that have 8 keys or more"),
        ("--page-size 1 --backend fa3", "attention_sm90_bf16_d128_k160", "all that"),
        ("--q-len 512 --backend fa2", "attention_sm80_bf16_d128_m128", "another backend than 'fa2'"),
        ("--q-len 512 --capability 80", "attention_sm80_bf16_d128_m128", "compute capability 9.0"),
        ("--q-len 512 --rope", "attention_sm80_bf16_d128_m128_direct_rope", "no rotation"),
        ("--q-len 512 --direct", "attention_sm80_bf16_d128_m128_direct", "multiples of 16 bytes"),
        ("--q-len 512 --head-dim 192 --head-dim-vo 128", "attention_sm90_bf16_d192_k128_vo128", "all that"),
        ("--q-len 8 --heads 8", "attention_sm80_bf16_d128_m16", "tiles of 128 rows"),
        ("--kv-dtype float8_e4m3fn", "attention_sm80_bf16_d128_m16_k32_kve4m3", "tiles of 128 rows"),
        ("--capability 75 --dtype float16", "attention_sm80_f16_d128_m16_k16_s1_direct", "compute capability 9.0"),
    ],
)
def test_kernel(arguments: str, kernel: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(arguments, capsys)
    assert answer["kernel"].strip() == kernel
    assert why in answer["why"]
    assert answer["source"].strip() == f"core_kernels/device/attention/{kernel[:14]}.cuh"


def test_shape(capsys: pytest.CaptureFixture[str]) -> None:
    decode, prefill = told("", capsys), told("--q-len 512", capsys)
    assert decode["tile"].split()[:1] == ["16"]
    assert "the last CTA of a tile" in decode["merges"]
    assert prefill["tile"].split()[:1] == ["128"]
    assert "384 threads" in prefill["CTA"]
    assert "merge_chunks_bf16_d128_m128, after it" in prefill["merges"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--capability 70", "capability: expected 80 or more (75 with float16), got 70"),
        ("--capability 75", "capability: expected 80 or more (75 with float16), got 75"),
        ("--kv-dtype float8_e5m2 --backend fa3", "backend: expected a 16-bit KV cache for 'fa3'"),
        ("--capability 80 --backend fa3", "backend: expected a GPU of compute capability 9.0 for 'fa3'"),
        ("--heads 12", "heads: expected a multiple of kv_heads = 8, got 12"),
        ("--kv-heads 0", "kv_heads: expected"),
        ("--head-dim 257", "head_dim: expected"),
        ("--page-size 0", "page_size: expected"),
    ],
)
def test_refused(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments.split()]) == 1
    assert words in capsys.readouterr().err
