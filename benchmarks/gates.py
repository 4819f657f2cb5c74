"""The gates of every dense architecture, one run after the other, and the page about them.

    python benchmarks/gates.py runs/gates > benchmarks/gates.md      # an hour, idle
    python benchmarks/gates.py runs/gates --kept                     # runs nothing

Each run is ``zm gate MODEL --plan PLAN --rollout paged --dtype DTYPE --json`` in a process of its
own, with one thread; its report is kept in the folder, and a report that is there already is read,
not run again. A report that was edited is refused. The exit code is 1 when a run is not as it
should be: everything passed under the aligned plan; C1, C4 and C5 red under stock.
"""

import os
import subprocess
import sys
from pathlib import Path

from zeromismatch.agent_tools.gates import GateReport, read_gates

TINY = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")
RUNS = [("smollm2-135m", "float32")] + [
    (f"tiny:{name}", dtype) for name in TINY for dtype in ("float32", "bfloat16")
]
PLANS = ("aligned", "stock")
RED = {"C1", "C4", "C5"}
COLUMNS = ("model", "dtype", "plan", "exit code", "seconds", "gates failed", "tokens compared",
           "tokens that differ", "tokens of C5")  # fmt: skip
HEADER = """# Gates

Written by `python benchmarks/gates.py runs/gates`: the full gates, not `--quick`. Each row is one
run of

    zm gate MODEL --plan PLAN --rollout paged --dtype DTYPE --json

with one thread, on {cpu}, torch {torch}, transformers {transformers}. Where a gate is red all
others run too, and later ones count as not attributable: *gates failed* names those whose own
result is red. Tokens are counted over all comparisons; C5's are rollout against trainer.
Seconds are for this machine at that hour, beside whatever else it did.
"""


def run(folder: Path, model: str, dtype: str, plan: str, *, kept: bool) -> GateReport | None:
    """One run's report, from the folder where it is there; kept: None where it is not."""
    file = folder / f"{model.replace(':', '-')}-{dtype}-{plan}.json"
    if not file.exists() and kept:
        return None
    if not file.exists():
        zm = str(Path(sys.executable).with_name("zm"))
        command = [zm, "gate", model, "--plan", plan, "--rollout", "paged", "--dtype", dtype,
                   "--json"]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
        if done.returncode not in (0, 1, 3):
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}; see above")
        folder.mkdir(parents=True, exist_ok=True)
        file.write_bytes(done.stdout)
    return read_gates(file)


def as_it_should_be(report: GateReport) -> bool:
    """Green under the aligned plan; red in C1, C4 and C5 under stock."""
    if report.plan.is_stock:
        return report.exit_code == 1 and set(report.failed) >= RED
    return report.exit_code == 0


def row(report: GateReport) -> str:
    """One line of the table."""
    tokens = [gate.tokens for gate in report.gates]
    trainer = next(gate for gate in report.gates if gate.id == "C5").tokens
    cells = (
        report.request.model, report.request.dtype, "stock" if report.plan.is_stock else "aligned",
        report.exit_code, f"{report.seconds:.0f}", ", ".join(report.failed) or "none",
        f"{sum(n for n, _ in tokens):,}", f"{sum(n for _, n in tokens):,}",
        f"{trainer[1]:,} of {trainer[0]:,} differ",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main(folder: Path, *, kept: bool) -> int:
    """Print the page."""
    wanted = [(*each, plan) for each in RUNS for plan in PLANS]
    found = {each: run(folder, *each, kept=kept) for each in wanted}
    reports = [report for report in found.values() if report is not None]
    print(HEADER.format_map(reports[0].environment))
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    print("\n".join(map(row, reports)))
    missing = [" ".join(each) for each, report in found.items() if report is None]
    if missing:
        print(f"\nNot run: {', '.join(missing)}.")
    return 0 if not missing and all(map(as_it_should_be, reports)) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), kept="--kept" in sys.argv))
