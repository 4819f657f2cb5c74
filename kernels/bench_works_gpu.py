"""What ``zm kernels bench --device cuda`` measures, at layers of Llama-8B: ours and torch's.

Both sides are captured once and replayed, so that neither pays for launches; a replay is timed by
events. ``benchmarks/gpu.py`` has many more shapes and rotates weights past the L2 cache; this table
is the short answer on the machine at hand.

Legend: M rows, N outputs, K inputs, T tokens, D head size.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .attention import gpu as attention
from .bench_works import Call, Work
from .gated import silu_mul
from .linear import linear
from .logprob import gpu as logprob
from .rmsnorm import rmsnorm
from .rotary import gpu as rotary

LAYERS = ((6144, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 64, 512, 4096)
HEADS, KV_HEADS, SIZE, VOCABULARY = 32, 8, 128, 151936
BF16 = torch.bfloat16


def replayed(call: Call) -> Call:
    """The call as a captured graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def time_on_gpu(call: Call) -> int:
    """Nanoseconds of one call, by events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return max(1, round(start.elapsed_time(stop) * 1e6))


def _random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def works_gpu() -> Iterator[Work]:
    """Every row of the table, in its order."""
    for m in ROWS:
        for n, k in LAYERS:
            yield _linear(m, n, k)
    for length in (2048, 8192):
        yield _prefill(length)
    for m, h in ((4096, 4096), (8192, 2048)):
        yield _rmsnorm(m, h)
    yield _row("gated", "8192 x 14336", _silu_mul, "F.silu(gate) * up", "gated.exp2")
    yield _row("rotary", "8192 tokens", _rotary, "x * cos + rotated * sin", "rotary.halves")
    yield _row("logprob", f"1024 x {VOCABULARY}", _logprob, "F.log_softmax", "logprob.blocks")


def _row(
    op: str,
    shape: str,
    prepare: Callable[[], tuple[Call, Call]],
    stock: str,
    contract: str,
    floor: float | None = None,
) -> Work:
    dtype = torch.float32 if op == "logprob" else BF16
    name = str(dtype).removeprefix("torch.")
    return Work(
        op=op,
        shape=shape,
        prepare=prepare,
        stock=stock,
        contract=f"{contract}.{name}.sm90.v1",
        dtype=dtype,
        floor=floor,
    )


def _linear(m: int, n: int, k: int) -> Work:
    def prepare() -> tuple[Call, Call]:
        x, w = _random(m, k), _random(n, k)
        return lambda: linear(x, w), lambda: functional.linear(x, w)

    floor = 0.93 if m >= 512 else 0.7 if m >= 64 else 0.8
    return _row("linear", f"{m} rows, {k} to {n}", prepare, "F.linear", "linear.L", floor)


def _prefill(length: int) -> Work:
    def prepare() -> tuple[Call, Call]:
        q, k, v = (_random(length, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
        start = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        one, keys, values = (
            each.transpose(0, 1)[None].repeat_interleave(HEADS // each.shape[1], 1).contiguous()
            for each in (q, k, v)
        )
        return (
            lambda: attention.packed_attention_op(q, k, v, start, SIZE**-0.5, 0, 0.0, None),
            lambda: functional.scaled_dot_product_attention(one, keys, values, is_causal=True),
        )

    stock = "F.scaled_dot_product_attention"
    return _row("attention", f"prefill {length}", prepare, stock, "attention.split1024")


def _rmsnorm(m: int, h: int) -> Work:
    def prepare() -> tuple[Call, Call]:
        x, w = _random(m, h), _random(h)
        return lambda: rmsnorm(x, w, 1e-6), lambda: functional.rms_norm(x, (h,), w, 1e-6)

    return _row("rmsnorm", f"{m} x {h}", prepare, "F.rms_norm", "rmsnorm.lanes")


def _silu_mul() -> tuple[Call, Call]:
    gate, up = _random(8192, 14336), _random(8192, 14336)
    return lambda: silu_mul(gate, up), lambda: functional.silu(gate) * up


def _rotary() -> tuple[Call, Call]:
    x, cos, sin = (_random(8192, HEADS, SIZE), *(_random(8192, SIZE).float() for _ in range(2)))

    def stock() -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    return lambda: rotary.rotary_op(x, cos, sin, False), stock


def _logprob() -> tuple[Call, Call]:
    logits = _random(1024, VOCABULARY, dtype=torch.float32)
    targets = torch.arange(1024, device="cuda")
    temperature = torch.ones(1024, device="cuda")
    return (
        lambda: logprob.logprob_op(logits, targets, temperature),
        lambda: functional.log_softmax(logits, -1).gather(1, targets[:, None]),
    )
