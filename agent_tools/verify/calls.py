"""One call of a candidate as data, and what its answer is worth.

    call = Call(entry="forward", label="rows 9, width 77", variation="as it is", ...)
    outputs = ask(worker, call)            # raw tensors; Broken names the rule otherwise

Everything that decides is here and in ``kernels/bits.py``: the worker only says what it has in
memory. Blocks of inputs come back whole, guards included, and are compared with what was sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels import bits
from .serve import GUARD, PATTERNS, raw
from .watch import StoppedError, Worker


class Broken(Exception):
    """A rule that one call broke."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Arguments for one entry, and what must come out.

    expected: None where the candidate's own first answer is the measure (a new contract). kept:
    rows that count (None: all); the others got NaN. off: one element off alignment.
    """

    entry: str
    label: str
    variation: str
    arguments: tuple[Any, ...]
    expected: Sequence[Tensor] | None
    kept: Tensor | None = None
    off: bool = False

    @property
    def where(self) -> str:
        """For reports."""
        return f"{self.entry}, {self.label}, {self.variation}"


def described(arguments: Sequence[Any]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Arguments as the head and the body of a request."""
    specs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for each in arguments:
        if isinstance(each, Tensor):
            name, part = str(each.dtype).removeprefix("torch."), raw(each)
            specs.append({"dtype": name, "shape": list(each.shape), "bytes": len(part)})
            parts.append(part)
        elif isinstance(each, torch.dtype):
            specs.append({"name": str(each).removeprefix("torch.")})
        else:
            specs.append({"value": each})
    return specs, parts


def ask(worker: Worker, call: Call, *, pattern: str) -> list[Tensor | None]:
    """Run one call; its outputs, or Broken for all that can be said without expected bits."""
    specs, parts = described(call.arguments)
    expected = call.expected or ()
    sizes = {each.numel() * each.element_size() for each in expected} | {len(p) for p in parts}
    head: dict[str, Any] = {"do": "call", "entry": call.entry, "args": specs, "off": call.off}
    head["sizes"] = sorted(size for size in sizes if size)[-6:]
    answer, body = worker.ask(head, parts)
    raise_failure(answer)
    tensors, rest = parsed(answer.get("outputs"), body)
    _check_inputs(answer, rest, specs, parts, off=call.off, pattern=pattern)
    _check_places(answer)
    if answer.get("guards") is not True:
        raise Broken("guard", "wrote outside a tensor that torch.empty gave it")
    return tensors


def raise_failure(answer: dict[str, Any]) -> None:
    """Broken where the candidate raised."""
    if "error" not in answer:
        return
    text = f"{answer['error']}: {answer.get('text', '')}"
    line = answer.get("line") or []
    memory = "MemoryError" in text or "allocate memory" in text or "out of memory" in text
    where = f" in line {line[0]}" if line else ""
    raise Broken("memory" if memory else "exception", f"raised {text}{where}")


def parsed(outputs: Any, body: bytearray) -> tuple[list[Tensor | None], bytearray]:
    """Tensors out of an answer's body, and what is left of it."""
    tensors: list[Tensor | None] = []
    at = 0
    try:
        for spec in outputs:
            if spec.get("none"):
                tensors.append(None)
                continue
            if "type" in spec:
                rule = "deferred" if spec["type"] not in _PLAIN else "tensors"
                raise Broken(rule, f"returned a {spec['type']} instead of a tensor")
            dtype = getattr(torch, str(spec["dtype"]))
            part = body[at : at + int(spec["bytes"])]
            at += len(part)
            flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
            tensors.append(flat.view([int(n) for n in spec["shape"]]))
    except (AttributeError, TypeError, ValueError, KeyError, RuntimeError) as error:
        raise StoppedError("protocol", f"an answer that no worker gives: {error}") from error
    return tensors, body[at:]


_PLAIN = frozenset(("int", "float", "bool", "str", "tuple", "list", "dict", "NoneType", "Size"))


def _check_inputs(
    answer: dict[str, Any], rest: bytearray, specs: list[dict[str, Any]], parts: list[bytes], *,
    off: bool, pattern: str,
) -> None:  # fmt: skip
    byte = bytes([PATTERNS[pattern]])
    at, placed = 0, [spec for spec in specs if "shape" in spec]
    lengths = answer.get("blocks", [])
    if len(lengths) != len(placed) or sum(lengths) != len(rest):
        raise StoppedError("protocol", "the answer does not hold the inputs")
    for index, (spec, part, length) in enumerate(zip(placed, parts, lengths, strict=True)):
        block = rest[at : at + length]
        at += length
        itemsize = getattr(torch, spec["dtype"]).itemsize
        start = GUARD + (itemsize if off else 0)
        end = start + len(part)
        if bytes(block[start:end]) != part:
            raise Broken("inputs", f"changed its tensor argument {index + 1}")
        if block[:start] != byte * start or block[end:] != byte * (length - end):
            raise Broken("guard", f"wrote beside its tensor argument {index + 1}")


def _check_places(answer: dict[str, Any]) -> None:
    inputs = [int(place) for place, _ in answer.get("inputs", [])]
    taken: list[tuple[int, int]] = []
    for spec in answer["outputs"]:
        if spec.get("none") or not spec["bytes"]:
            continue
        if int(spec["storage"][0]) in inputs:
            raise Broken("alias", "returned its input, or a view of it")
        low = int(spec["at"])
        high = low + int(spec["bytes"])
        if any(low < other_high and other_low < high for other_low, other_high in taken):
            raise Broken("alias", "returned one piece of memory as two outputs")
        taken.append((low, high))


def compare(
    call: Call, outputs: Sequence[Tensor | None], *, pattern: str
) -> tuple[int, bits.Difference | None]:
    """Elements compared and the first difference; Broken where these are not the tensors asked."""
    expected = call.expected or ()
    got = [each for each in outputs if each is not None]
    if len(got) != len(expected):
        raise Broken("tensors", f"returned {len(got)} tensors instead of {len(expected)}")
    elements = 0
    for number, (wanted, each) in enumerate(zip(expected, got, strict=True), 1):
        kept = each if call.kept is None else each[call.kept.cpu()]
        wanted = wanted.cpu()
        if kept.dtype != wanted.dtype or kept.shape != wanted.shape:
            raise Broken(
                "tensors",
                f"output {number} is {kept.dtype} {tuple(kept.shape)} instead of {wanted.dtype} "
                f"{tuple(wanted.shape)}",
            )
        elements += wanted.numel()
        found = bits.first_difference(wanted, kept)
        if found is None:
            continue
        if call.variation == "as it is":
            _name_nonfinite(number, kept, wanted, pattern)
        return elements, found
    return elements, None


def _name_nonfinite(number: int, got: Tensor, wanted: Tensor, pattern: str) -> None:
    differs = bits.int_view(got) != bits.int_view(wanted)
    whole = int.from_bytes(bytes([PATTERNS[pattern]]) * got.element_size(), "little", signed=True)
    untouched = differs & (bits.int_view(got) == (whole if got.element_size() > 1 else whole % 256))
    if bool(untouched.any()):
        count = int(untouched.sum())
        raise Broken("unwritten", f"left {count} elements of output {number} unwritten")
    if bits.nonfinite(wanted) is None and (where := bits.nonfinite(got)) is not None:
        raise Broken("nonfinite", f"output {number} is {float(got[where])} at {list(where)}")
