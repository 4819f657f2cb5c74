"""Recurrent mixers as sites: what they keep between tokens, and who carries it.

A mixer (gated delta net, KDA, Mamba-2) is cut into parts: a convolution, gates and norms of single
rows, and the recurrence itself. Each part is a site::

    model.layers.0.linear_attn#conv          convolution              reads the rows before
    model.layers.0.linear_attn#decay         decay                    row by row
    model.layers.0.linear_attn#recurrence    recurrence_gated_delta   reads the state before

Parts that read state ask the **context** that the engine passes in as ``batch`` (as attention does,
:mod:`.attention`); without an engine, rows are whole requests packed by their position ids. Under a
contract the context calls the kernel; under ``stock`` it carries transformers' own state from step
to step (:meth:`RecurrentContext.carry`). The families are in :mod:`.recurrent_families`; a module
belongs to one only if the cut forward gives its own bits on a trial run.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from ..kernels.errors import CheckpointError

_TRIAL_ROWS = 37
Kind = Literal["ssd", "gated_delta", "kda"]
Rows = tuple[Tensor, ...]

StockStep = Callable[[Rows, "Tensor | None", bool], tuple[Tensor, "Tensor | None"]]
"""``(rows [B, n, ...], state or None, decode) -> (output [B, n, ...], state after the last row)``:
transformers' arithmetic for consecutive rows. decode: one row on top of a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentLayer:
    """What one mixer keeps: a state per value head, and the last rows of its convolution.

    chunk: rows between two states, counted from position 0. channels: of the convolution. rows:
    what a recurrence keeps and multiplies rows in: bfloat16 under the contract in blocks.

        RecurrentLayer(index=0, path="model.layers.0.linear_attn", kind="gated_delta", chunk=64,
                       key_heads=2, value_heads=4, key_dim=48, value_dim=56, channels=416)
    """

    index: int
    path: str
    kind: Kind
    chunk: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    channels: int
    rows: torch.dtype = torch.float32

    @property
    def page_width(self) -> int:
        """Value columns of a page of its recurrence."""
        if self.rows != torch.bfloat16:
            return self.value_dim
        from ..kernels.recurrence.gpu_blocks import width_of

        return width_of(self.chunk, self.key_dim, self.value_dim, self.kind != "ssd")

    @property
    def per_channel(self) -> bool:
        """Whether each key channel decays by itself."""
        return self.kind == "kda"


class RecurrentContext(Protocol):
    """What an engine's batch object offers to recurrent mixers. T rows, in the engine's order."""

    def convolve(
        self, layer: RecurrentLayer, x: Tensor, weight: Tensor, bias: Tensor | None,
        activation: str | None,
    ) -> Tensor:  # fmt: skip
        """``[T, D]`` by contract from ``x [T, D]``, ``weight [D, W]``."""
        ...

    def recur(
        self, layer: RecurrentLayer, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
        beta: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """fp32 ``[T, HV, V]`` by contract."""
        ...

    def carry(self, layer: RecurrentLayer, part: str, rows: Rows, step: StockStep) -> Tensor:
        """``step`` over each request's rows, on top of the state that it left in ``part``."""
        ...


@dataclass(frozen=True, slots=True)
class WholeRequests:
    """Whole requests back to back: nothing is kept. ``query_start`` is int32 [requests + 1]."""

    query_start: Tensor

    def convolve(
        self, layer: RecurrentLayer, x: Tensor, weight: Tensor, bias: Tensor | None,
        activation: str | None,
    ) -> Tensor:  # fmt: skip
        """See :class:`RecurrentContext`; differentiable."""
        from ..kernels.convolution import packed_convolution

        return packed_convolution(x, weight, bias, cast(Any, activation), self.query_start)

    def recur(
        self, layer: RecurrentLayer, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
        beta: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """See :class:`RecurrentContext`; differentiable."""
        from ..kernels.recurrence import packed_recurrence

        start = self.query_start
        return packed_recurrence(layer.kind, q, k, v, g, beta, start, layer.chunk, dtype=layer.rows)

    def carry(self, layer: RecurrentLayer, part: str, rows: Rows, step: StockStep) -> Tensor:
        """See :class:`RecurrentContext`."""
        starts = self.query_start.tolist()
        pieces = (
            step(tuple(x[None, a:b] for x in rows), None, False)[0][0]
            for a, b in pairwise(starts) if b > a
        )  # fmt: skip
        return torch.cat(list(pieces))


class TransformersState:
    """transformers' own cache, or none: rows are ``[B * S]`` of a batch that it knows."""

    def __init__(self, cache: Any, layer_idx: int, batch: int) -> None:
        self.cache, self.index, self.batch = cache, layer_idx, batch
        self.going_on = cache is not None and bool(cache.has_previous_state(layer_idx))

    def carry(self, layer: RecurrentLayer, part: str, rows: Rows, step: StockStep) -> Tensor:
        """See :class:`RecurrentContext`; state is read from and written to the cache."""
        rows = tuple(x.unflatten(0, (self.batch, -1)) for x in rows)
        decode = self.going_on and rows[0].shape[1] == 1
        kept = self._kept(part) if self.going_on else None
        output, state = step(rows, kept, decode)
        if self.cache is not None and part == "conv":
            x, width = rows[0].transpose(1, 2), cast(Tensor, state).shape[-1]
            self.cache.update_conv_state(x, self.index, conv_kernel_size=width)
        elif self.cache is not None and part == "recurrent":
            self.cache.update_recurrent_state(state, self.index)
        return output.flatten(0, 1)

    def _kept(self, part: str) -> Tensor | None:
        own = self.cache.layers[self.index]
        states = {"conv": own.conv_states, "recurrent": own.recurrent_states}
        return states[part][0] if part in states else None

    def convolve(
        self, layer: RecurrentLayer, x: Tensor, weight: Tensor, bias: Tensor | None,
        activation: str | None,
    ) -> Tensor:  # fmt: skip
        """Never asked: transformers' own cache serves stock alone (see install_mixer)."""
        raise AssertionError(layer.path)

    def recur(
        self, layer: RecurrentLayer, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
        beta: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Never asked."""
        raise AssertionError(layer.path)


Run = Callable[[RecurrentContext, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One site of a mixer. weights: names of its parameters below the mixer. alone: whether it can
    run again on other rows, under stock and by contract."""

    op_class: str
    stock: Run
    aligned: Run
    weights: tuple[str, ...] = ()
    alone: tuple[bool, bool] = (True, True)


class Mixer(Protocol):
    """One family, around one module."""

    layer: RecurrentLayer
    """What it keeps."""

    @property
    def parts(self) -> Mapping[str, Part]:
        """Its sites, by part."""
        ...

    def compute(self, hidden: Tensor, mask: Tensor | None, run: Callable[..., Tensor]) -> Tensor:
        """The mixer's forward on ``hidden [B, S, H]``; ``run(part, **rows)`` computes a part."""
        ...


def mixer_facts(path: str, module: nn.Module, config: Any) -> Mapping[str, Any] | None:
    """``mixer`` of a recurrent mixer, proved by running it, else None."""
    mixer = _mixer(path, module)
    if mixer is None:
        return None
    _check_chunk(mixer.layer, config)
    return {"mixer": mixer} if _proves(mixer, module, int(config.hidden_size)) else None


def recurrent_chunks(module: nn.Module) -> frozenset[int]:
    """Chunk sizes of a model's recurrent mixers; none without."""
    found = (_mixer(path, child) for path, child in module.named_modules())
    return frozenset(mixer.layer.chunk for mixer in found if mixer is not None)


def _mixer(path: str, module: nn.Module) -> Mixer | None:
    """The mixer that a module is by its name and the functions of its code; not yet proved."""
    from .recurrent_families import FAMILIES

    for name, family in FAMILIES.items():
        if type(module).__name__.endswith(name):
            code = own_code(module)
            return family(path, module) if all(f in code for f in family.functions) else None
    return None


def _check_chunk(layer: RecurrentLayer, config: Any) -> None:
    """The checkpoint may name a chunk size; the code has to compute with it."""
    named = getattr(config, "chunk_size", None)
    if named not in (None, layer.chunk):
        raise CheckpointError(
            f"the config says chunk_size {named}, but the code of {layer.path} computes in chunks "
            f"of {layer.chunk}: hits and states would lie elsewhere than the checkpoint says; "
            "correct chunk_size in config.json, or load the code that belongs to it"
        )


def _proves(mixer: Mixer, module: nn.Module, width: int) -> bool:
    """Whether the cut forward has the module's own bits, on a few rows without a cache."""
    like = next(module.parameters())
    x = torch.randn(2, _TRIAL_ROWS, width, generator=torch.Generator().manual_seed(0))
    x = x.to(like.device, like.dtype)
    for batch in (x, x[:1]):  # stock bits depend on the layout
        context = TransformersState(None, mixer.layer.index, len(batch))

        def run(part: str, context: Any = context, **rows: Tensor) -> Tensor:
            return mixer.parts[part].stock(context, rows)

        with torch.no_grad():
            own = type(module).forward(module, batch)
            if not torch.equal(mixer.compute(batch, None, run), own):
                return False
    return True


def own_code(module: nn.Module) -> dict[str, Any]:
    """Globals of the code of a module's own forward, whatever decorates it."""
    return inspect.unwrap(type(module).forward).__globals__
