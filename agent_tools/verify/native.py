"""A candidate's C++, compiled where it can reach nothing.

    library = compile_native(nursery, folder, source)     # or StoppedError
"""

import hashlib
from pathlib import Path

from ...model_recipes.candidate import Source
from ...model_recipes.native import SECONDS, command
from .watch import Nursery


def compile_native(nursery: Nursery, folder: Path, source: Source) -> Path | None:
    """The shared library of a candidate's ``CPP`` in ``folder``; None where it has none."""
    if source.cpp is None:
        return None
    digest = hashlib.blake2b(source.cpp.encode(), digest_size=8).hexdigest()
    text, library = folder / "native.cpp", folder / f"native-{digest}.so"
    text.write_text(source.cpp)
    nursery.compile(folder, command(library.name, text.name), seconds=SECONDS)
    return library
