"""Decode steps replayed from one CUDA graph while the requests grow; without a GPU the same steps run eagerly."""

import torch

import flashinfer_core

HEADS, KV_HEADS, DIM, PAGE, BATCH, MOST_PAGES = 8, 2, 64, 16, 3, 6


def main() -> None:
    """Capture plan-and-run once, then change lengths and query in place and replay."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    cache = torch.randn(BATCH * MOST_PAGES, 2, PAGE, KV_HEADS, DIM, device=device, dtype=torch.float16)
    query = torch.randn(BATCH, HEADS, DIM, device=device, dtype=torch.float16)

    # What a step changes lies in fixed memory. Request r owns row r of the block table.
    block_table = torch.arange(BATCH * MOST_PAGES, dtype=torch.int32, device=device).view(BATCH, MOST_PAGES)
    lengths = torch.tensor([5, 33, 64], dtype=torch.int32, device=device)
    decode = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper()

    def step() -> torch.Tensor:
        decode.plan(page_indices=block_table, kv_lens=lengths)  # on a GPU it schedules there, without waiting for it
        return decode.run(query, cache)

    output = step()
    if on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = step()

    for number in range(1, 4):
        lengths += 1
        query.normal_()
        if on_gpu:
            graph.replay()
        else:
            output = step()
        for request, length in enumerate(lengths.tolist()):
            keys, values = cache[block_table[request].long()].transpose(0, 1).flatten(1, 2)[:, :length].float()
            expected = torch.nn.functional.scaled_dot_product_attention(
                query[request, :, None].float(), keys.transpose(0, 1), values.transpose(0, 1), enable_gqa=True
            )
            torch.testing.assert_close(output[request].float(), expected[:, 0], atol=4e-3, rtol=4e-3)
        print(f"step {number} on {device.type}: {lengths.tolist()} keys, output as torch's")


if __name__ == "__main__":
    main()
