"""Planted faults that the same run must see: without them, green means nothing.

Each goes the way of the candidate: the isolation is probed by workers that try, the comparison by a
kernel that answers from memory and by one flipped bit, accuracy by a cut mantissa, the gradient by
zeros, the clock by a baseline that runs twice. A control that is not red makes the verdict void.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernels import bits
from ...kernels.entry_points import Entry
from .calls import Broken, Call, ask, compare
from .formulas import Formula
from .judge import Accuracy, Gradients, Wanted
from .records import Control, Isolation
from .watch import Nursery, StoppedError, Worker

PROBES = {"network": "seccomp", "process": "seccomp", "files": "landlock"}
_KEPT_MANTISSA = {torch.float32: (23, 8), torch.bfloat16: (7, 3), torch.float16: (10, 4)}


def isolation_controls(nursery: Nursery, folder: Path, held: Isolation) -> list[Control]:
    """Workers that try to open a socket, to fork and to read this package."""
    controls: list[Control] = []
    for probe, part in PROBES.items():
        if part in held.waived:
            continue
        worker = nursery.start(folder, probe=probe)
        try:
            answer, _ = worker.ask({"do": "probe"})
            red, detail = answer.get("reached") is False, "was refused"
        except StoppedError as stopped:
            red, detail = stopped.rule == "syscall", stopped.detail
        finally:
            worker.end()
        detail, name = detail if red else "went through", f"{probe} probe"
        controls.append(Control(name=name, question="isolation", red=red, detail=detail))
    return controls


def flipped_bit(call: Call, outputs: Sequence[Tensor], *, pattern: str) -> Control:
    """One bit of one row of a hundred or more, in what the candidate returned."""
    changed = [each.clone() for each in outputs]
    first = changed[0]
    row = first.shape[0] * 2 // 3
    bits.int_view(first)[(row, *[0] * (first.dim() - 1))] ^= 1
    try:
        _, found = compare(call, changed, pattern=pattern)
        seen = None if found is None else f"seen at {list(found.coordinate)}"
    except Broken as broken:
        seen = str(broken)
    detail = seen or "one flipped bit was not seen"
    return Control(name="one flipped bit", question="bits", red=seen is not None, detail=detail)


def stale_kernel(worker: Worker, calls: Sequence[Call], *, pattern: str) -> Control:
    """A kernel that answers by the address of its inputs, asked what the candidate was asked."""
    for call in calls:
        asked = Call(
            entry="stale", label=call.label, variation=call.variation, arguments=call.arguments,
            expected=call.expected, kept=call.kept, off=call.off,
        )  # fmt: skip
        try:
            outputs = ask(worker, asked, pattern=pattern)
            _, found = compare(asked, outputs, pattern=pattern)
        except Broken as broken:
            return Control(name="stale kernel", question="bits", red=True, detail=str(broken))
        if found is not None:
            detail = f"{call.variation}: {found}"
            return Control(name="stale kernel", question="bits", red=True, detail=detail)
    detail = "a kernel that answers from memory was not seen"
    return Control(name="stale kernel", question="bits", red=False, detail=detail)


def cut_mantissa(
    formula: Formula, answers: Sequence[tuple[Sequence[Any], Sequence[Tensor]]]
) -> Control:
    """The candidate's own answers with about half of their mantissa."""
    judged = Accuracy(formula=formula)
    for arguments, outputs in answers:
        judged.add(arguments, [_cut(each) for each in outputs])
    red = judged.answer().status == "fail"
    detail = f"error {judged.error:.3g} beside plain torch's {judged.stock:.3g}"
    return Control(name="cut mantissa", question="accuracy", red=red, detail=detail)


def _cut(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _KEPT_MANTISSA:
        return tensor
    whole, kept = _KEPT_MANTISSA[tensor.dtype]
    view = bits.int_view(tensor.clone())
    mask = -1 << (whole - kept)
    return (view & mask).view(tensor.dtype)


def zero_gradient(
    wanted: Wanted, answers: Sequence[tuple[Entry, Sequence[Any], Sequence[Tensor]]]
) -> Control:
    """Backwards that are all zero, as a detached graph gives."""
    names = tuple(dict.fromkeys(entry.name for entry, _, _ in answers))
    judged = Gradients(names=names, wanted=wanted)
    for entry, arguments, outputs in answers:
        judged.add(entry, arguments, [torch.zeros_like(each) for each in outputs])
    red = judged.answer().status == "fail"
    detail = f"error {judged.error:.3g}, {judged.tolerance:.3g} is allowed"
    return Control(name="zero gradient", question="gradient", red=red, detail=detail)


def twice_as_slow(ratio: float, floor: float) -> Control:
    """The baseline run twice beside itself."""
    detail = f"ratio {ratio:.2f}, about 0.5 is right"
    return Control(name="run twice", question="speed", red=ratio < floor, detail=detail)
