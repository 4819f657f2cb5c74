"""Whose keys and values a request really read: state follows the executed schedule.

After a prefix hit, a request attends over rows that another request computed; after a preemption,
over rows that it computed a second time. An attention verdict counts only if all of that state was
compared and is equal on both sides, whoever computed it.

    versions = owner_versions(trace, trace)     # [version, request, position] -> request
    equal = owned_equal(by_position(...), by_position(...), left_versions, right_versions)

Conservative on purpose: a position with several owners over the run must be equal for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..trainer.engines.base import Hit, Schedule, Step
from .trace import Bools, Column, Digests, Trace


@dataclass(frozen=True, slots=True)
class ByPosition:
    """First digest of each (request, position); ``usable`` where present and never contradicted."""

    digests: Digests
    usable: Bools


def by_position(
    column: Column, keys: NDArray[np.int64], shape: tuple[int, ...]
) -> ByPosition:
    """Rearrange a column by the keys of its rows (see ``compare.Comparison``)."""
    own = keys[column.rows]
    unique, first, inverse = np.unique(own, return_index=True, return_inverse=True)
    digests = np.zeros((*shape, 2), np.int64)
    usable = np.zeros(shape, np.bool_)
    where = unique >> 32, unique & 0xFFFFFFFF
    digests[where] = column.digests[first]
    usable[where] = True
    odd = (column.digests != column.digests[first][inverse]).any(axis=1)
    usable[own[odd] >> 32, own[odd] & 0xFFFFFFFF] = False
    return ByPosition(digests, usable)


def owned_equal(
    left: ByPosition,
    right: ByPosition,
    left_owners: NDArray[np.int32],
    right_owners: NDArray[np.int32],
) -> Bools:
    """[request, position]: whoever computed that position's state, both sides have the same."""
    position = np.arange(left.usable.shape[1])
    fine = np.ones(left.usable.shape, np.bool_)
    for mine in left_owners:
        for theirs in right_owners:
            equal = (left.digests[mine, position] == right.digests[theirs, position]).all(axis=2)
            usable = left.usable[mine, position] & right.usable[theirs, position]
            fine &= equal & usable | (mine < 0)
    return fine


def owner_versions(trace: Trace, reference: Trace) -> NDArray[np.int32]:
    """[version, request, position]: which request computed the state that a request read there.

    A request whose state came from more than one place over the run has several versions; -1: it
    never had that position.
    """
    index = {request.id: at for at, request in enumerate(reference.requests)}
    longest = max((len(request.tokens) for request in reference.requests), default=0)
    history = _owner_history(trace.executed, index, longest)
    depth = max((len(versions) for versions in history), default=1)
    return np.stack([
        np.stack([versions[min(v, len(versions) - 1)] for versions in history])
        for v in range(depth)
    ])  # fmt: skip


def _owner_history(
    executed: Schedule, index: Mapping[str, int], longest: int
) -> list[list[NDArray[np.int32]]]:
    now = np.full((len(index), longest), -1, np.int32)
    history: list[list[NDArray[np.int32]]] = [[] for _ in index]

    def note(request: int) -> None:
        versions, state = history[request], now[request].copy()
        if versions and np.array_equal(np.where(versions[-1] < 0, state, versions[-1]), state):
            versions[-1] = state  # it only grew
        else:
            versions.append(state)

    for event in executed.events:
        if isinstance(event, Hit):
            now[index[event.request], : event.upto] = now[index[event.source], : event.upto]
            note(index[event.request])
        elif isinstance(event, Step):
            for piece in event.slices:
                now[index[piece.request], piece.start : piece.stop] = index[piece.request]
                note(index[piece.request])
    for request, versions in enumerate(history):
        if not versions:
            versions.append(now[request])
    return history
