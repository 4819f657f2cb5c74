"""Digests of many tensors in one launch: what publication of weights compares on both sides.

    pending = digest_many([embedding, norm, ...], device)    # launches, waits for nothing
    pending.done()                     # whether the GPU has finished it
    lanes, spoiled = pending.read()    # per tensor: two 64-bit lanes; elements that are no number

The values are those of ``kernels.bits.digest_tensor`` before the shape is folded in. Tensors are
cut into spans of blocks, one program each, since a large tensor as one row would keep one program
busy for milliseconds; sums are integers modulo 2**64, so that the cut is part of no value. The same
pass counts elements that are NaN or infinite in bf16, fp16 and fp32 (0 is told for other dtypes).
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CapabilityError, ContractError
from ..reference.digest import BLOCK, GOLDEN, digest_rows, dtype_code, mix_int, words
from .device import programs

SPAN = 16
"""Blocks of 1024 words that one program takes."""
_MASK = (1 << 64) - 1
_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}


class DigestMany:
    """See the module. Every tensor must be contiguous and on one GPU; none may be empty."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        odd = [x for x in self._tensors if not x.is_contiguous() or not x.numel()]
        if odd or len({x.device for x in self._tensors}) > 1:
            raise ContractError(
                "digests of many tensors take contiguous, non-empty ones of one device; digest the "
                "others by kernels.bits.digest_tensor"
            )
        self._parts: list[tuple[list[int], np.ndarray[Any, Any], Tensor]] = []
        widths = [min(x.element_size(), 4) for x in self._tensors]
        for width in sorted(set(widths)):
            self._launch([i for i, w in enumerate(widths) if w == width], 8 * width)
        self._event = torch.cuda.Event() if self._tensors and self._tensors[0].is_cuda else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._tensors[0].device))

    def _launch(self, which: list[int], bits: int) -> None:
        """Tensors whose words are of one width, and where each one's spans begin."""
        rows = [words(self._tensors[i].view(1, -1)) for i in which]
        count = np.array([row.shape[1] for row in rows], np.int64)
        spans = -(-count // (BLOCK * SPAN))
        start = np.concatenate(([0], np.cumsum(spans)))
        tensor = np.repeat(np.arange(len(which)), spans)
        first = (np.arange(start[-1]) - start[:-1][tensor]) * SPAN
        places = [row.data_ptr() for row in rows]
        masks = [_EXPONENTS.get(self._tensors[i].dtype, 0) for i in which]
        columns = [np.asarray(each, np.int64) for each in (places, count, masks, tensor, first)]
        columns = [np.pad(each, (0, len(each) % 2)) for each in columns]  # begin at 16 bytes each
        table, device, total = np.concatenate(columns), rows[0].device, int(start[-1])
        held = torch.from_numpy(table)
        if device.type == "cuda":  # pinned, so that nobody waits for what the GPU does before it
            held = held.pin_memory().to(device, non_blocking=True)
        out = torch.empty(total, 3, dtype=torch.int64, device=device)
        programs(__package__, "digest_kernels").digest_spans_kernel[(total,)](
            *held.split([len(each) for each in columns]), out, SPAN=SPAN, BITS=bits,
            ALIGNED=all(place % 16 == 0 for place in places), num_warps=4,
        )  # fmt: skip
        self._parts.append((which, start, out))

    def done(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Of each tensor: its row digest as two unsigned 64-bit lanes; its elements that are NaN or
        infinite."""
        lanes: list[tuple[int, int]] = [(0, 0)] * len(self._tensors)
        spoiled = [0] * len(self._tensors)
        for which, start, out in self._parts:
            sums = np.add.reduceat(out.cpu().numpy().view(np.uint64), start[:-1], axis=0)
            for i, (a, b, count) in zip(which, sums.tolist(), strict=True):
                x = self._tensors[i]
                head = mix_int(((x.numel() << 8 | dtype_code(x.dtype)) * GOLDEN) & _MASK)
                lanes[i] = mix_int((a + head) & _MASK), mix_int(b ^ head)
                spoiled[i] = count
        return lanes, spoiled


def digest_many(tensors: Sequence[Tensor], device: torch.device) -> DigestMany:
    """Digests under way, of a kernel that was proved against the definition on this device."""
    _prove(device)
    return DigestMany(tensors)


@functools.cache
def _prove(device: torch.device) -> None:
    numbers = torch.arange(BLOCK * SPAN + 1030, device=device).mul(0x5DEECE66D).to(torch.int32)
    numbers = numbers & 0x3FFF3FFF  # finite in every dtype below
    probes = [numbers, numbers.view(torch.bfloat16)[1:], numbers.view(torch.uint8)[:777]]
    lanes, _ = DigestMany([*probes, numbers.view(torch.float32)]).read()
    for probe, found in zip([*probes, numbers.view(torch.float32)], lanes, strict=True):
        wanted = digest_rows(probe.view(1, -1))[0].tolist()
        if [value % (1 << 64) for value in wanted] != list(found):
            raise CapabilityError(
                f"the digest kernel on {device} differs from its definition; run `zm doctor` and "
                "install the Triton that came with this torch"
            )
