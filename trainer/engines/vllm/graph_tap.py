"""Digests from inside captured graphs: a live vLLM watched with CUDA graphs and compilation on.

Hooks see nothing of a replayed graph; the operators' own bodies (:mod:`.operators`, attention's
backend) do run, eagerly, compiled and while a graph is captured. With :class:`GraphTaps` active
from before the capture on, each digests its output's rows into memory that every graph shares, and
a replay refreshes it. After each step the rows that the scheduler had put into it are read:

    make_engine("vllm", model, "aligned", graphs=True).run_tapped(scenario, keep)

Which layer an operator belongs to is known by the address of its weight, which captured graphs
keep; one without a weight belongs to the one before it. Coverage: norms and the additions inside
them, linear layers (fused as vLLM has them), rotations, attention, gated products, blocks of
experts. Left out: embedding, rotary table, cache writes, head and logprob, which run outside of
graphs and show in the tokens' logprobs; inputs; vLLM's own kernels, which have no taps.

So that equal digests mean something, the graphs carry a fault, too: one linear layer flips the last
bit of its output's first element while a flag on the device is set (:meth:`GraphTaps.faulty`). The
very graphs that were found equal, replayed with it, must be found different, at that layer.

Nothing here imports vLLM. Legend: T rows.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels import bits
from ....kernels.errors import CapabilityError
from ....kernels.gpu.digest import digest_into
from ....model_recipes.models import LoadedModel
from ....model_recipes.plan import Plan

MOST_CAPTURED = 1024
"""Rows of the largest graph that vLLM captures by itself."""
Key = tuple[str, Any]
"""Operator, and what tells its layer: a weight's address or a layer's name."""
_ACTIVE: "list[GraphTaps]" = []


def tapped(op: str, x: Tensor, weight: Tensor | None = None, *, layer: str | None = None) -> None:
    """Digest the rows of an operator's output where somebody asked; else one test."""
    for taps in _ACTIVE:
        taps.record(op, x, weight, layer)


def watching() -> bool:
    """Whether somebody asked."""
    return bool(_ACTIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one step's operators gave. rows: (request, position); digests: int64 [rows, 2]."""

    rows: tuple[tuple[str, int], ...]
    digests: Mapping[str, NDArray[np.int64]]


class GraphTaps:
    """See the module. outputs: of one forward, at most; rows: of one step, at most."""

    def __init__(self, *, outputs: int, rows: int, device: torch.device, faulty: int = 0) -> None:
        """faulty: which of the linear layers, by execution, carries the fault."""
        self._store = torch.zeros(outputs, rows, 2, dtype=torch.int64, device=device)
        self._slots: dict[Key, int] = {}
        self._after = 0
        self._linears: list[Key] = []
        self._names: Mapping[int, str] = {}
        self._fault_at = faulty
        self._flip = torch.zeros((), dtype=torch.int32, device=device)

    def start(self) -> None:
        """From now on, graphs that are captured carry taps."""
        _ACTIVE[:] = [self]

    def stop(self) -> None:
        """Nothing is recorded any more; graphs keep the taps they have."""
        if self in _ACTIVE:
            _ACTIVE.remove(self)

    def record(self, op: str, x: Tensor, weight: Tensor | None, layer: str | None) -> None:
        """Into the slot of this operator of this layer."""
        if weight is not None:
            self._after = weight.data_ptr()
        key = op, layer or self._after
        if op == "linear" and key not in self._slots:
            self._linears.append(key)
        slot = self._slots.setdefault(key, len(self._slots))
        if slot >= self._store.shape[0] or x.shape[0] > self._store.shape[1]:
            raise CapabilityError(
                f"taps of {self._store.shape[0]} outputs of {self._store.shape[1]} rows do not "
                f"hold output {slot} of {x.shape[0]} rows; report this with the model's name"
            )
        if op == "linear" and key == self._fault:
            bits.int_view(x)[:1, :1].bitwise_xor_(self._flip)
        digest_into(x, self._store[slot, : x.shape[0]])

    @property
    def _fault(self) -> Key | None:
        return self._linears[self._fault_at] if len(self._linears) > self._fault_at else None

    @contextmanager
    def faulty(self) -> Generator[str]:
        """In the block, captured graphs and eager steps compute one bit wrong; yields the site.

        CapabilityError before anything was read.
        """
        if self._fault is None or not self._names:
            raise CapabilityError("no operator with a tap has run; run the engine once before")
        self._flip.fill_(1)
        try:
            yield site_of(self._fault, self._names)
        finally:
            self._flip.zero_()

    @contextmanager
    def reading(
        self,
        runner: Any,
        rows_of: Callable[[Any], Iterable[tuple[str, int]]],
        names: Mapping[int, str],
        keep: Callable[[Seen], None],
    ) -> Generator[None]:
        """Read after every step in the block. rows_of: of a scheduler's output, in the batch's
        order; names: address of a weight -> its module."""
        own, self._names = runner.execute_model, names

        def execute_model(output: Any, *arguments: Any, **keywords: Any) -> Any:
            self._store.zero_()  # a graph that did not refresh a slot leaves it empty
            result = own(output, *arguments, **keywords)
            if output.total_num_scheduled_tokens:
                rows = tuple(rows_of(output))
                taken = self._store[: len(self._slots), : len(rows)]
                found = taken.to("cpu", copy=True).numpy()
                sites = {
                    site_of(key, names): found[slot]
                    for key, slot in self._slots.items()
                    if found[slot].any()
                }
                keep(Seen(rows=rows, digests=sites))
            return result

        runner.execute_model = execute_model
        self.start()  # for what runs outside of graphs
        try:
            yield
        finally:
            self.stop()
            del runner.execute_model


def started_taps(loaded: LoadedModel, plan: Plan, most_rows: int) -> GraphTaps:
    """Taps for a model, active before vLLM captures anything; CapabilityError for stock kernels."""
    if plan.is_stock:
        raise CapabilityError(
            "vLLM's own kernels have no taps; trace them eagerly (vllm+eager+runner=1), or use a "
            "plan"
        )
    taps = GraphTaps(
        outputs=16 * (int(loaded.config.num_hidden_layers) + 1),
        rows=max(most_rows, MOST_CAPTURED),
        device=loaded.device,
        faulty=int(loaded.config.num_hidden_layers),  # a layer has at least two
    )
    taps.start()
    return taps


def site_of(key: Key, names: Mapping[int, str]) -> str:
    """The trainer's name of a site, fused projections under vLLM's."""
    op, at = key
    if op == "attention":
        return f"{at.rpartition('.')[0]}#attention"
    path = names.get(at, f"unknown {at:x}")
    if op in ("linear", "norm"):
        return path
    if op == "sum":
        return addition_of(path, names)
    return f"{path.rpartition('.')[0]}#{op}"


def addition_of(norm: str, names: Mapping[int, str]) -> str:
    """The addition in front of a fused norm: its own layer's, or the last of the one before."""
    layer, _, name = norm.rpartition(".")
    if name == "post_attention_layernorm":
        return f"{layer}#add_0"
    if name == "norm":
        inputs = [path for path in names.values() if path.endswith(".input_layernorm")]
        return f"{inputs[-1].rpartition('.')[0]}#add_1"
    stem, _, index = layer.rpartition(".")
    return f"{stem}.{int(index) - 1}#add_1"
