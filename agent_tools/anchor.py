"""The alignment anchor: proof that two traces are about the same tokens and the same weights.

Without it a difference says nothing, so nothing is compared: the verdict is MISALIGNED, with the
tensor and its first index, or the request and position. Proven in this order: the same requests,
token for token; every weight and buffer by digest (which covers the rows of the embedding table
that the tokens use); the ids and positions that really entered the model, and the targets and
temperatures that entered its head; each reported logprob is what the logprob operator gave for
that token (``reported.py``).

    anchor = prove_alignment(left_trace, right_trace)
    anchor.misalignment          # None when aligned

Saved traces place a weight difference by row; with both models in memory, ``locate_weight`` gives
the whole index.
"""

import numpy as np
import torch
from torch import nn

from ..kernels import bits
from ..model_recipes.models import LoadedModel
from .compare import ABSENT, DIFFERENT, Comparison
from .records import Anchor, Misalignment
from .reported import foreign_logprob
from .trace import Trace

ENTRY_SLOTS = {
    "embedding": frozenset({"in:ids"}),
    "rotary_table": frozenset({"in:positions"}),
    "logprob": frozenset({"in:targets", "in:temperature"}),
}
"""Operators with inputs that come from the engine, not from another operator."""


def prove_alignment(left: Trace, right: Trace) -> Anchor:
    """Compare everything that must be equal before values may be compared."""
    misalignment = _requests(left, right) or _weights(left, right)
    rows = 0
    if misalignment is None:
        misalignment, rows = _entries(Comparison(left, right, classes=frozenset(ENTRY_SLOTS)))
    if misalignment is None:
        misalignment = foreign_logprob(left, "left") or foreign_logprob(right, "right")
    return Anchor(
        requests=len(left.requests),
        tokens=sum(len(request.tokens) for request in left.requests),
        weights=len(left.weights),
        embedding_rows=rows,
        misalignment=misalignment,
    )


def _requests(left: Trace, right: Trace) -> Misalignment | None:
    mine = {request.id: request for request in left.requests}
    theirs = {request.id: request for request in right.requests}
    for name in [*mine, *theirs]:
        if name not in mine or name not in theirs:
            side = "left" if name in mine else "right"
            return Misalignment(
                what="requests", request=name,
                message=f"request {name} ran on the {side} side only; run the same on both",
            )  # fmt: skip
    for name, request in mine.items():
        position = _first_token_difference(request.tokens, theirs[name].tokens)
        if position is not None:
            return Misalignment(
                what="tokens", request=name, position=position,
                message=f"request {name} has other tokens from position {position} on; "
                "replay the tokens of one side on the other",
            )  # fmt: skip
    return None


def _first_token_difference(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    for position, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def _weights(left: Trace, right: Trace) -> Misalignment | None:
    for name in [*left.weights, *right.weights]:
        if name not in left.weights or name not in right.weights:
            side = "left" if name in left.weights else "right"
            return Misalignment(
                what="weights", tensor=name,
                message=f"tensor {name} exists on the {side} side only; load one checkpoint twice",
            )  # fmt: skip
    for name, mine in left.weights.items():
        theirs = right.weights[name]
        if mine.shape != theirs.shape:
            index, where = None, f"{len(mine)} rows on the left, {len(theirs)} on the right"
        elif np.array_equal(mine, theirs):
            continue
        else:
            row = int((mine != theirs).any(axis=1).argmax())
            index, where = (row,), f"first in row {row}"
        return Misalignment(
            what="weights", tensor=name, index=index,
            message=f"tensor {name} differs ({where}); publish the same weights to both sides",
        )  # fmt: skip
    return None


def _entries(comparison: Comparison) -> tuple[Misalignment | None, int]:
    rows = 0
    for site in comparison.sites:
        for slot in site.inputs.keys() & ENTRY_SLOTS[site.op_class]:
            joined = site.inputs[slot]
            rows += int((joined.state != ABSENT).sum()) if site.op_class == "embedding" else 0
            differing = np.flatnonzero(joined.state == DIFFERENT)
            if len(differing):
                at = comparison.row(site, int(differing[0]))
                name = slot.removeprefix("in:")
                message = (
                    f"{site.site} got another {name} for request {at.request} at position "
                    f"{at.position}; the engine fed the model something else than the request says"
                )
                found = Misalignment(
                    what="inputs", message=message, request=at.request, position=at.position
                )
                return found, rows
    return None, rows


def locate_weight(left: nn.Module, right: nn.Module, name: str) -> tuple[int, ...] | None:
    """First differing index of a parameter or buffer, with both models in memory."""
    mine = dict([*left.named_parameters(), *left.named_buffers()]).get(name)
    theirs = dict([*right.named_parameters(), *right.named_buffers()]).get(name)
    if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return None
    with torch.no_grad():
        difference = bits.first_difference(mine, theirs)
    return None if difference is None else difference.coordinate


def addresses(model: LoadedModel) -> dict[str, int]:
    """Where every tensor lies, those included that no checkpoint holds (rotary frequencies)."""
    module = model.module
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
