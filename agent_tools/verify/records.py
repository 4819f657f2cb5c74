"""What a verification hands back: four answers, the rules that were broken, and what watched.

    Verification(status="fail", reason="bits: rows 9, width 77, as it is: at [0, 3] ...",
                 violations=(Violation(rule="bits", detail="...", where="rows 9, width 77"),), ...)

``zm verify FILE --contract ID --json`` prints one. Large tensors never appear in it.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from ..records import Record

Answered = Literal["pass", "fail", "not-applicable", "not-run"]
VerificationStatus = Literal["pass", "needs-review", "fail", "void"]
EXIT_CODES: dict[VerificationStatus, int] = {"pass": 0, "needs-review": 3, "fail": 1, "void": 3}


class Limits(Record):
    """What a candidate may use before it is stopped."""

    wall_seconds: float = Field(default=60.0, gt=0)
    """For the whole verification."""
    call_seconds: float = Field(default=10.0, gt=0)
    """For one request: loading the candidate, or one call of it."""
    cpu_seconds: int = Field(default=60, gt=0)
    """Processor time of one worker process."""
    memory_bytes: int = Field(default=1 << 30, gt=0)
    """Address space of a worker beyond what torch itself maps; on a GPU not limited."""
    file_bytes: int = Field(default=64 << 20, ge=0)
    """Files of a GPU candidate in its temporary folder; a CPU candidate may write none."""


class Violation(Record):
    """One rule that the candidate broke.

    Violation(rule="import", detail="imports socket", where="line 3")
    """

    rule: str
    """Id of a rule in :data:`.rules.RULES`."""
    detail: str
    where: str | None = None
    """Line of the file, or the case."""


class BitsAnswer(Record):
    """Are forward and backward bit-equal to the contract's reference?"""

    status: Answered
    calls: int = 0
    """Compared calls of the candidate."""
    elements: int = 0
    differing: int = 0
    first_difference: str | None = None
    detail: str = ""


class AccuracyAnswer(Record):
    """How far from fp64, beside plain torch at the same dtype; at most twice as far."""

    status: Answered
    error: float | None = None
    """Largest error over the largest magnitude, of all compared outputs."""
    stock_error: float | None = None
    compared: int = 0
    detail: str = ""


class GradientAnswer(Record):
    """Does the backward agree with torch's autograd of an fp64 formula written apart?"""

    status: Answered
    error: float | None = None
    """Largest error over the gradient's largest magnitude."""
    tolerance: float | None = None
    compared: int = 0
    detail: str = ""


class SpeedAnswer(Record):
    """Baseline's time over the candidate's, measured by the parent; 1 is as fast."""

    status: Answered
    ratio: float | None = None
    """Of the slowest shape."""
    floor: float = 0.7
    goal: float = 0.95
    reached_goal: bool | None = None
    baseline: str = ""
    """Who the candidate was measured against."""
    shapes: tuple[str, ...] = ()
    """One line a shape: times and ratio."""
    detail: str = ""


class Control(Record):
    """A planted fault that this very run had to see. ``red``: it did."""

    name: str
    question: Literal["bits", "accuracy", "gradient", "speed", "isolation"]
    red: bool
    detail: str


class Isolation(Record):
    """What held the candidate, as the parent saw it from outside before the candidate was loaded.

    Isolation(active=("seccomp", "landlock", "net-namespace", ...), missing=(), waived=())
    """

    active: tuple[str, ...]
    missing: tuple[str, ...] = ()
    """Wanted, but this machine does not give it."""
    waived: tuple[str, ...] = ()
    """Required, missing, and accepted by the person who started the run."""


class Verification(Record):
    """The verdict on one candidate file. ``pass`` needs four answers and every control red."""

    schema_version: Literal[1] = 1
    kind: Literal["verification"] = "verification"
    status: VerificationStatus
    reason: str
    """One sentence; it ends with the next step where there is one."""
    file: str
    digest: str
    """BLAKE2b-128 of the candidate file, as in a recipe."""
    contract: str
    new_contract: bool = False
    """The contract is not registered: judged against itself and fp64, and a person must tick it."""
    needs_review: tuple[str, ...] = ()
    """What a person has to decide before the candidate may serve."""
    device: str
    quick: bool = False
    isolation: Isolation | None = None
    """None when the static check already refused the file."""
    violations: tuple[Violation, ...] = ()
    bits: BitsAnswer
    accuracy: AccuracyAnswer
    gradient: GradientAnswer
    speed: SpeedAnswer
    controls: tuple[Control, ...] = ()
    hashes: dict[str, str] = Field(default_factory=dict[str, str])
    """Digests of verifier, comparer, references and compiled core."""
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """What ``zm verify`` returns."""
        return EXIT_CODES[self.status]

    @property
    def broken(self) -> tuple[str, ...]:
        """Ids of the broken rules, each once."""
        return tuple(dict.fromkeys(entry.rule for entry in self.violations))


def workspace_file(path: Path) -> str:
    """How a candidate is named in reports: its last two parts, never a machine's own paths."""
    return "/".join(path.parts[-2:])
