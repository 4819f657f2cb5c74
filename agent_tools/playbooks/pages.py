"""Reading and rendering playbook pages.

A page is Markdown with five headings and, where it quotes what the code defines, jinja2. The values
come from the code and not from the machine, so that a rendered page is the same everywhere. Nothing
heavy is imported here.

    page("day-0").title
"""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ...kernels.errors import UsageError
from ..records import CauseName

FOLDER = Path(__file__).parents[2] / "playbooks"
OVERVIEW = "overview"
HEADINGS = ("Symptom", "Probe", "Cause", "Fix that keeps the bits", "Price")

PAGE_OF_CAUSE: dict[CauseName, str] = {
    "reduction order": "batch-variance",
    "intermediate dtype": "rounding-points",
    "rounding point": "rounding-points",
    "tie-break": "ties-and-experts",
    "stale or wrong state": "prefix-cache",
    "batch leak": "batch-variance",
    "padding read": "batch-variance",
    "nondeterminism": "batch-variance",
    "wrong formula": "day-0",
    "model-defined": "ties-and-experts",
    "unclassified": "day-0",
}
"""Where to read first about a cause; that page points to its neighbours."""
EXITS = {
    0: "equal, or passed",
    1: "divergent, a gate is red, or the autopilot is stuck",
    2: "arguments, files, schedules or recipes that cannot be used",
    3: "inconclusive or misaligned: nothing was shown",
    4: "something is missing here: a package, a device, a kernel, disk",
    5: "time or budget spent",
    70: "a fault of zm itself",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page. title: its heading. text: rendered Markdown."""

    name: str
    title: str
    text: str


def names() -> tuple[str, ...]:
    """All pages: the overview, day-0, then the others by name."""
    found = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "README")
    return (OVERVIEW, "day-0", *(name for name in found if name != "day-0"))


def render(name: str) -> str:
    """The text of a page; UsageError names the pages there are."""
    from jinja2 import Environment, StrictUndefined

    if name not in names():
        raise UsageError(f"there is no playbook {name[:80]!r}; use one of {', '.join(names())}")
    source = (FOLDER / f"{'README' if name == OVERVIEW else name}.md").read_text(encoding="utf-8")
    environment = Environment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    pages = [(cause, PAGE_OF_CAUSE[cause]) for cause in get_args(CauseName)]
    causes = [(cause, f"[{place}]({place}.md)") for cause, place in pages]
    return environment.from_string(source).render(causes=causes, exits=list(EXITS.items()))


def page(name: str) -> Page:
    """A page with its title."""
    text = render(name)
    return Page(name=name, title=text.partition("\n")[0].lstrip("# ").strip(), text=text)
