"""The wrappers in a model loop of one's own: plan once for a step, run for each layer."""

import torch

import flashinfer_core

LAYERS, HEADS, KV_HEADS, DIM, PAGE, MOST_PAGES = 3, 8, 2, 64, 16, 4
WIDTH = HEADS * DIM
PROMPTS = (5, 33, 16)  # tokens
STEPS = 20


class Attention:
    """A layer's attention over the paged cache: the wrapper of the model, planned by the loop, is all it needs."""

    def __init__(self, wrapper: flashinfer_core.BatchDecodeWithPagedKVCacheWrapper) -> None:
        self.wrapper = wrapper

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        """Attend to all keys of each request, those of this step included."""
        return self.wrapper.forward(query, kv_cache)


class Model:
    """Layers of attention with random weights, and the cache of a batch. Request r owns row r of the block table."""

    def __init__(self, batch: int, device: torch.device) -> None:
        options = {"device": device, "dtype": torch.float16}
        self.wrapper = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper()
        self.attention = [Attention(self.wrapper) for _ in range(LAYERS)]
        self.weights = [torch.randn(WIDTH, WIDTH + 2 * KV_HEADS * DIM, **options) * WIDTH**-0.5 for _ in range(LAYERS)]
        self.caches = [torch.zeros(batch * MOST_PAGES, 2, PAGE, KV_HEADS, DIM, **options) for _ in range(LAYERS)]
        self.block_table = torch.arange(batch * MOST_PAGES, dtype=torch.int32, device=device).view(batch, MOST_PAGES)

    def project(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values ``[tokens, heads, DIM]``."""
        return (hidden @ self.weights[layer]).view(len(hidden), -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)

    def step(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Compute one token more for each request; `lengths` ``[batch]`` counts it."""
        request = torch.arange(len(hidden), dtype=torch.int32, device=hidden.device)
        pages = self.block_table.view(-1)
        indptr = torch.arange(len(hidden) + 1, dtype=torch.int32, device=hidden.device) * MOST_PAGES
        full = torch.full_like(request, PAGE)
        self.wrapper.begin_forward(page_indices=self.block_table, kv_lens=lengths)  # once for all layers
        for layer in range(LAYERS):
            query, key, value = self.project(layer, hidden)
            flashinfer_core.append_paged_kv_cache(
                key, value, request, lengths - 1, self.caches[layer], pages, indptr, full
            )
            hidden = hidden + self.attention[layer].forward(query, self.caches[layer]).flatten(1)
        self.wrapper.end_forward()
        return hidden

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute all tokens of one request at once, with torch and without a cache."""
        for layer in range(LAYERS):
            query, key, value = (x.transpose(0, 1)[None] for x in self.project(layer, hidden))
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            hidden = hidden + out[0].transpose(0, 1).flatten(1)
        return hidden


def main() -> None:
    """Feed tokens one by one to a batch of requests, and compare with torch on whole sequences."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Model(len(PROMPTS), device)
    tokens = [torch.randn(length + STEPS, WIDTH, device=device, dtype=torch.float16) for length in PROMPTS]
    outputs = []
    for step in range(max(PROMPTS) + STEPS):
        # A request that has begun later, or has ended, repeats its first or last token.
        at = [min(max(step - max(PROMPTS) + length, 0), length + STEPS - 1) for length in PROMPTS]
        lengths = torch.tensor([position + 1 for position in at], dtype=torch.int32, device=device)
        outputs.append(model.step(torch.stack([own[i] for own, i in zip(tokens, at, strict=True)]), lengths))
    for request, own in enumerate(tokens):
        expected = model.whole(own)[-STEPS:]
        output = torch.stack([step[request] for step in outputs[-STEPS:]])
        torch.testing.assert_close(output, expected, atol=3e-2, rtol=3e-2)
        print(f"request {request} on {device.type}: {STEPS} tokens after {PROMPTS[request]}, output as torch's")


if __name__ == "__main__":
    main()
