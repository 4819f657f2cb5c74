"""The table of faults, as benchmarks/faults.md shows it: run each with the fault and without.

    python -m zeromismatch.agent_tools.faults runs/faults > benchmarks/faults.md    # a quarter hour

The folder keeps what was named and the repros; what is there already is not made again, so that a
second call only runs the repros alone and takes their time, on an idle machine; ``--kept`` not even
that.
Every entry of the field reports that the project keeps is a row: planted here as a switch, or held
elsewhere with the reason and the test. The exit code is 1 when a fault is not named as the
catalogue says, something is named without it, or its repro does not show it in time.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...model_recipes.models import LoadedModel, load_model
from ..records import Record
from ..report import write_whole
from .alone import MAX_BYTES, Alone, Kind, run_alone, size_of, write_repro_of
from .catalogue import FAULTS, Fault
from .checking import Caught, check

TEST = "tests/agent_tools/faults/test_faults.py"
COLUMNS = ("id", "fault", "report", "must be named", "operator", "with it", "without it",
           "its repro", "test")  # fmt: skip

HEADER = f"""# Planted faults

Written by `python -m zeromismatch.agent_tools.faults runs/faults` on a tiny Llama (P03 on a
tiny Qwen3-Next): what people in this field met, replayed in our own rollout engine as a switch
(`agent_tools/faults/`). *With it* is what the tool named while the fault was planted, *without it*
what the same check named after the switch was off. `{TEST}` repeats every row and checks this file.
*Its repro* is the file that `zm repro` writes for it: what it runs (one call of an operator, or
both engines on few tokens) and the bytes of its folder. Times below the table are of one process
each, with one thread, imports included; each ended with exit code 1, a mismatch.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A field report that is no switch on an engine. ``test`` holds it, where a test can.

    Held(line="a ratio beyond fp32", source="miles PR #1363", why="a loss, not an engine",
         test="tests/trainer/losses/test_reinforce_zero.py")
    """

    line: str
    source: str
    why: str
    test: str | None = None


_LOSS = "tests/trainer/losses/test_reinforce_zero.py"
_RUN = "tests/trainer/loop/test_run.py"
_RESUME = "tests/trainer/loop/test_resume.py"
_SERVER = "it concerns the tool server, no number"

ELSEWHERE: Mapping[str, Held] = {
    "B11": Held(
        line="gates that cannot fail", source="vllm PR #49603",
        why="it concerns the gates: a control that stays green is inconclusive",
        test="tests/agent_tools/gates/test_gates.py",
    ),
    "T03": Held(
        line="routing record one row short", source="sglang #20964",
        why="it concerns routing replay, which refuses it",
        test="tests/trainer/engines/test_replay.py",
    ),
    "M02": Held(
        line="an adapter binds no module", source="verl-omni PR #553",
        why="it concerns adapters: one that binds no module, or names one that is not there, is "
        "refused",
        test="tests/model_recipes/test_adapters.py",
    ),
    "N02": Held(
        line="exp of a large log ratio", source="miles PR #1363",
        why="it concerns the loss, which stops", test=_LOSS,
    ),
    "A02": Held(
        line="a group of one valid sample", source="trl PR #5773",
        why="it concerns the loss, which refuses it", test=_LOSS,
    ),
    "A03": Held(
        line="empty responses and batches", source="unsloth-zoo PR #1286",
        why="it concerns the loss, which refuses them", test=_LOSS,
    ),
    "A05": Held(
        line="a sequence weight as a sum of exps", source="unsloth-zoo PR #870",
        why="it concerns the loss", test=_LOSS,
    ),
    "S01": Held(
        line="which version made this sample", source="verl PR #7568",
        why="it concerns the training loop's bookkeeping", test=_RUN,
    ),
    "E01": Held(
        line="buffered prompts lost on resume", source="OpenRLHF #1322",
        why="it concerns the training loop's folder", test=_RESUME,
    ),
    "E03": Held(
        line="random state restored, then reset", source="ms-swift PR #9935",
        why="it concerns the training loop's folder", test=_RESUME,
    ),
    "X02": Held(line="text on stdout", source="esp-idf #19087", why=_SERVER),
    "X03": Held(line="an answer larger than the pipe", source="python-sdk PR #2070", why=_SERVER),
    "X05": Held(line="calls in parallel", source="python-sdk #1839", why=_SERVER),
}  # fmt: skip


def fixed_cells(fault: Fault) -> tuple[str, ...]:
    """What the catalogue alone says of a row: id, fault, report, must be named, operator."""
    where = fault.site or (fault.op_class and f"every {fault.op_class}") or "none at fault"
    return (fault.id, fault.line, fault.source, fault.expected, where)


def row(fault: Fault, planted: Caught, clean: Caught, repro: str) -> tuple[str, ...]:
    """One line of the table."""
    red = f"red: {', '.join(planted.named)}" if planted.right else f"NOT named: {planted.named}"
    green = "green" if not clean.named else f"NOT green: {', '.join(clean.named)}"
    return (*fixed_cells(fault), red, green, repro, f"`{TEST}[{fault.id}]`")


def repro_cell(kind: Kind, folder: Path) -> str:
    """What a repro runs and how large it is."""
    size = size_of(folder)
    return f"{kind}, {size:,} B" + (" (TOO LARGE)" if size >= MAX_BYTES else "")


def timing(times: Mapping[str, tuple[Kind, Alone]]) -> Iterator[str]:
    """A line per kind of repro: how long the slowest took, and what did not show its fault."""
    for kind in ("operator", "engines"):
        chosen = {name: alone for name, (own, alone) in times.items() if own == kind}
        slowest = max(chosen, key=lambda name: chosen[name].seconds)
        seconds = sorted(alone.seconds for alone in chosen.values())
        yield (
            f"{len(chosen)} repros of kind *{kind}*: median {seconds[len(seconds) // 2]:.1f} s, "
            f"slowest {slowest} with {seconds[-1]:.1f} s ({chosen[slowest].cpu_seconds:.1f} s of "
            "processor time)."
        )
    for name, (_, alone) in times.items():
        if not alone.within:
            yield f"{name} NOT shown in time: exit code {alone.exit_code}, {alone.seconds:.1f} s."


def line(cells: tuple[str, ...]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def held_lines() -> Iterator[str]:
    """The entries that are no switch here."""
    yield from ("", "## Held elsewhere", "", line(("id", "fault", "report", "why", "test")))
    yield line(("---",) * 5)
    for name, held in ELSEWHERE.items():
        test = f"`{held.test}`" if held.test else ""
        yield line((name, held.line, held.source, held.why, test))


class Tried(Record):
    """What was named with a fault and without it, and which kind of repro was written."""

    planted: Caught
    clean: Caught
    kind: Kind


def tried(fault: Fault, folder: Path) -> Tried:
    """From the folder where it is there, else made."""
    file = folder / "tried.json"
    if not file.is_file():
        model = tiny(fault.model)
        planted, clean = (
            check(fault.id, model, planted=on).model_copy(update={"divergence": None})
            for on in (True, False)
        )
        kind = write_repro_of(fault.id, model, folder / "repro")
        found = Tried(planted=planted, clean=clean, kind=kind)
        write_whole(file, found.model_dump_json(indent=2) + "\n")
    return Tried.model_validate_json(file.read_text(encoding="utf-8"))


@functools.cache
def tiny(name: str) -> LoadedModel:
    """A model of the table."""
    return load_model(name)


def table(folder: Path, *, timed: bool = True) -> tuple[str, bool]:
    """The whole file, and whether every row is as it should be. timed: run the repros as well."""
    lines, right = [HEADER, line(COLUMNS), line(("---",) * len(COLUMNS))], True
    found = {name: tried(fault, folder / name) for name, fault in FAULTS.items()}
    for name, each in found.items():
        right = right and each.planted.right and not each.clean.named
        cell = repro_cell(each.kind, folder / name / "repro")
        lines.append(line(row(FAULTS[name], each.planted, each.clean, cell)))
    lines.append("")
    if timed:
        times: dict[str, tuple[Kind, Alone]] = {
            name: (each.kind, run_alone(folder / name / "repro")) for name, each in found.items()
        }
        lines += timing(times)
        right = right and all(alone.within for _, alone in times.values())
    else:
        lines.append("The repros were not timed.")
    return "\n".join([*lines, *held_lines()]) + "\n", right
