"""A study as a page and as a Markdown table: one row an entry, one small picture an entry.

    write_study(folder, study, curves, command="zm study tiny:qwen3")

Pictures of one quantity share their scale; the dashed line in each is REINFORCE Zero's.
"""

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..trainer.diagnostics.record import UpdateRecord
from .curves import CurveDrawing, Line, draw, scale_of
from .report import Command, write_whole
from .study import OURS, Result, Study, chosen_entries
from .training_report import CurvePage, Fact, Pick, Section, render_curves

COLUMNS = (
    "recipe", "kernels", "lag", "reward, first to last", "D3 median", "D3 peak / median",
    "KL, first to last third", "rejected", "gradient norm peak", "moved against",
    "kernel term: differ", "largest |d| of it",
)  # fmt: skip
QUANTITIES: tuple[tuple[str, Pick, bool], ...] = (
    ("Reward", lambda r: r.reward, False),
    ("KL from rollout to learner (D3)", lambda r: r.d3, True),
    ("D3: peak over median, of the updates so far", lambda r: r.d3_peak_to_median, True),
    ("Gradient norm before any limit", lambda r: r.gradient_norm, True),
    ("Rejected share of tokens", lambda r: r.rejected, False),
    ("Share of tokens moved against their advantage", lambda r: r.moves, False),
)
EXPLAINED = (
    "Reward: mean of the first and of the last updates (20, or half of a shorter run), ± the "
    "standard error of their difference.",
    "D3: mean of expm1(d) − d over an update's action tokens, d the learner's logprob minus the "
    "recorded one; over updates at full lag. It is the KL from rollout to learner; "
    "the column beside the ratio compares its medians over the first and last third.",
    "Rejected: action tokens that the recipe gave no gradient; for clipped surrogates, the clipped "
    "ones.",
    "Moved against: tokens with an advantage whose logprob, scored again by the trainer after the "
    "update, moved against the advantage's sign (or not at all).",
    "Kernel term: trainer against rollout under the weights that sampled, on every action token "
    "(tokens of lag 0 are counted twice where a recipe itself asks for these logprobs).",
)


def write_study(
    folder: Path, study: Study, curves: Mapping[str, Sequence[UpdateRecord]], *, command: str
) -> Path:
    """Write study.html, study.md and study.json; returns the page's path."""
    write_whole(folder / "study.json", study.model_dump_json(indent=1) + "\n")
    write_whole(folder / "study.md", markdown(study, command=command))
    return write_whole(folder / "study.html", render_curves(page_of(study, curves, command)))


def rows_of(study: Study) -> list[tuple[str, ...]]:
    """One row an entry: means over its seeds, but the worst of what is a peak."""
    rows: list[tuple[str, ...]] = []
    for name, entry in study.entries.items():
        found = [result for result in study.results if result.name == name]
        ratios = [each.d3_peak_to_median for each in found if each.d3_peak_to_median is not None]
        compared = sum(each.kernel_compared for each in found)
        unequal = sum(each.kernel_unequal for each in found)
        stopped = [each for each in found if each.stopped]
        error = _mean(found, lambda each: each.standard_error)
        rows.append(
            (
                name + (f" (stopped after {stopped[0].updates} updates)" if stopped else ""),
                entry.plan,
                "0" if entry.synchronous else str(study.settings.lag),
                f"{_mean(found, lambda each: each.reward_first):.3f} to "
                f"{_mean(found, lambda each: each.reward_last):.3f} ± {error:.3f}",
                f"{_mean(found, lambda each: each.d3_median):.2e}",
                f"{max(ratios):.2f}×" if ratios else "–",
                f"{_mean(found, lambda each: each.kl_first):.2e} to "
                f"{_mean(found, lambda each: each.kl_last):.2e}",
                f"{_mean(found, lambda each: each.rejected):.1%}",
                f"{max(each.gradient_norm_peak for each in found):.2f}",
                f"{_mean(found, lambda each: each.moves):.1%}",
                f"{unequal:,} of {compared:,}",
                f"{max(each.kernel_largest for each in found):.1e}",
            )
        )
    return rows


def _mean(found: Sequence[Result], pick: Callable[[Result], float]) -> float:
    return statistics.fmean(pick(each) for each in found)


def command_of(study: Study) -> str:
    """The command that repeats a study."""
    s = study.settings
    words = ["zm", "study", study.model]
    if list(study.entries) != list(chosen_entries(())):
        words += ["--only", ",".join(study.entries)]
    words += ["--task", s.task, "--updates", str(s.updates), "--lag", str(s.lag)]
    words += ["--groups", str(s.groups), "--learning-rate", f"{s.learning_rate:g}"]
    words += ["--seeds", ",".join(map(str, s.seeds)), "--dtype", s.dtype]
    return shlex.join(words)


def setting_line(study: Study) -> str:
    """The settings in one sentence."""
    s = study.settings
    seeds = ", ".join(map(str, s.seeds))
    return (
        f"{study.model} ({s.dtype}), task `{s.task}`, {s.updates} updates of {s.groups} × "
        f"{s.group_size} responses, at most {s.max_new_tokens} tokens a turn, lag {s.lag}, AdamW "
        f"at {s.learning_rate:g}, seed {seeds}, deterministic schedule, on a CPU"
    )


def caveat(study: Study) -> str:
    """What the study does not say."""
    toy = " and a toy task" if study.settings.task == "even" else ""
    return (
        f"A model of this size{toy} shows whether the parts do what they say. It does not tell "
        "which recipe is better at scale, and one seed more or less moves every reward."
    )


def markdown(study: Study, *, command: str) -> str:
    """The table for ``benchmarks/``."""
    lines = [
        "# Comparison of training recipes",
        "",
        f"{setting_line(study)}. {caveat(study)}",
        "",
        f"Made by `{command}`; its runs took {study.seconds / 60:.0f} minutes in all, which says "
        "nothing about speed where other work shared the machine. Curves: "
        "[study.html](study.html), all numbers: [study.json](study.json).",
        "",
        f"| {' | '.join(COLUMNS).replace('|d|', 'd')} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in rows_of(study)),
        "",
        *(f"- {line.replace('|d|', 'd')}" for line in EXPLAINED),
        "",
    ]
    return "\n".join(lines)


def page_of(study: Study, curves: Mapping[str, Sequence[UpdateRecord]], command: str) -> CurvePage:
    """The page."""
    ours = [result for result in study.results if result.name == OURS]
    unequal = sum(result.kernel_unequal for result in ours)
    compared = sum(result.kernel_compared for result in ours)
    others = [result for result in study.results if study.entries[result.name].plan == "stock"]
    sections = [Section(title="Side by side", columns=COLUMNS, rows=tuple(rows_of(study)))]
    for title, pick, logarithmic in QUANTITIES:
        drawn = _pictures(curves, pick, logarithmic)
        if drawn:
            text = f"Seed {study.settings.seeds[0]}. Dashed: REINFORCE Zero. One scale for all."
            sections.append(Section(title=title, text=text, curves=tuple(drawn)))
    return CurvePage(
        title=f"{study.model}: training recipes side by side",
        kicker="zero-mismatch study",
        word="DIFF 0" if compared and not unequal else "MISMATCH",
        tone="good" if compared and not unequal else "bad",
        headline=f"The word is about REINFORCE Zero's run. {caveat(study)}",
        facts=(
            Fact(name="recipes", value=str(len(study.entries))),
            Fact(name="updates each", value=str(study.settings.updates)),
            Fact(name="REINFORCE Zero: tokens that differ", value=f"{unequal:,} of {compared:,}"),
            Fact(
                name="stock kernels: tokens that differ",
                value=f"{sum(each.kernel_unequal for each in others):,} of "
                f"{sum(each.kernel_compared for each in others):,}",
            ),
        ),
        sections=tuple(sections),
        commands=(Command(label="The same study", command=command),),
        notes=(
            f"{setting_line(study)}.",
            *EXPLAINED,
            *(f"{each.name}, seed {each.seed}: {each.stopped}" for each in study.results
              if each.stopped),
            *(f"{name}: {value}" for name, value in study.environment.items()),
        ),
    )  # fmt: skip


def _pictures(
    curves: Mapping[str, Sequence[UpdateRecord]], pick: Pick, logarithmic: bool
) -> list[CurveDrawing]:
    """One picture an entry, all on one scale; none where a quantity is 0 everywhere."""
    values = {name: tuple(pick(record) for record in records) for name, records in curves.items()}
    everything = [value for each in values.values() for value in each if value is not None]
    if not any(everything):
        return []
    bounds = scale_of(everything, logarithmic=logarithmic)
    pictures: list[CurveDrawing] = []
    for name, own in values.items():
        lines = [Line(name=name, values=own)]
        if name != OURS and OURS in values:
            lines.append(Line(name=OURS, values=values[OURS]))
        drawn = draw(lines, title=name, logarithmic=logarithmic, bounds=bounds, height=130)
        if drawn is not None:
            pictures.append(drawn)
    return pictures
