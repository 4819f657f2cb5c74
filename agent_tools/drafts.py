"""Drafts: what an agent writes, in ``runs/drafts/`` and nowhere else.

    write_draft(Path.cwd(), Path("runs/drafts/tilt/kernels/tilt.py"), text).digest

A draft is data until something judges it: a ``.py`` file is a candidate for ``zm verify`` and
``zm patch draft``, a ``.diff`` one for ``zm patch propose``, and both read a file against their
rules before they use it. Nothing here runs a draft or reads one back.
"""

import hashlib
import re
from pathlib import Path
from typing import Literal

from ..kernels.errors import DiskError, UsageError
from ..kernels.files import replace_whole
from .records import Record

DRAFTS = Path("runs") / "drafts"
MOST_BYTES = {".py": 200_000, ".diff": 1_000_000}
"""What the verifier and ``zm patch`` accept."""
MOST_PARTS = 5
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")


class Draft(Record):
    """A file that was written.

    Draft(file="runs/drafts/tilt.py", digest="9f86d081884c7d659a2feaa0c55ad015", bytes=412)
    """

    schema_version: Literal[1] = 1
    kind: Literal["draft"] = "draft"
    file: str
    """Relative to the workspace."""
    digest: str
    """BLAKE2b-128 of its bytes, in hex, as a recipe names its kernels."""
    bytes: int


def write_draft(workspace: Path, file: Path, text: str) -> Draft:
    """Write ``text`` to ``file``, whole or not at all; a line's end is added where it is missing.

    file: below ``runs/drafts``, ending in .py or .diff; one that exists is replaced. UsageError for
    any other place, links out of it among them, and for text that is empty, binary or too long;
    DiskError where it cannot be written.
    """
    drafts = workspace.resolve() / DRAFTS
    target = (workspace / file).resolve()
    parts = target.relative_to(drafts).parts if target.is_relative_to(drafts) else ()
    if not 0 < len(parts) <= MOST_PARTS or not all(PLAIN.fullmatch(part) for part in parts):
        raise UsageError(
            f"{str(file)[:200]!r} is no place for a draft; give a plain name below {DRAFTS}/, for "
            f"instance {DRAFTS}/own/kernels/own.py"
        )
    most = MOST_BYTES.get(target.suffix)
    if most is None or target.is_dir():
        raise UsageError(f"{target.name[:80]!r} is no draft; end the name in .py or .diff")
    content = _checked(text, most)
    try:
        replace_whole(target, content)
    except OSError as error:
        raise DiskError(
            f"cannot write {file}: {error.strerror}; free some room or give another name"
        ) from error
    data = content.encode()
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return Draft(file=str(DRAFTS.joinpath(*parts)), digest=digest, bytes=len(data))


def _checked(text: str, most: int) -> str:
    if not text.strip():
        raise UsageError("the text is empty; give the whole file")
    plain = text.replace("\n", "").replace("\t", "")
    if not plain.isprintable():
        first = next(letter for letter in plain if not letter.isprintable())
        raise UsageError(
            f"the text holds control characters ({first!r}), or is binary; leave them out"
        )
    content = text if text.endswith("\n") else f"{text}\n"
    if len(content.encode()) > most:
        raise UsageError(f"the text has more than {most:,} bytes; write a smaller file")
    return content
