"""Documents of any size, a bounded part at a time.

A tool's document may hold hundreds of culprits. :func:`bounded` shortens its longest parts until it
is small enough for a conversation and says which it shortened; :func:`page` reads any part in full,
page by page, named by a JSON pointer.

    document, cuts = bounded(document)      # cuts: (Cut(at="/culprits", shown=20, of=211),)
    page(document, "/culprits", offset=20, limit=20).value
"""

import json
from typing import Any

from ...kernels.errors import UsageError
from .results import Cut, Page

MAX_BYTES = 48_000
MAX_STRING = 4_000
CAPS = (500, 200, 100, 50, 20, 10, 5, 2, 1, 0)
TABLE = 64
"""A mapping with more keys than any record has fields may be cut as a list is."""
MAX_CUTS = 12


def bounded(document: Any, limit: int = MAX_BYTES) -> tuple[Any, tuple[Cut, ...]]:
    """The document with its longest lists cut to one common length, and what was cut."""
    shorter, cuts = document, []
    for cap in CAPS:
        cuts: list[Cut] = []
        shorter = _shorten(document, cap, "", cuts)
        if len(json.dumps(shorter, ensure_ascii=False).encode()) <= limit:
            break
    return shorter, tuple(cuts[:MAX_CUTS])


def _shorten(value: Any, cap: int, at: str, cuts: list[Cut]) -> Any:
    if isinstance(value, str) and len(value) > MAX_STRING:
        cuts.append(Cut(at=at, shown=MAX_STRING, of=len(value)))
        return value[:MAX_STRING]
    if isinstance(value, list):
        if len(value) > cap:
            cuts.append(Cut(at=at, shown=cap, of=len(value)))
        return [_shorten(each, cap, f"{at}/{n}", cuts) for n, each in enumerate(value[:cap])]
    if isinstance(value, dict):
        kept = list(value.items())
        if len(kept) > max(cap, TABLE):
            cuts.append(Cut(at=at, shown=max(cap, TABLE), of=len(kept)))
            kept = kept[: max(cap, TABLE)]
        return {name: _shorten(each, cap, f"{at}/{_escape(name)}", cuts) for name, each in kept}
    return value


def page(document: Any, at: str, offset: int, limit: int, *, job: str = "") -> Page:
    """``limit`` entries from ``offset`` of the part that ``at`` names; of a text, lines.

    Raises UsageError for a pointer that leads nowhere, naming what there is instead.
    """
    part = _at(document, at)
    if isinstance(part, str):
        part = part.splitlines()
    if isinstance(part, dict) and (at or len(part) > TABLE):
        entries: Any = dict(list(part.items())[offset : offset + limit])
    elif isinstance(part, list):
        entries = part[offset : offset + limit]
    else:
        entries = part
    total = len(part) if isinstance(part, list | dict) else 1
    shown, cuts = bounded(entries)
    cuts = tuple(_moved(cut, at, offset if isinstance(part, list) else 0) for cut in cuts)
    count = len(shown) if isinstance(shown, list | dict) else 1
    return Page(job=job, at=at, total=total, offset=offset, shown=count, value=shown, cut=cuts)


def _moved(cut: Cut, at: str, offset: int) -> Cut:
    """A cut inside a page, as a pointer into the whole document."""
    first, slash, rest = cut.at.removeprefix("/").partition("/")
    if offset and first.isdecimal():
        first = str(int(first) + offset)
    inner = f"/{first}{slash}{rest}" if cut.at else ""
    return cut.model_copy(update={"at": at + inner})


def _at(document: Any, pointer: str) -> Any:
    found = document
    for step in pointer.removeprefix("/").split("/") if pointer else ():
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            keys = ", ".join(list(found)[:30]) if isinstance(found, dict) else ""
            there = f"there are: {keys}" if keys else f"there are {_length(found)} entries"
            raise UsageError(f"{pointer[:200]!r} leads nowhere at {name[:80]!r}; {there}")
    return found


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
