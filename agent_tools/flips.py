"""One flipped bit: the smallest fault there is, for self-tests and red controls.

    FlipBit(tracer, site="model.norm", request="a", position=7)    an observer round an observer
    with flipped_weight(module, "model.norm.weight", 5): ...       flipped back on leaving

A flipped activation must be placed at exactly that site, a flipped weight by its digest: most
flipped weight bits change no output at all. ``localize`` proves both before its verdict counts.
"""

import contextlib
import dataclasses
from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn

from ..kernels import bits
from ..kernels.errors import UsageError
from ..trainer.engines.base import Observer, SiteCall


class FlipBit:
    """Observer that flips one bit of one output row, which then flows on, and tells ``inner``.

    element: index in the flattened row (modulo its size); bit: 0 is the least significant.
    """

    def __init__(
        self,
        inner: Observer,
        *,
        site: str,
        request: str,
        position: int,
        element: int = 0,
        bit: int = 0,
    ) -> None:
        self.inner = inner
        self.flips = 0
        self._site, self._where = site, (request, position)
        self._element, self._bit = element, bit
        self._row: int | None = None

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        """Pass on, and find the row."""
        self._row = next((i for i, row in enumerate(rows) if tuple(row) == self._where), None)
        self.inner.begin_rows(step, rows)

    def on_site(self, call: SiteCall, /) -> Tensor | None:
        """Pass on; at the chosen site, with one bit flipped."""
        if self._row is None or call.site.name != self._site:
            return self.inner.on_site(call)
        output = call.output.detach().clone(memory_format=torch.contiguous_format)
        view = bits.int_view(output)[self._row : self._row + 1].view(-1)
        view[self._element % len(view)] ^= 1 << self._bit
        self.flips += 1
        replaced = self.inner.on_site(dataclasses.replace(call, output=output))
        return output if replaced is None else replaced


@contextlib.contextmanager
def flipped_weight(module: nn.Module, name: str, element: int, bit: int = 0) -> Generator[None]:
    """Flip one bit of a parameter or buffer in place; flip it back on leaving."""
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    if name not in tensors:
        raise UsageError(f"the model has no tensor {name!r}; `zm inspect` lists them")
    view = bits.int_view(tensors[name]).view(-1)
    view[element % len(view)] ^= 1 << bit
    try:
        yield
    finally:
        view[element % len(view)] ^= 1 << bit
