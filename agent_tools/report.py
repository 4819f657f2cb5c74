"""One self-contained HTML page that tells what was compared, what differed, and how to repeat it.

The page needs no network and no JavaScript, follows the reader's light or dark theme, and escapes
all text that a model or a user wrote. It shows only what is in :class:`ReportData`; the same data
lies beside it as JSON, so that ``zm report`` can draw the page again.

    write_report(Path("runs/7/report.html"), data)     # and runs/7/report.json

Left out: computing anything (``localize`` does); the geometry of the plots is in ``plots.py``.
"""

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from ..kernels.errors import DiskError, UsageError
from ..kernels.files import replace_whole
from .plots import Bar, HeatDrawing, HeatMap, bars, draw_heat
from .records import Culprit, Divergence, Record, Status

if TYPE_CHECKING:
    from jinja2 import Environment

    from ..model_recipes.schema import Evidence

TEMPLATES = Path(__file__).parent / "templates"
MAX_CULPRITS_SHOWN = 400


class Comparison(Record):
    """Two runs and what came of comparing them."""

    title: str
    note: str = ""
    divergence: Divergence
    heat: HeatMap | None = None


class Claim(Record):
    """One thing that was tested, with its count and its red control.

    Claim(name="paged mixed = packed", status="pass", compared=768, differing=0,
          control="stock plan: 741 of 768 differ")
    """

    name: str
    status: Literal["pass", "fail", "inconclusive", "not-attributable", "not-applicable"]
    compared: int
    differing: int
    control: str = ""
    detail: str = ""

    @classmethod
    def from_evidence(cls, evidence: "Evidence", control: str = "") -> "Claim":
        """The same claim as a recipe's evidence states it."""
        return cls(
            name=evidence.claim,
            status=evidence.verdict,
            compared=evidence.compared_tokens,
            differing=evidence.differing_tokens,
            control=control,
            detail=f"`{evidence.command}`" if evidence.command else "",
        )


class Speed(Record):
    """One measured rate. ``relative``: this divided by the baseline named in ``against``."""

    name: str
    value: float
    unit: str
    relative: float | None = None
    against: str = ""


class Command(Record):
    """A command that repeats a part of the page."""

    label: str
    command: str


class ReportData(Record):
    """All that the page shows."""

    schema_version: Literal[1] = 1
    kind: Literal["report"] = "report"
    title: str
    verdict: Status
    headline: str
    """One sentence: what was found and what to do next."""
    model: str
    plan: str
    dtype: str
    compared: int
    """Tokens whose logprob bits were compared for the verdict."""
    differing: int
    created: str = ""
    """ISO time; empty where the page must not depend on the clock."""
    comparisons: tuple[Comparison, ...] = ()
    claims: tuple[Claim, ...] = ()
    speeds: tuple[Speed, ...] = ()
    digests: dict[str, str] = Field(default_factory=dict[str, str])
    environment: dict[str, str] = Field(default_factory=dict[str, str])
    commands: tuple[Command, ...] = ()
    notes: tuple[str, ...] = ()


class Panel(Record):
    """A comparison with its plots worked out, as the template takes it."""

    comparison: Comparison
    heat: HeatDrawing | None
    histogram: tuple[Bar, ...]
    culprits: tuple[Culprit, ...]
    culprits_left_out: int


def write_report(path: Path, data: ReportData) -> Path:
    """Write the page at ``path`` and the data beside it (``.json``); returns ``path``.

    Both files appear whole or not at all. Raises DiskError when there is no room or no right.
    """
    write_whole(path.with_suffix(".json"), data.model_dump_json(indent=2) + "\n")
    return write_whole(path, render(data))


def write_whole(path: Path, text: str) -> Path:
    """Write a text file so that a reader never sees half of it."""
    try:
        return replace_whole(path, text)
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else str(error.strerror)
        raise DiskError(f"cannot write {path}: {what}; free some room or use --out") from error


def templates() -> "Environment":
    """Where every page's template is found; ``prose`` is a filter in all of them."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = prose
    return environment


def render(data: ReportData) -> str:
    """The page as text."""
    environment = templates()
    environment.filters["count"] = lambda number: f"{number:,}"
    template = environment.get_template("report.html.j2")
    return template.render(data=data, panels=[panel(entry) for entry in data.comparisons])


def prose(text: str) -> Any:
    """Escaped text in which `backticks` become code."""
    from markupsafe import Markup, escape

    parts = [escape(part) for part in text.split("`")]
    if len(parts) % 2 == 0:  # an odd backtick: leave them all as they are
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else part
        for index, part in enumerate(parts)
    )


def panel(comparison: Comparison) -> Panel:
    """Work out one comparison's plots; a long culprit list is cut, and the page says so."""
    culprits = comparison.divergence.culprits
    heat = comparison.heat
    return Panel(
        comparison=comparison,
        heat=draw_heat(heat) if heat else None,
        histogram=bars(total_histogram(culprits)),
        culprits=culprits[:MAX_CULPRITS_SHOWN],
        culprits_left_out=max(0, len(culprits) - MAX_CULPRITS_SHOWN),
    )


def total_histogram(culprits: Iterable[Culprit]) -> dict[str, int]:
    """ULP histograms of all culprits added up."""
    total: dict[str, int] = {}
    for culprit in culprits:
        for bucket, count in culprit.ulp_histogram.items():
            total[bucket] = total.get(bucket, 0) + count
    return total


def from_divergence(
    divergence: Divergence,
    commands: tuple[Command, ...] = (),
    heat: HeatMap | None = None,
    environment: dict[str, str] | None = None,
) -> ReportData:
    """A page about one comparison."""
    logprobs = divergence.logprobs
    title = f"{divergence.left.side} against {divergence.right.side}"
    return ReportData(
        title=f"{divergence.model}: {title}",
        verdict=divergence.status,
        headline=divergence.reason,
        model=divergence.model,
        plan=" / ".join(dict.fromkeys((divergence.left.plan, divergence.right.plan))),
        dtype=divergence.dtype,
        compared=logprobs.compared if logprobs else 0,
        differing=logprobs.differing if logprobs else 0,
        comparisons=(Comparison(title=title, divergence=divergence, heat=heat),),
        digests={"left run": divergence.left.run, "right run": divergence.right.run},
        environment=environment or {},
        commands=commands,
        notes=divergence.notes,
    )


def read_report(path: Path) -> ReportData:
    """The data of a page: a run's folder, its ``report.json``, or a divergence as JSON."""
    source = path / "report.json" if path.is_dir() else path
    if not source.is_file():
        raise UsageError(f"{source} does not exist; give a run's folder or a JSON file of `zm`")
    text = source.read_text(encoding="utf-8")
    failures: list[str] = []
    for kind in (ReportData, Divergence):
        try:
            found: Any = kind.model_validate_json(text)
        except ValidationError as error:
            failures.append(f"{kind.__name__}: {error.errors()[0]['msg']}")
            continue
        return found if isinstance(found, ReportData) else from_divergence(found)
    raise UsageError(
        f"{source} is neither a report nor a divergence ({'; '.join(failures)}); "
        "make one with `zm localize … --json` or `zm align`"
    )
