"""The workbench's server on stdin and stdout, for external programs.

    python -m zeromismatch.agent_tools.drivers.workbench_stdio SPEC FOLDER DTYPE SEED

stdout is the wire: whatever the work prints goes to stderr instead, also from C.
"""

import os
import sys
from pathlib import Path

from .workbench import Workbench


def main(arguments: list[str]) -> None:
    """Serve until the client goes away."""
    spec, folder, dtype, seed = arguments
    assert dtype in ("float32", "bfloat16")
    wire = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(wire, "w", encoding="utf-8")
    Workbench(spec, Path(folder), dtype=dtype, seed=int(seed)).server().run()


if __name__ == "__main__":
    main(sys.argv[1:])
