"""What ``zm kernels bench`` measures: our operators and the stock calls that they stand beside.

The stock side is tuned alike: the same threads and data, keys and values already contiguous, and
the faster of the ways to write it where there are two. The digest has no stock operator; it stands
beside a copy of the same memory. Shapes are those of SmolLM2-135M.

    work = next(works())
    ours, stock = work.prepare()
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from . import bits
from .attention import AttentionBatch, new_cache, paged_attention, write_kv
from .gated import silu_mul
from .linear import linear
from .logprob import lm_head_logprob
from .rmsnorm import rmsnorm

PAGE = 16
SHAPES = ((576, 576), (576, 1536), (1536, 576), (576, 49152))  # K inputs, N outputs
LINEAR_FLOORS = {1: 0.6, 8: 0.8, 64: 0.8, 512: 0.8}
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A row to be measured; ``prepare`` makes the two calls, ours first, when its turn has come."""

    op: str
    shape: str
    prepare: Callable[[], tuple[Call, Call]]
    stock: str
    contract: str | None
    dtype: torch.dtype = torch.float32
    floor: float | None = None
    heavy: bool = False


def time_of(call: Call) -> int:
    """Nanoseconds of one call."""
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def _count(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def works() -> Iterator[Work]:
    """Every row of the table, in its order."""
    from .bench_works_recurrent import works_recurrent  # it builds on this module

    for rows, floor in LINEAR_FLOORS.items():
        for k, n in SHAPES:
            yield _linear(rows, k, n, torch.float32, floor)
    yield from (
        _attention(1000, 1000, 1, torch.float32, 0.6),
        _attention(1, 1000, 1, torch.float32, 0.8),
    )
    yield _attention(1, 1000, 16, torch.float32, None)
    for rows in (1, 64, 512):
        yield _rmsnorm(rows, torch.float32)
        yield _silu_mul(rows, torch.float32)
    for rows in (1, 64):
        yield _logprob(rows)
    yield from (_digest(1, 576), _digest(64, 576), _digest(512, 1536), _digest(64, 49152))
    for rows in (1, 64):
        yield _linear(rows, 576, 1536, torch.bfloat16, None)
    yield from (
        _attention(1000, 1000, 1, torch.bfloat16, None),
        _attention(1, 1000, 1, torch.bfloat16, None),
    )
    yield from (_rmsnorm(64, torch.bfloat16), _silu_mul(64, torch.bfloat16))
    yield from works_recurrent()


def _linear(rows: int, k: int, n: int, dtype: torch.dtype, floor: float | None) -> Work:
    def prepare() -> tuple[Call, Call]:
        x, weight = _random(rows, k, dtype=dtype), _random(n, k, dtype=dtype)
        return lambda: linear(x, weight), lambda: functional.linear(x, weight)

    name = str(dtype).removeprefix("torch.")
    return Work(
        op="linear",
        shape=f"{_count(rows)}, {k} to {n}",
        prepare=prepare,
        stock="F.linear",
        contract=f"linear.chain.{name}.cpu.v1",
        dtype=dtype,
        floor=floor,
        heavy=rows * n > 10_000_000,
    )


def _attention(
    rows: int, keys: int, requests: int, dtype: torch.dtype, floor: float | None
) -> Work:
    """Every request has ``rows`` queries at the end of ``keys`` positions."""

    def prepare() -> tuple[Call, Call]:
        pages = -(-keys // PAGE)
        q = _random(requests * rows, HEADS, HEAD_DIM, dtype=dtype)
        k, v = (_random(requests, keys, KV_HEADS, HEAD_DIM, dtype=dtype) + side for side in (0, 1))
        table = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(0))
        table = table.to(torch.int32).view(requests, pages)
        position = torch.arange(keys)
        slots = table.long()[:, position // PAGE] * PAGE + position % PAGE
        cache = new_cache(requests * pages, KV_HEADS, HEAD_DIM, dtype=dtype)
        write_kv(cache, k.flatten(0, 1), v.flatten(0, 1), slots.flatten())
        batch = AttentionBatch(
            query_start=torch.arange(requests + 1, dtype=torch.int32) * rows,
            kv_len=torch.full((requests,), keys, dtype=torch.int32),
            block_table=table,
            slot=slots[:, -rows:].flatten().contiguous(),
        )
        scale = HEAD_DIM**-0.5
        ours = lambda: paged_attention(q, cache, batch, scale=scale)  # noqa: E731
        return ours, _faster(_stock_attention(q.view(requests, rows, HEADS, HEAD_DIM), k, v))

    name = str(dtype).removeprefix("torch.")
    kind = "decode" if rows == 1 else "prefill"
    batch_label = f", {requests} requests" if requests > 1 else ""
    return Work(
        op=f"attention {kind}",
        shape=f"{keys} keys{batch_label}, heads {HEADS}/{KV_HEADS} of {HEAD_DIM}",
        prepare=prepare,
        stock="F.scaled_dot_product_attention",
        contract=f"attention.pages16.{name}.cpu.v1",
        dtype=dtype,
        floor=floor,
    )


def _stock_attention(q: Tensor, k: Tensor, v: Tensor) -> list[Call]:
    """SDPA on contiguous tensors: with grouped kv heads, and with kv heads repeated beforehand."""
    causal = q.shape[1] > 1
    q, k, v = (each.transpose(1, 2).contiguous() for each in (q, k, v))
    wide_k, wide_v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
    attend = functional.scaled_dot_product_attention
    return [
        lambda: attend(q, wide_k, wide_v, is_causal=causal),
        lambda: attend(q, k, v, is_causal=causal, enable_gqa=True),
    ]


def _faster(calls: list[Call]) -> Call:
    """The call with the shortest of a few times."""
    best = {call: min(time_of(call) for _ in range(5)) for call in calls}
    return min(best, key=lambda call: best[call])


def _rmsnorm(rows: int, dtype: torch.dtype) -> Work:
    def prepare() -> tuple[Call, Call]:
        x, weight = _random(rows, 576, dtype=dtype), _random(576, dtype=dtype)
        stock = lambda: functional.rms_norm(x, (576,), weight, 1e-5)  # noqa: E731
        return lambda: rmsnorm(x, weight, 1e-5), stock

    name = str(dtype).removeprefix("torch.")
    return Work(
        op="rmsnorm",
        shape=f"{_count(rows)} of 576",
        prepare=prepare,
        stock="F.rms_norm",
        contract=f"rmsnorm.lanes16.{name}.cpu.v1",
        dtype=dtype,
    )


def _silu_mul(rows: int, dtype: torch.dtype) -> Work:
    def prepare() -> tuple[Call, Call]:
        gate, up = _random(rows, 1536, dtype=dtype), _random(rows, 1536, dtype=dtype) + 1
        return lambda: silu_mul(gate, up), lambda: functional.silu(gate) * up

    name = str(dtype).removeprefix("torch.")
    return Work(
        op="silu_mul",
        shape=f"{_count(rows)} of 1536",
        prepare=prepare,
        stock="F.silu(gate) * up",
        contract=f"gated.silu.{name}.cpu.v1",
        dtype=dtype,
    )


def _logprob(rows: int) -> Work:
    def prepare() -> tuple[Call, Call]:
        h, weight = _random(rows, 576), _random(49152, 576) * 0.05
        targets = torch.arange(rows) * 37

        def stock() -> Tensor:
            logits = functional.log_softmax(functional.linear(h, weight), dim=-1)
            return logits.gather(1, targets[:, None])[:, 0]

        return lambda: lm_head_logprob(h, weight, targets), stock

    return Work(
        op="lm_head_logprob",
        shape=f"{_count(rows)}, 576 to 49152",
        prepare=prepare,
        stock="F.log_softmax(F.linear).gather",
        contract="lm_head.chain.float32.cpu.v1",
    )


def _digest(rows: int, width: int) -> Work:
    def prepare() -> tuple[Call, Call]:
        x = _random(rows, width)
        copy = torch.empty_like(x)
        return lambda: bits.digest_rows(x), lambda: copy.copy_(x)

    return Work(
        op="digest_rows",
        shape=f"{_count(rows)} of {width}",
        prepare=prepare,
        stock="copy_",
        contract=None,
    )
