"""What an engine reports against what its logprob operator gave: the last step that nobody watches.

Between the operator and the reported sample an engine slices, stores, shifts, scales or sends
numbers, and none of that is an operator site. Here every reported logprob must have the bits that
the logprob operator gave for the row before that token, and must be one that a probability can
have. A token without such a row was never computed for this request.

    foreign_logprob(trace, "left")      # None: every sample is the operator's own

``prove_alignment`` asks it; ``pytest tests/agent_tools/faults`` plants what it must find.
"""

import numpy as np
import torch

from ..kernels import bits
from .records import Misalignment
from .trace import OUTPUT, Trace

ROUNDING = 1e-6
"""A logprob may exceed 0 by this much where its row's sum is rounded."""


def foreign_logprob(trace: Trace, side: str) -> Misalignment | None:
    """The first sample whose logprob is not its operator's, or is positive; None where all are.

    Traces without the logprob operator (nothing was watched there) give None: coverage says so.
    """
    columns = [
        (key, column)
        for key, column in trace.columns.items()
        if column.op_class == "logprob" and key.slot == OUTPUT
    ]
    samples, table = trace.samples, trace.table
    if not columns or not len(samples.position):
        return None
    rows = np.concatenate([column.rows for _, column in columns])
    given = np.concatenate([column.digests for _, column in columns])
    computed = (table.request[rows].astype(np.int64) << 32) | table.position[rows]
    wanted = (samples.request.astype(np.int64) << 32) | (samples.position - 1)
    values = torch.from_numpy(samples.logprob_bits.copy()).view(torch.float32)
    own = bits.digest_rows(values).cpu().numpy()
    order = np.argsort(computed, kind="stable")
    computed, given = computed[order], given[order]
    first = np.searchsorted(computed, wanted, side="left")
    last = np.searchsorted(computed, wanted, side="right")
    for index in np.flatnonzero(first == last):
        return _named(trace, side, int(index), "no row of the model computed it for this request")
    for index, (start, stop) in enumerate(zip(first, last, strict=True)):
        if not (given[start:stop] == own[index]).all(axis=1).any():
            return _named(trace, side, index, "the logprob operator gave another number there")
    for index in np.flatnonzero(values.numpy() > ROUNDING):
        return _named(trace, side, int(index), "it is positive, so it is the log of no probability")
    return None


def _named(trace: Trace, side: str, index: int, why: str) -> Misalignment:
    name = trace.requests[trace.samples.request[index]].id
    position = int(trace.samples.position[index])
    value = np.asarray(trace.samples.logprob_bits[index], np.int32).view(np.float32)
    return Misalignment(
        what="logprobs", request=name, position=position,
        message=f"the {side} side reports logprob {value:.6g} for request {name} at position "
        f"{position}, but {why}; look at what the engine does between its head and its answer",
    )  # fmt: skip
