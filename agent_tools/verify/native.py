"""A candidate's C++, compiled where it can reach nothing.

    library = compile_native(nursery, folder, source)     # or StoppedError
"""

import hashlib
import shutil
from pathlib import Path

from ...kernels.errors import CapabilityError
from .static import Source
from .watch import Nursery

FLAGS = ("-O3", "-std=c++17", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp")
SECONDS = 60.0


def compile_native(nursery: Nursery, folder: Path, source: Source) -> Path | None:
    """The shared library of a candidate's ``CPP`` in ``folder``; None where it has none."""
    if source.cpp is None:
        return None
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise CapabilityError(
            "this candidate holds C++ and there is no compiler here: install one (for example "
            "`apt-get install g++`), then verify again"
        )
    digest = hashlib.blake2b(source.cpp.encode(), digest_size=8).hexdigest()
    text, library = folder / "native.cpp", folder / f"native-{digest}.so"
    text.write_text(source.cpp)
    command = [compiler, *FLAGS, "-shared", "-fPIC", "-o", library.name, text.name]
    nursery.compile(folder, command, seconds=SECONDS)
    return library
