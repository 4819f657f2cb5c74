"""Requests for attention on a GPU: their keys in shuffled pages of a NaN-filled cache."""

import torch

from zeromismatch.kernels.attention import gpu
from zeromismatch.kernels.attention.batch import PAGE, AttentionBatch


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Scene:
    """One set of requests, packed and paged."""

    def __init__(self, size, heads, kv_heads, lengths, dtype=torch.bfloat16, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)
        total = sum(lengths)
        draw = lambda h: torch.randn(total, h, size, generator=generator, device="cuda").mul(2.0)  # noqa: E731
        self.q, self.k, self.v = (draw(h).to(dtype) for h in (heads, kv_heads, kv_heads))
        self.lengths, self.scale = lengths, size**-0.5
        self.start = [0]
        for length in lengths:
            self.start.append(self.start[-1] + length)
        most = max(-(-n // PAGE) for n in lengths)
        pages = (
            torch.randperm(most * len(lengths), device="cuda")
            .to(torch.int32)
            .view(len(lengths), most)
        )
        self.table = pages
        self.cache = gpu.new_cache(pages.numel(), kv_heads, size, dtype=dtype)
        self.cache.k.fill_(float("nan"))
        self.cache.v.fill_(float("nan"))

    def slots(self, request, first, stop):
        at = torch.arange(first, stop, device="cuda")
        return self.table[request].long()[at // PAGE] * PAGE + at % PAGE

    def call(self, slices, **options):
        """slices: (request, first, stop) of new queries; keys up to stop are written first."""
        rows, slots, starts, lens = [], [], [0], []
        for request, first, stop in slices:
            base = self.start[request]
            rows.append(torch.arange(base + first, base + stop, device="cuda"))
            slots.append(self.slots(request, first, stop))
            starts.append(starts[-1] + stop - first)
            lens.append(stop)
            gpu.write_kv(
                self.cache,
                self.k[base : base + stop],
                self.v[base : base + stop],
                self.slots(request, 0, stop),
            )
        index = torch.cat(rows)
        table = self.table[[request for request, _, _ in slices]].contiguous()
        batch = AttentionBatch(ints(starts), ints(lens), table, torch.cat(slots))
        out = gpu.paged_attention(self.q[index], self.cache, batch, scale=self.scale, **options)
        return index, out
