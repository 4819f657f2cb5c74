"""Cache pages: who holds which, by reference count.

A request's keys and values live in pages of ``PAGE`` positions; its table lists them in order. A
prefix hit shares full pages: nothing is copied, because a shared page is full and lies below both
requests' ends, so that nobody writes to it again. Dropping a request or rolling it back releases
pages; a page is free once nobody holds it.

Which request may hit, lose or get pages is decided elsewhere (``legal.py``, ``scheduler.py``);
what is in a page is the kernels' business.
"""

from collections import deque
from collections.abc import Iterable

from ...kernels.attention import PAGE
from ...kernels.errors import CapabilityError
from .base import Event, Evict, Hit, Preempt, Publish, Resume, Step


def pages_for(length: int) -> int:
    """Pages that hold ``length`` positions."""
    return -(-length // PAGE)


class Pages:
    """Page tables of all requests over one pool of ``num_pages`` pages.

    tables: request id to its pages in order.
    holders: how many requests hold a page.
    free: pages that nobody holds, longest free first.
    reserved: this many pages at the front belong to padding rows and are never given out.
    """

    def __init__(self, num_pages: int, *, reserved: int = 0) -> None:
        self.num_pages = num_pages
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
        return max(0, pages_for(length) - len(self.tables.get(request, ())))

    def extend(self, request: str, length: int) -> None:
        """Make room for ``length`` positions of ``request``."""
        table = self.tables.setdefault(request, [])
        for _ in range(self.missing(request, length)):
            if not self.free:
                raise CapabilityError(
                    f"all {self.num_pages - self.reserved} cache pages are taken and request "
                    f"{request!r} needs one more; use more pages, or Evict or Preempt earlier"
                )
            page = self.free.popleft()
            self.holders[page] = 1
            table.append(page)

    def truncate(self, request: str, length: int) -> None:
        """Forget positions from ``length`` on."""
        table = self.tables[request]
        for page in table[pages_for(length) :]:
            self._release(page)
        del table[pages_for(length) :]

    def share(self, request: str, source: str, upto: int) -> None:
        """``request`` starts from the first ``upto`` positions of ``source``; whole pages only."""
        if request == source:
            self.truncate(request, upto)
            return
        assert upto % PAGE == 0
        assert not self.tables.get(request)
        pages = self.tables[source][: upto // PAGE]
        for page in pages:
            self.holders[page] += 1
        self.tables[request] = list(pages)

    def drop(self, request: str) -> None:
        """Release everything that ``request`` holds."""
        for page in self.tables.pop(request, ()):
            self._release(page)

    def slots(self, request: str, start: int, stop: int) -> list[int]:
        """Cache slots of positions ``[start, stop)``."""
        table = self.tables[request]
        return [table[p // PAGE] * PAGE + p % PAGE for p in range(start, stop)]

    def released_by(self, requests: set[str], *, keeping: list[int]) -> int:
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


def peak_pages(events: Iterable[Event], most: int) -> int:
    """Most pages held at once over a legal schedule; ``most`` bounds it from above."""
    pages = Pages(most)
    peak = 0
    for event in events:
        pages.begin(event)
        peak = max(peak, pages.taken)
        pages.end(event)
    return peak
