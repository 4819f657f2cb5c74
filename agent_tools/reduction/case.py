"""A case: two programs, the tensors of their call, and whether they still differ.

Both sides share one set of tensors. A row operator computes the row in question among ``rows`` rows
of the call (the neighbours are the call's own, or copies of the row); attention computes it as one
of the rows ``[start, stop)`` of a sequence.

    case.differs()          # A and B, in bits, and A repeats itself
    case.along("inner", kept)
"""

import contextlib
import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels import bits
from ...kernels.errors import ZeroMismatchError
from .programs import Layout, Program, layout_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SideCall:
    """How one side computes the row.

    rows, row: number of rows in its call, and which is the one. neighbours: the other rows, by
    input name ``[rows, ...]``; None where they are copies of the row. start, stop: attention's.
    """

    program: Program
    contract: str | None
    fault: str | None = None
    rows: int = 1
    row: int = 0
    neighbours: Mapping[str, Tensor] | None = None
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Switches of the process that change which stock kernel runs."""

    threads: int
    onednn: bool

    @classmethod
    def now(cls) -> "Flags":
        """As they are."""
        return cls(threads=torch.get_num_threads(), onednn=bool(torch.backends.mkldnn.enabled))

    @contextlib.contextmanager
    def set(self) -> Generator[None]:
        """Until the block ends."""
        before = Flags.now()
        self._apply()
        try:
            yield
        finally:
            before._apply()

    def _apply(self) -> None:
        torch.set_num_threads(self.threads)
        torch.backends.mkldnn.enabled = self.onednn


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """tensors: row inputs ``[1, ...]`` and parameters; for attention the whole sequence."""

    op_class: str
    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    left: SideCall
    right: SideCall
    position: int = 0
    """Attention: index of the row in the sequence."""
    flags: Flags = field(default_factory=Flags.now)
    reduced: tuple[str, ...] = field(default=())

    @property
    def layout(self) -> Layout:
        """Axes of every tensor."""
        return layout_of(self.op_class)

    @property
    def nbytes(self) -> int:
        """Bytes of everything a file must hold."""
        own = [*self.tensors.values()]
        for side in (self.left, self.right):
            own += [*(side.neighbours or {}).values()]
        return sum(tensor.nbytes for tensor in own)

    def size(self, axis: str) -> int:
        """Length of an axis; 0 where no tensor has it."""
        for name, tensor in self.tensors.items():
            if axis in self.layout[name]:
                return tensor.shape[self.layout[name].index(axis)]
        return 0

    def along(self, axis: str, kept: Sequence[int]) -> "Case":
        """Only these indices of an axis, everywhere."""
        index = torch.tensor(list(kept))

        def pick(name: str, tensor: Tensor) -> Tensor:
            names = self.layout[name]
            if axis not in names:
                return tensor
            return tensor.index_select(names.index(axis), index).contiguous()

        def side(call: SideCall) -> SideCall:
            if call.neighbours is None:
                return call
            return replace(
                call, neighbours={name: pick(name, t) for name, t in call.neighbours.items()}
            )

        tensors = {name: pick(name, tensor) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, left=side(self.left), right=side(self.right))

    def inputs(self, side: SideCall) -> dict[str, Tensor]:
        """Tensors of one side's call."""
        if self.op_class == "attention":
            return dict(self.tensors)
        inputs = dict(self.tensors)
        for name, names in self.layout.items():
            if name in inputs and names[0] == "rows":
                if side.neighbours is not None:
                    inputs[name] = side.neighbours[name].contiguous()
                else:
                    shape = (side.rows, *inputs[name].shape[1:])
                    inputs[name] = inputs[name].expand(shape).contiguous()
        return inputs

    def run(self, side: SideCall) -> Tensor:
        """The row's output on one side, ``[1, ...]``."""
        settings = {**self.settings, "start": side.start, "stop": side.stop}
        planted: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if side.fault is not None and side.contract is not None:
            from ..faults import planted_kernel

            planted = planted_kernel(side.fault, side.contract)
        with torch.no_grad(), self.flags.set(), planted:
            output = side.program.compiled()(self.inputs(side), settings)
        row = self.position - side.start if self.op_class == "attention" else side.row
        return output[row : row + 1].contiguous()

    def outputs(self) -> tuple[Tensor, Tensor]:
        """The row on both sides."""
        return self.run(self.left), self.run(self.right)

    def differs(self) -> bool:
        """Whether the sides give other bits; inputs that a kernel refuses are no case."""
        try:
            left, right = self.outputs()
        except (ZeroMismatchError, RuntimeError, IndexError):
            return False  # too small for the operator
        if left.shape != right.shape or left.dtype != right.dtype:
            return left.shape == right.shape
        return not bits.equal(left, right)

    def repeats(self) -> bool:
        """Whether both sides give the same bits again."""
        first, second = self.outputs(), self.outputs()
        return all(bits.equal(a, b) for a, b in zip(first, second, strict=True))


def row_digest(row: Tensor) -> str:
    """BLAKE2b-128 of a row's dtype and bits: what a generated file can compute without us."""
    raw = bits.int_view(row.detach().contiguous()).cpu().numpy().tobytes()
    return hashlib.blake2b(str(row.dtype).encode() + raw, digest_size=16).hexdigest()
