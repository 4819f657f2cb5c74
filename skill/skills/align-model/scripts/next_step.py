#!/usr/bin/env python3
"""Say what a JSON document of ``zm`` means and which reference page to open next.

    zm localize MODEL --left paged:decode --right paged:alone --json > d.json
    python scripts/next_step.py d.json

Exit 0: equal or passed. 1: something differs, and what to do is printed. 2: no document of zm.
3: misaligned or inconclusive. Reads nothing but that file, asks nothing, needs no package.
"""

import argparse
import json
import sys
from pathlib import Path

PAGES = {
    "reduction order": "batch-variance",
    "intermediate dtype": "rounding-points",
    "rounding point": "rounding-points",
    "tie-break": "ties-and-experts",
    "stale or wrong state": "prefix-cache",
    "batch leak": "batch-variance",
    "padding read": "batch-variance",
    "nondeterminism": "batch-variance",
    "model-defined": "ties-and-experts",
    "wrong formula": "day-0",
    "unclassified": "day-0",
}
EXITS = {"EQUAL": 0, "DIVERGENT": 1, "MISALIGNED": 3, "INCONCLUSIVE": 3,
         "pass": 0, "fail": 1, "inconclusive": 3}  # fmt: skip


def explain(document: dict[str, object]) -> tuple[list[str], int]:
    """(lines to print, exit code) for one document."""
    status = document.get("status")
    if not isinstance(status, str) or status not in EXITS:
        return [f"no verdict in this document (status {status!r}); give the output of --json"], 2
    lines = [f"{status}: {document.get('reason', '')}"]
    groups = document.get("groups")
    for group in groups if isinstance(groups, list) else []:
        page = PAGES.get(group["cause"], "day-0")
        sites = group.get("sites") or ["?"]
        lines.append(
            f"{group['count']} x {group['op_class']} ({group['cause']}), first {sites[0]}: "
            f"open references/{page}.md"
        )
    if status == "MISALIGNED":
        lines.append("tokens or weights differ; no kernel is at fault")
    return lines, EXITS[status]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="what `zm ... --json` printed")
    path = parser.parse_args().file
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{path} cannot be read as JSON ({error}); run the command again with --json",
              file=sys.stderr)  # fmt: skip
        return 2
    lines, code = explain(document if isinstance(document, dict) else {})
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
