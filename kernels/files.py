"""Writing a file so that a reader never sees half of it: certificates, recipes and reports do.

    replace_whole(Path("recipe.yaml"), text)

Raises OSError as the system gives it; what that means for the user is the caller's to say.
"""

import contextlib
import os
import tempfile
from pathlib import Path


def replace_whole(path: Path, text: str) -> Path:
    """Write ``text`` beside ``path`` (its folder is made if needed), then rename it into place.

    After an error ``path`` is what it was, and nothing is left beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o644)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return path
