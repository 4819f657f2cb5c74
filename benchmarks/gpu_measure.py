"""Timing on a GPU: medians of CUDA graph replays, of events where a capture is impossible."""

from collections.abc import Callable
from typing import Any

import torch

BF16 = torch.bfloat16
VOCABULARY = 151936
HEADS, KV_HEADS, SIZE = 32, 8, 128

Call = Callable[[], Any]
Row = dict[str, Any]


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


class Replay:
    """A captured graph of some calls; ``time`` is milliseconds per call."""

    def __init__(self, calls: list[Call]) -> None:
        self.count, self.graph = len(calls), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()
        self.graph.replay()

    def time(self) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / self.count


def medians(*calls: list[Call], repeats: int = 9) -> list[float]:
    """Median milliseconds per call of each list, replays interleaved."""
    replays = [Replay(each) for each in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for replay, kept in zip(replays, times, strict=True):
            kept.append(replay.time())
    return [sorted(kept)[len(kept) // 2] for kept in times]


def copy_bandwidth() -> float:
    """GB/s read plus written by a large elementwise copy."""
    a = randn(1 << 29, dtype=torch.float32)
    b = torch.empty_like(a)
    (ms,) = medians([lambda: torch.mul(a, 1.0, out=b)] * 3)
    return 8 * a.numel() / ms / 1e6


def eager_median(call: Call, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times[2:])[repeats // 2]
