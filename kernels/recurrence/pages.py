"""Which rows belong to which request, and on which pages their chunks lie.

    RowBatch(query_start=[0, 3, 4], length=[3, 40], table=[[7, 0, 0], [2, 9, 4]],
             slot=[112, 113, 114, 71])

is, with chunks of 16, a mixed batch of a whole prefill (3 new tokens in page 7) and one decode step
(token 39 of a request in pages 2, 9, 4). A request's rows are the last ones of its ``length``
positions; page n of its table holds its positions n C to n C + C - 1. Pages that a step neither
writes nor begins from may have been dropped: their entries may hold anything.

:class:`Filled` refuses a step that would read rows or states which nobody wrote, or write a row
twice: a prefix hit off a chunk's boundary, pages of another chunk size, a full page reopened.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ContractError


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """Index tensors of one step, all on one device.

    query_start: int32 [B + 1], ascending from 0. length: int32 [B], positions after this step.
    table: int32 [B, widest]. slot: int64 [T], page * chunk + offset of every new row.
    derived: what is made of these once per step, for all layers.
    """

    query_start: Tensor
    length: Tensor
    table: Tensor
    slot: Tensor
    derived: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def __post_init__(self) -> None:
        requests = self.length.numel()
        shaped = (
            self.query_start.shape == (requests + 1,)
            and self.length.dim() == 1
            and self.table.dim() == 2
            and self.table.shape[0] == requests
            and self.slot.dim() == 1
        )
        typed = self.slot.dtype == torch.int64 and all(
            each.dtype == torch.int32 for each in (self.query_start, self.length, self.table)
        )
        parts = (self.query_start, self.length, self.table, self.slot)
        if not (shaped and typed and all(each.is_contiguous() for each in parts)):
            raise ContractError(
                "a row batch holds contiguous int32 query_start [B + 1], length [B], table "
                "[B, widest] and int64 slot [T]; got "
                f"{', '.join(f'{each.dtype} {tuple(each.shape)}' for each in parts)}; build them so"
            )


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``first`` to ``last - 1`` of a page that a step writes; ``begin``: the page whose end
    state the step starts from, or -1."""

    request: int
    page: int
    first: int
    last: int
    begin: int


def spans(batch: RowBatch, chunk: int) -> tuple[Span, ...]:
    """What a step writes, in order; ContractError where rows, lengths, table and slots disagree."""
    if chunk not in batch.derived:
        batch.derived[chunk] = tuple(_spans(batch, chunk))
    return batch.derived[chunk]


def _spans(batch: RowBatch, chunk: int) -> list[Span]:
    starts, lengths = batch.query_start.tolist(), batch.length.tolist()
    tables, slots = batch.table.tolist(), batch.slot.tolist()
    if starts[0] or starts != sorted(starts) or starts[-1] != len(slots):
        raise ContractError(
            f"query_start {starts} does not ascend from 0 to the {len(slots)} rows; pass the row "
            "at which each request begins, and the number of rows at the end"
        )
    found: list[Span] = []
    for request, length in enumerate(lengths):
        row, stop = starts[request], starts[request + 1]
        position = length - (stop - row)
        if position < 0 or -(-length // chunk) > len(tables[request]):
            raise ContractError(
                f"request {request} has {length} positions, {stop - row} new rows and "
                f"{len(tables[request])} pages of {chunk}; count the step's rows among its "
                "positions and allocate a page per chunk"
            )
        begin = tables[request][position // chunk - 1] if position >= chunk else -1
        while row < stop:
            index, first = divmod(position, chunk)
            count, page = min(chunk - first, stop - row), tables[request][index]
            if slots[row : row + count] != list(
                range(page * chunk + first, page * chunk + first + count)
            ):
                raise ContractError(
                    f"rows {row} to {row + count - 1} of request {request} belong into page {page} "
                    f"from offset {first} on, with chunks of {chunk}, but their slots are "
                    f"{slots[row : row + count]}; make slots of the cache's own chunk size"
                )
            found.append(Span(request, page, first, first + count, begin))
            row, position, begin = row + count, position + count, -1
    return found


class Filled:
    """How many rows of each page are written: the ledger of one layer's cache on a CPU."""

    def __init__(self, pages: int, chunk: int) -> None:
        self._rows, self._chunk = [0] * pages, chunk

    def admit(self, batch: RowBatch) -> None:
        """Refuse a step that these pages cannot serve; nothing is noted yet."""
        seen: set[int] = set()
        for each in spans(batch, self._chunk):
            for page in (each.page, each.begin):
                if not -1 <= page < len(self._rows) or (page < 0 and page == each.page):
                    raise ContractError(
                        f"page {page} of request {each.request} does not exist in a cache of "
                        f"{len(self._rows)}; allocate pages first"
                    )
            if each.begin >= 0 and self._rows[each.begin] != self._chunk:
                raise ContractError(
                    f"request {each.request} continues from page {each.begin}, which holds "
                    f"{self._rows[each.begin]} of {self._chunk} rows and so no state; a prefix hit "
                    "ends on a chunk's boundary"
                )
            if each.first and self._rows[each.page] != each.first:
                raise ContractError(
                    f"request {each.request} writes page {each.page} from row {each.first} on, "
                    f"but {self._rows[each.page]} rows are there; a prefix hit ends on a chunk's "
                    "boundary, and no row is written twice"
                )
            if each.page in seen:
                raise ContractError(
                    f"page {each.page} is written twice in one step; give each request its own"
                )
            seen.add(each.page)
        taken = seen & {each.begin for each in spans(batch, self._chunk)}
        if taken:
            raise ContractError(
                f"page {min(taken)} is written in the step that begins from its state; keep a page "
                "until its requests are done"
            )

    def note(self, batch: RowBatch) -> None:
        """Note what a step wrote."""
        for each in spans(batch, self._chunk):
            self._rows[each.page] = each.last


def full_pages(batch: RowBatch, chunk: int) -> list[int]:
    """The pages that a step fills, in the order of its rows."""
    return [each.page for each in spans(batch, chunk) if each.last == chunk]


def slots_of(query_start: Tensor, length: Tensor, table: Tensor, chunk: int) -> Tensor:
    """int64 ``[T]``: where every new row lies, page * chunk + offset."""
    slots: list[int] = []
    for request, positions in enumerate(length.tolist()):
        rows = int(query_start[request + 1]) - int(query_start[request])
        slots += [
            int(table[request, p // chunk]) * chunk + p % chunk
            for p in range(positions - rows, positions)
        ]
    return torch.tensor(slots, dtype=torch.int64, device=length.device)


def owners(query_start: Tensor, rows: int) -> Tensor:
    """int32 ``[rows]``: whose each row is, without waiting for the device."""
    row = torch.arange(rows, device=query_start.device, dtype=torch.int32)
    return torch.searchsorted(query_start, row, right=True, out_int32=True) - 1


def packed_rows(start: Tensor, chunk: int) -> RowBatch:
    """Whole requests back to back, each on pages of its own; int32 ``start [B + 1]``."""
    length = start.diff()
    pages = (length + chunk - 1) // chunk
    first = pages.cumsum(0) - pages
    widest = int(pages.max()) if pages.numel() else 0
    table = first[:, None] + torch.arange(widest, device=start.device)
    offset = torch.repeat_interleave(first * chunk - start[:-1], length.long())
    slot = torch.arange(len(offset), device=start.device) + offset
    return RowBatch(start, length, table.to(torch.int32).contiguous(), slot.to(torch.int64))


def packed_start(query_start: Tensor, rows: int) -> Tensor:
    """int32 ``query_start [B + 1]`` of whole requests; ContractError where it does not fit."""
    start = query_start.to(torch.int32).contiguous()
    ascending = start.dim() == 1 and start.numel() and not bool((start.diff() < 0).any())
    if not ascending or int(start[0]) or int(start[-1]) != rows:
        raise ContractError(
            f"query_start {query_start.tolist()} does not ascend from 0 to the {rows} rows; pass "
            "the row at which each request begins, and the number of rows at the end"
        )
    return start
