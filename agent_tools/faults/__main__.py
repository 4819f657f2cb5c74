"""Write the table: ``python -m zeromismatch.agent_tools.faults FOLDER > benchmarks/faults.md``."""

import sys
from pathlib import Path

from .table import table

if __name__ == "__main__":
    text, right = table(Path(sys.argv[1]), timed="--kept" not in sys.argv)
    sys.stdout.write(text)
    raise SystemExit(0 if right else 1)
