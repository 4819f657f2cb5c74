"""Write the table: ``python -m zeromismatch.agent_tools.faults > benchmarks/faults.md``."""

import sys

from .table import table

if __name__ == "__main__":
    text, right = table()
    sys.stdout.write(text)
    raise SystemExit(0 if right else 1)
