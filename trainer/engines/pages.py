"""Cache pages: who holds which, by reference count.

A request's keys and values live in pages of ``PAGE`` positions, its recurrent states in pages of
one chunk; its table in each pool lists them in order. A prefix hit shares full pages: nothing is
copied, because a shared page is full and lies below both requests' ends, so that nobody writes to
it again. Dropping a request or rolling it back releases pages; a page is free once nobody holds it.

Which request may hit, lose or get pages is decided elsewhere (``legal.py``, ``scheduler.py``);
what is in a page is the kernels' business.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from ...kernels.attention import PAGE
from ...kernels.errors import CapabilityError
from .base import Event, Evict, Hit, Preempt, Publish, Resume, Step


def pages_for(length: int, size: int = PAGE) -> int:
    """Pages of ``size`` positions that hold ``length`` of them."""
    return -(-length // size)


class Pages:
    """Page tables of all requests over one pool of ``num_pages`` pages of ``size`` positions.

    tables: request id to its pages in order.
    holders: how many requests hold a page.
    free: pages that nobody holds, longest free first.
    reserved: this many pages at the front belong to padding rows and are never given out.
    """

    def __init__(self, num_pages: int, *, size: int = PAGE, reserved: int = 0) -> None:
        self.num_pages = num_pages
        self.size = size
        self.reserved = reserved
        self.tables: dict[str, list[int]] = {}
        self.holders = [0] * num_pages
        self.free = deque(range(reserved, num_pages))

    @property
    def taken(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - self.reserved - len(self.free)

    def begin(self, event: Event) -> None:
        """What an event does to page tables before its rows are computed."""
        match event:
            case Step():
                for piece in event.slices:
                    self.extend(piece.request, piece.stop)
            case Hit():
                self.share(event.request, event.source, event.upto)
            case Evict() | Preempt():
                self.drop(event.request)
            case Publish():
                for request in list(self.tables):
                    self.drop(request)
            case Resume():
                pass

    def end(self, event: Event) -> None:
        """Afterwards: rejected drafts are forgotten."""
        if isinstance(event, Step):
            for piece in event.slices:
                if piece.keep is not None:
                    self.truncate(piece.request, piece.keep)

    def missing(self, request: str, length: int) -> int:
        """Pages to take before ``request`` can hold ``length`` positions."""
        return max(0, pages_for(length, self.size) - len(self.tables.get(request, ())))

    def extend(self, request: str, length: int) -> None:
        """Make room for ``length`` positions of ``request``."""
        table = self.tables.setdefault(request, [])
        for _ in range(self.missing(request, length)):
            if not self.free:
                raise CapabilityError(
                    f"all {self.num_pages - self.reserved} cache pages of {self.size} positions "
                    f"are taken and request {request!r} needs one more; use more pages, or Evict "
                    "or Preempt earlier"
                )
            page = self.free.popleft()
            self.holders[page] = 1
            table.append(page)

    def truncate(self, request: str, length: int) -> None:
        """Forget positions from ``length`` on."""
        table, kept = self.tables[request], pages_for(length, self.size)
        for page in table[kept:]:
            self._release(page)
        del table[kept:]

    def share(self, request: str, source: str, upto: int) -> None:
        """``request`` starts from the first ``upto`` positions of ``source``; whole pages only."""
        if request == source:
            self.truncate(request, upto)
            return
        assert upto % self.size == 0
        assert not self.tables.get(request)
        pages = self.tables[source][: upto // self.size]
        for page in pages:
            self.holders[page] += 1
        self.tables[request] = list(pages)

    def drop(self, request: str) -> None:
        """Release everything that ``request`` holds."""
        for page in self.tables.pop(request, ()):
            self._release(page)

    def slots(self, request: str, start: int, stop: int) -> list[int]:
        """Cache slots of positions ``[start, stop)``."""
        table, size = self.tables[request], self.size
        return [table[p // size] * size + p % size for p in range(start, stop)]

    def released_by(self, requests: Collection[str], *, keeping: list[int]) -> int:
        """Pages that dropping all ``requests`` would free, apart from those in ``keeping``."""
        held: dict[int, int] = {}
        for request in requests:
            for page in self.tables.get(request, ()):
                held[page] = held.get(page, 0) + 1
        kept = set(keeping)
        return sum(n == self.holders[page] and page not in kept for page, n in held.items())

    def _release(self, page: int) -> None:
        self.holders[page] -= 1
        if not self.holders[page]:
            self.free.append(page)


class Pools:
    """The pools of one run, one per page size: whatever happens to one happens to all."""

    def __init__(self, sizes: Mapping[int, int], *, padded_rows: int = 0) -> None:
        """sizes: page size -> number of pages, beside those that padding rows need."""
        self.by_size: dict[int, Pages] = {}
        for size, num_pages in sizes.items():
            padding = pages_for(padded_rows, size)
            self.by_size[size] = Pages(num_pages + padding, size=size, reserved=padding)

    @property
    def granule(self) -> int:
        """Positions where full pages end in every pool: the only ones where prefixes may be cut."""
        return math.lcm(*self.by_size)

    def begin(self, event: Event) -> None:
        """See :meth:`Pages.begin`."""
        for pages in self.by_size.values():
            pages.begin(event)

    def end(self, event: Event) -> None:
        """See :meth:`Pages.end`."""
        for pages in self.by_size.values():
            pages.end(event)

    def extend(self, request: str, length: int) -> None:
        """See :meth:`Pages.extend`."""
        for pages in self.by_size.values():
            pages.extend(request, length)

    def is_short(self, request: str, length: int) -> bool:
        """Whether some pool has too few free pages for ``request`` to hold ``length`` positions."""
        pools = self.by_size.values()
        return any(pages.missing(request, length) > len(pages.free) for pages in pools)

    def fits(self, length: int, idle: Collection[str], source: str | None, upto: int) -> bool:
        """Whether ``length`` positions, the first ``upto`` of them shared with ``source``, fit once
        all ``idle`` requests are dropped."""
        for size, pages in self.by_size.items():
            shared = pages.tables[source][: upto // size] if source else []
            room = len(pages.free) + pages.released_by(idle, keeping=shared)
            if pages_for(length, size) - len(shared) > room:
                return False
        return True


def peak_pages(events: Iterable[Event], most: int, size: int = PAGE) -> int:
    """Most pages held at once over a legal schedule; ``most`` bounds it from above."""
    pages = Pages(most, size=size)
    peak = 0
    for event in events:
        pages.begin(event)
        peak = max(peak, pages.taken)
        pages.end(event)
    return peak
