"""A complete set of weights as one buffer: how it is cut, and how it is written as a file.

    layout = Layout.of({"model.norm.weight": tensor, ...})
    flat = torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
    layout.fill(flat, weights)                     # one copy, in few launches
    layout.views(flat)["model.norm.weight"]        # the tensor in it

Tensors lie one after the other, wider elements first, without gaps: that is safetensors' own order,
so that :func:`write` puts the buffer into a file as it is.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...kernels.errors import UsageError

CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}

Entry = tuple[str, tuple[int, ...], int]
"""(dtype as safetensors names it, shape, first byte)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each tensor lies. Layout(entries={"a": ("BF16", (3, 4), 0)}, nbytes=24)"""

    entries: Mapping[str, Entry]
    nbytes: int

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> "Layout":
        """Of these tensors; UsageError for a dtype that safetensors has no name for here."""
        entries: dict[str, Entry] = {}
        at = 0
        for name in sorted(weights, key=lambda each: (-weights[each].element_size(), each)):
            tensor = weights[name]
            code = CODES.get(tensor.dtype)
            if code is None:
                raise UsageError(f"tensor {name!r} is {tensor.dtype}, which is not published; "
                                 f"convert it to one of {', '.join(_DTYPES)}")  # fmt: skip
            entries[name] = (code, tuple(tensor.shape), at)
            at += tensor.nbytes
        return cls(entries=entries, nbytes=at)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors in a buffer of uint8 ``[nbytes]``."""
        found: dict[str, Tensor] = {}
        for name, (code, shape, first) in self.entries.items():
            dtype = _DTYPES[code]
            size = dtype.itemsize
            for side in shape:
                size *= side
            found[name] = flat[first : first + size].view(dtype).view(shape)
        return found


@torch.no_grad()
def copy_all(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Every tensor over its namesake, in few launches; does not wait for the device."""
    names = list(targets)
    torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        [targets[name] for name in names],
        [sources[name].detach() for name in names],
        non_blocking=True,
    )


def write(file: Path, layout: Layout, flat: Tensor, about: Mapping[str, str]) -> None:
    """A safetensors file of a buffer in the processor's memory. Raises OSError.

    The interpreter is free meanwhile, unlike in safetensors' own ``save_file``, which copies every
    tensor while it holds it.
    """
    header: dict[str, object] = {"__metadata__": dict(about)}
    ends = [*[first for _, _, first in layout.entries.values()][1:], layout.nbytes]
    for (name, (code, shape, first)), end in zip(layout.entries.items(), ends, strict=True):
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little"))
        opened.write(text)
        opened.write(flat.numpy().data)
