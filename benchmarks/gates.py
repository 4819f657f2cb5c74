"""The gates of every dense architecture, one run after the other, and the page about them.

    python benchmarks/gates.py runs/gates > benchmarks/gates.md      # an hour, idle
    python benchmarks/gates.py runs/gates --kept                     # runs nothing

Each run is ``zm gate MODEL --plan PLAN --rollout paged --dtype DTYPE --json`` in a process of its
own, with one thread (large models with all); its report is kept in the folder, and a report that
is there already is read, not run again; ``NAME.again.json`` beside it, the same run on another
machine, gets a row of its own. A report that was edited is refused. The exit code is 1
when a run is not as it should be: everything passed under the aligned plan; C1, C4 and C5 red under
stock.
"""

import os
import subprocess
import sys
from pathlib import Path

from zeromismatch.agent_tools.gates import GateReport, read_gates

TINY = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")
LARGE = [
    ("smollm2-135m", "float32", "aligned", False),
    ("smollm2-135m", "float32", "aligned", True),
    ("smollm2-135m", "float32", "stock", False),
    ("smollm2-135m", "float32", "stock", True),
]
RUNS = LARGE + [
    (f"tiny:{name}", dtype, plan, False)
    for name in TINY
    for dtype in ("float32", "bfloat16")
    for plan in ("aligned", "stock")
]
"""(model, dtype, plan, quick)"""
RED = {"C1", "C4", "C5"}
COLUMNS = ("model", "dtype", "plan", "machine", "made (UTC)", "exit code", "seconds",
           "gates failed", "tokens compared", "tokens that differ", "tokens of C5")  # fmt: skip
HEADER = """# Gates

Written by `python benchmarks/gates.py runs/gates`. Each row is one run of

    zm gate MODEL --plan PLAN --rollout paged --dtype DTYPE --json

whole unless it says `--quick`; where it was made is below the table. Where a gate is red all others
run too, and later ones count as not attributable: *gates failed* names those whose own result is
red. Tokens are counted over all comparisons; C5's are rollout against trainer. Seconds are for that
machine at that hour, beside whatever else it did; loading the model is not in them.

`time zm gate smollm2-135m --plan aligned --rollout paged --quick` should end within 180 s, the
whole gates within 720. On two idle AVX2 cores they take 166 s (142 of them in gates; 172 s the day
after) and 271 s (254); with other work beside it the quick one took 206 and 227 s. With two AVX-512
threads beside nine other runs it took 148 s with loading, the whole gates 211 s. Whole gates under
stock took 437 s (422 in gates) beside other work, and 455 s alone.

Aligned rows in bf16 are from AVX2. On the AVX-512 machine stock's bf16 products
use AMX, and C10 alone fails for Llama, Qwen2, Qwen3 and Mistral: 0.51 to 0.58 of stock's tokens a
second, where 0.70 is asked.
"""


def run(
    folder: Path, model: str, dtype: str, plan: str, quick: bool, *, kept: bool
) -> GateReport | None:
    """One run's report, from the folder where it is there; kept: None where it is not."""
    words = [model.replace(":", "-"), dtype, plan, *(["quick"] if quick else [])]
    file = folder / f"{'-'.join(words)}.json"
    if not file.exists() and kept:
        return None
    if not file.exists():
        zm = str(Path(sys.executable).with_name("zm"))
        command = [zm, "gate", model, "--plan", plan, "--rollout", "paged", "--dtype", dtype,
                   "--json", *(["--quick"] if quick else [])]  # fmt: skip
        threads = {} if (model, dtype, plan, quick) in LARGE else {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=os.environ | threads, stdout=subprocess.PIPE, check=False
        )
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


def again(folder: Path, model: str, dtype: str, plan: str, quick: bool) -> list[GateReport]:
    """The same run on another machine, where the folder has it."""
    words = [model.replace(":", "-"), dtype, plan, *(["quick"] if quick else [])]
    file = folder / f"{'-'.join(words)}.again.json"
    return [read_gates(file)] if file.exists() else []


def blame(report: GateReport) -> str:
    """What an aligned run's red gates say."""
    causes = "; ".join(f"{g.id}: {g.reason}" for g in report.gates if g.id in report.failed)
    return f"- {report.request.model} {report.request.dtype}: {causes}"


def machine(report: GateReport) -> str:
    """Where a report was made."""
    names = ("torch", "transformers")
    own = report.environment
    versions = ", ".join(f"{name} {own[name]}" for name in names)
    threads = own["threads"]
    return f"{own['cpu']}, {versions}, {threads} thread{'s' if threads != '1' else ''}"


def row(report: GateReport, letter: str) -> str:
    """One line of the table."""
    tokens = [gate.tokens for gate in report.gates]
    trainer = next(gate for gate in report.gates if gate.id == "C5").tokens
    quick = " `--quick`" if report.request.quick else ""
    void = [gate.id for gate in report.gates if gate.result == "inconclusive"]
    failed = ", ".join(report.failed) or "none"
    cells = (
        report.request.model + quick, report.request.dtype,
        "stock" if report.plan.is_stock else "aligned", letter,
        report.created[:16].replace("T", " "), report.exit_code,
        f"{report.seconds:.0f}", failed + (f" (inconclusive: {', '.join(void)})" if void else ""),
        f"{sum(n for n, _ in tokens):,}", f"{sum(n for _, n in tokens):,}",
        f"{trainer[1]:,} of {trainer[0]:,} differ",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def counts(report: GateReport) -> str:
    """How much was done on a large model."""
    done = ", ".join(f"{name} {count}" for name, count in report.size.items())
    quick = " --quick" if report.request.quick else ""
    plan = "stock" if report.plan.is_stock else "aligned"
    return f"- {report.request.model} {plan}{quick}: {done}"


def main(folder: Path, *, kept: bool) -> int:
    """Print the page."""
    found = {each: run(folder, *each, kept=kept) for each in RUNS}
    reports = [
        report
        for each, first in found.items()
        if first is not None
        for report in (first, *again(folder, *each))
    ]
    machines = list(dict.fromkeys(map(machine, reports)))
    letters = {each: chr(ord("A") + index) for index, each in enumerate(machines)}
    print(HEADER)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    print("\n".join(row(report, letters[machine(report)]) for report in reports))
    print("\n" + "\n".join(f"{letter}: {name}" for name, letter in letters.items()))
    red = [each for each in reports if not each.plan.is_stock and each.failed]
    if red:
        print("\nRed under the aligned plan, which should be green:\n")
        print("\n".join(map(blame, red)))
    scaled = [report for report in reports if report.share < 1]
    if scaled:
        print("\nLarge models do less of everything, as much as a counted budget holds\n"
              "(`agent_tools/gates/budget.py`):\n")  # fmt: skip
        print("\n".join(dict.fromkeys(map(counts, scaled))))
    missing = [
        f"{m} {d} {p}{' --quick' if q else ''}" for (m, d, p, q), r in found.items() if not r
    ]
    if missing:
        print(f"\nNot run: {', '.join(missing)}.")
    return 0 if not missing and all(map(as_it_should_be, reports)) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), kept="--kept" in sys.argv))
