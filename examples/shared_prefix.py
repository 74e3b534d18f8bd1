"""Attention of requests that share a long prefix: its keys are read once for all of them."""

import torch

import flashinfer_core

HEADS, KV_HEADS, DIM, PAGE, BATCH, PREFIX = 8, 2, 64, 16, 4, 300
OWN_PAGES = 2


def main() -> None:
    """Attend in one call, then by the recipe that it follows, and compare both with torch."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"device": device, "dtype": torch.float16}
    query = torch.randn(BATCH, HEADS, DIM, **options)
    prefix = torch.randn(PREFIX, 2, KV_HEADS, DIM, **options)  # K and V side by side
    pages = torch.randn(BATCH * OWN_PAGES, 2, PAGE, KV_HEADS, DIM, **options)  # each request's own keys
    indptr = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * OWN_PAGES
    indices = torch.arange(BATCH * OWN_PAGES, dtype=torch.int32, device=device)
    last_page_len = torch.full((BATCH,), PAGE, dtype=torch.int32, device=device)

    wrapper = flashinfer_core.BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
    wrapper.begin_forward(indptr, indices, last_page_len, HEADS, KV_HEADS, DIM, PAGE, data_type="float16")
    output = wrapper.forward(query, prefix[:, 0], prefix[:, 1], pages)

    # The recipe: all queries over the prefix, each over its own keys, and the two results merged by their log-sum-exp.
    own = pages.transpose(1, 2).reshape(BATCH, OWN_PAGES * PAGE, 2, KV_HEADS, DIM)
    shared = flashinfer_core.single_prefill_with_kv_cache(q=query, kv_data=prefix, return_lse=True)
    unique = flashinfer_core.batch_decode_with_kv_cache(q=query, kv_data=own, return_lse=True)
    merged, _ = flashinfer_core.merge_attention_states(shared, unique)

    joined = torch.cat([prefix.expand(BATCH, -1, -1, -1, -1), own], dim=1).float()
    keys, values = joined.permute(2, 0, 3, 1, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None].float(), keys, values, enable_gqa=True
    )
    for name, result in (("wrapper", output), ("recipe", merged)):
        torch.testing.assert_close(result.float(), expected[:, :, 0], atol=4e-3, rtol=4e-3)
        print(f"{name} on {device.type}: {BATCH} requests, {PREFIX} shared keys, output as torch's")


if __name__ == "__main__":
    main()
