"""What ``zm kernels bench`` measures of recurrent layers, beside transformers' own torch code.

Head sizes are those of Qwen3-Next, Kimi-Linear and Nemotron-H, with an eighth or so of their heads.
Prefill stands beside the chunk form with the model's chunk size, decode (16 requests in the middle
of a chunk) beside the one-step form; the convolution beside ``conv1d`` and silu. Stock code has
torch alone here: its fused kernels need a GPU.

    work = next(works_recurrent())
    ours, stock = work.prepare()
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .bench_works import Call, Work
from .convolution import packed_convolution
from .recurrence import (
    Kind,
    RowBatch,
    new_recurrence_cache,
    packed_recurrence,
    paged_recurrence,
    stepwise_recurrence,
)

REQUESTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """HK, HV heads; K, V their sizes; C rows per chunk; floor for prefill and decode."""

    kind: Kind
    key_heads: int
    value_heads: int
    key: int
    value: int
    chunk: int

    @property
    def label(self) -> str:
        return (
            f"heads {self.key_heads}/{self.value_heads} of {self.key}x{self.value}, "
            f"chunks of {self.chunk}"
        )


LAYERS = (
    _Layer(kind="gated_delta", key_heads=2, value_heads=4, key=128, value=128, chunk=64),
    _Layer(kind="kda", key_heads=4, value_heads=4, key=128, value=128, chunk=64),
    _Layer(kind="ssd", key_heads=1, value_heads=8, key=128, value=64, chunk=128),
)


def works_recurrent() -> Iterator[Work]:
    """The rows of the table."""
    for layer in LAYERS:
        yield _prefill(layer, 512)
        yield _decode(layer)
    yield _convolution(512, 1024)


Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _inputs(layer: _Layer, rows: int) -> Rows:
    generator = torch.Generator().manual_seed(rows)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k = (
        functional.normalize(drawn(rows, layer.key_heads, layer.key), dim=-1) for _ in range(2)
    )
    channels = (layer.key,) if layer.kind == "kda" else ()
    g = -drawn(rows, layer.value_heads, *channels).square() * 0.2
    beta = drawn(rows, layer.value_heads).sigmoid()
    return q, k, drawn(rows, layer.value_heads, layer.value), g, beta


def _repeated(layer: _Layer, x: Tensor) -> Tensor:
    return x.repeat_interleave(layer.value_heads // layer.key_heads, dim=1)


def _chunked(layer: _Layer, given: Rows) -> Callable[[], Tensor]:
    """Stock's chunk form over one request; keys repeated beforehand, the scale taken back."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    q, k, v, g, beta = given
    if layer.kind == "ssd":
        rate = torch.full((layer.value_heads,), -1.0)
        step = -g
        x = v / step[..., None]  # stock multiplies by the step
        scan: Any = nemotron.mamba2_chunk_scan
        return lambda: scan(x[None], step[None], rate, k[None], q[None], layer.chunk)[0]
    wide_q, wide_k = (_repeated(layer, each)[None] for each in (q * layer.key**0.5, k))
    form: Any = (
        kimi.chunk_kimi_delta_attention
        if layer.kind == "kda"
        else qwen.torch_chunk_gated_delta_rule
    )
    rest = v[None], g[None], beta[None]
    return lambda: form(wide_q, wide_k, *rest, chunk_size=layer.chunk)[0][0]


def _prefill(layer: _Layer, rows: int) -> Work:
    def prepare() -> tuple[Call, Call]:
        given = _inputs(layer, rows)
        q, k, v, g = given[:4]
        beta = None if layer.kind == "ssd" else given[4]
        start = torch.tensor([0, rows])
        chunk = layer.chunk
        ours = lambda: packed_recurrence(layer.kind, q, k, v, g, beta, start, chunk)  # noqa: E731
        return ours, _chunked(layer, given)

    return Work(
        op=f"{layer.kind} prefill",
        shape=f"{rows} rows, {layer.label}",
        prepare=prepare,
        stock="transformers' chunk form",
        contract=f"recurrence.{layer.kind}.float32.cpu.v1",
        heavy=True,
    )


def _decode(layer: _Layer) -> Work:
    """One row of each request, after a chunk and a half."""

    def prepare() -> tuple[Call, Call]:
        before = layer.chunk + layer.chunk // 2
        table = torch.arange(2 * REQUESTS, dtype=torch.int32).view(REQUESTS, 2)
        cache = new_recurrence_cache(
            2 * REQUESTS, layer.chunk, layer.key_heads, layer.value_heads, layer.key, layer.value,
            per_channel=layer.kind == "kda",
        )  # fmt: skip
        parts = [_inputs(layer, before + 1 + at) for at in range(REQUESTS)]
        position = torch.arange(before + 1)
        slots = table.long()[:, position // layer.chunk] * layer.chunk + position % layer.chunk

        def batch(rows: int, total: int) -> RowBatch:
            return RowBatch(
                torch.arange(REQUESTS + 1, dtype=torch.int32) * rows,
                torch.full((REQUESTS,), total, dtype=torch.int32),
                table,
                slots[:, total - rows : total].flatten().contiguous(),
            )

        def rows_of(begin: int, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
            q, k, v, g, beta = (
                torch.cat([part[at][begin:end] for part in parts]) for at in range(5)
            )
            return q, k, v, g, None if layer.kind == "ssd" else beta

        paged_recurrence(layer.kind, *rows_of(0, before), cache, batch(before, before))
        last, step = rows_of(before, before + 1), batch(1, before + 1)

        def ours() -> Tensor:  # a ledger of its own for each call: the step is taken many times
            again = replace(cache, filled=deepcopy(cache.filled))
            return paged_recurrence(layer.kind, *last, again, step)

        return ours, _one_step(layer, parts, before)

    return Work(
        op=f"{layer.kind} decode",
        shape=f"{REQUESTS} requests, {layer.label}",
        prepare=prepare,
        stock="transformers' one-step form",
        contract=f"recurrence.{layer.kind}.float32.cpu.v1",
    )


def _one_step(layer: _Layer, parts: list[Rows], before: int) -> Callable[[], Tensor]:
    """Stock's recurrent form on the state before the row, which it leaves as it was."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    states = []
    for part in parts:
        q, k, v, g, beta = (each[:before] for each in part)
        strength = None if layer.kind == "ssd" else beta
        zero = torch.zeros(1, layer.value_heads, layer.key, layer.value)
        start = torch.tensor([0, before])
        states.append(stepwise_recurrence(layer.kind, q, k, v, g, strength, zero, start)[1])
    state = torch.cat(states)
    q, k, v, g, beta = (torch.stack([part[at][before] for part in parts]) for at in range(5))
    if layer.kind == "ssd":
        step = -g
        x = v / step[..., None]
        wide = (layer.value, layer.key)
        rate = torch.full((layer.value_heads, *wide), -1.0)
        by_value = state.transpose(2, 3).contiguous()
        update: Any = nemotron.mamba2_selective_state_update
        moved = step[..., None].expand(-1, -1, layer.value)
        # it writes the state in place, so each call starts from a copy, as decode would leave it
        return lambda: update(by_value.clone(), x, moved, rate, k, q)
    wide_q, wide_k = (_repeated(layer, each)[:, None] for each in (q * layer.key**0.5, k))
    form: Any = (
        kimi.recurrent_kimi_delta_attention
        if layer.kind == "kda"
        else qwen.torch_recurrent_gated_delta_rule
    )
    rest = v[:, None], g[:, None], beta[:, None]
    return lambda: form(
        wide_q, wide_k, *rest, initial_state=state, output_final_state=True
    )[0][:, 0]


def _convolution(rows: int, channels: int) -> Work:
    def prepare() -> tuple[Call, Call]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, channels, generator=generator)
        weight = torch.randn(channels, 4, generator=generator)
        start, taps = torch.tensor([0, rows]), weight[:, None]

        def stock() -> Tensor:
            z = functional.conv1d(x.t()[None], taps, padding=3, groups=channels)[..., :rows]
            return functional.silu(z)[0].t()

        return lambda: packed_convolution(x, weight, None, "silu", start), stock

    return Work(
        op="convolution",
        shape=f"{rows} rows of {channels}, 4 taps",
        prepare=prepare,
        stock="F.silu(F.conv1d())",
        contract="convolution.taps.float32.cpu.v1",
    )
