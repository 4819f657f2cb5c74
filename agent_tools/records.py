"""The records that tools hand to each other, to the shell and to an agent.

Data goes one way, as frozen records: ``Scenario -> Run x2 -> Divergence -> ... -> Recipe``. This
module holds what comes after the two runs. Each record is one JSON document with a
``schema_version``; the ``zm`` command, the MCP server and the HTML report print nothing that is
not in it. Bits travel as hex strings, tensors as file paths.

    Divergence(status="DIVERGENT", first_divergence=..., culprits=(...), groups=(...), ...)

Left out: scenarios, schedules and runs (``trainer/engines/base.py``), recipes and evidence
(``model_recipes/schema.py``). ``zm localize MODEL --left SIDE --right SIDE --json`` prints a
Divergence.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Status = Literal["EQUAL", "DIVERGENT", "MISALIGNED", "INCONCLUSIVE"]
CauseName = Literal[
    "reduction order",
    "intermediate dtype",
    "rounding point",
    "tie-break",
    "stale or wrong state",
    "batch leak",
    "padding read",
    "nondeterminism",
    "wrong formula",
    "model-defined",
    "unclassified",
]

EXIT_CODES: dict[Status, int] = {"EQUAL": 0, "DIVERGENT": 1, "MISALIGNED": 3, "INCONCLUSIVE": 3}


class Record(BaseModel):
    """Frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RowRef(Record):
    """One row of one call of a site.

    RowRef(step=4, request="chat-00", position=40, row=2, rows=16)
    """

    step: int
    """Forward pass, counted from 0."""
    request: str
    position: int
    row: int
    """Index of the row in its call."""
    rows: int
    """Number of rows in the call, padding included."""


class BitDifference(Record):
    """The first coordinate of a row whose bits differ, with both bit patterns in hex.

    BitDifference(coordinate=(17,), left_bits="3f800001", right_bits="3f800000", left=1.0000001,
                  right=1.0, ulp=1, differing=1, elements=576)
    """

    coordinate: tuple[int, ...]
    left_bits: str
    right_bits: str
    left: float | None
    right: float | None
    """Values; None where not finite (the bits say which)."""
    ulp: int
    differing: int
    elements: int


class Pattern(Record):
    """Where the affected rows lie. Counts are (affected, compared).

    Pattern(by_rows={1: (0, 12), 16: (7, 640)}, by_row_index={...}, by_tile_offset={0: (1, 40)},
            lowest_position=17, facts=("all affected rows ran in calls of 16 rows",))
    """

    by_rows: dict[int, tuple[int, int]]
    """Rows in the call -> counts."""
    by_row_index: dict[int, tuple[int, int]]
    """Index of the row in its call (the 32 lowest) -> counts."""
    by_tile_offset: dict[int, tuple[int, int]]
    """Position modulo the KV page -> counts."""
    lowest_position: int
    """Lowest affected position of any request."""
    facts: tuple[str, ...] = ()


class Probe(Record):
    """One experiment on a culprit, what came out, and the cause it points to, if any."""

    name: str
    result: str
    decided: CauseName | None = None


class Cause(Record):
    """A cause class with the measured facts behind it; ``unclassified`` lists what was tried."""

    name: CauseName
    detail: str = ""
    probes: tuple[Probe, ...] = ()


class Culprit(Record):
    """An operator that got equal inputs on both sides and gave other bits."""

    site: str
    op_class: str
    contract_left: str | None
    contract_right: str | None
    affected: int
    compared: int
    """Rows whose inputs were all compared and equal."""
    first: RowRef
    left_digest: str
    right_digest: str
    difference: BitDifference | None
    ulp_histogram: dict[str, int]
    pattern: Pattern
    cause: Cause


class CulpritGroup(Record):
    """Culprits of one operator class and one cause."""

    op_class: str
    cause: CauseName
    count: int
    affected: int
    compared: int
    sites: tuple[str, ...]


class FirstDivergence(Record):
    """The first operator in execution order whose inputs are all equal and whose output is not."""

    site: str
    op_class: str
    at: RowRef
    left_digest: str
    right_digest: str


class Misalignment(Record):
    """Why the two runs are not about the same thing; nothing was compared after it was found.

    Misalignment(what="weights", message="...", tensor="model.norm.weight", index=(17,))
    """

    what: Literal["tokens", "weights", "requests", "inputs", "logprobs"]
    message: str
    tensor: str | None = None
    index: tuple[int, ...] | None = None
    """First index; with saved traces only its first coordinate (the row) is known."""
    request: str | None = None
    position: int | None = None


class Anchor(Record):
    """What was proven equal before anything was compared."""

    requests: int
    tokens: int
    weights: int
    """Weight tensors compared by digest."""
    embedding_rows: int
    misalignment: Misalignment | None = None


class Coverage(Record):
    """How much of both runs was compared. ``share`` is over operator sites seen on either side."""

    share: float
    threshold: float
    shared: int
    left_only: tuple[str, ...]
    right_only: tuple[str, ...]
    rows: int
    """(site, call, request, position) outputs compared."""
    differing_rows: int
    inputs: int
    """(site, call, request, position, input) rows compared."""
    differing_inputs: int
    incomplete: tuple[str, ...] = ()
    """Sites where an input was captured on one side only: no verdict there counts."""


class LogprobReport(Record):
    """Scored tokens. The bit count decides; the other figures (fp64) are for information.

    difference = right - left over finite pairs; k3 = mean(exp(d) - 1 - d).
    """

    compared: int
    differing: int
    sampled_compared: int
    """Of these, tokens that the policy sampled (the rest are prompt tokens)."""
    sampled_differing: int
    left_only: int
    right_only: int
    max_abs: float
    mean: float
    std: float
    k3: float
    nonfinite: int = 0
    first_nonfinite: str | None = None
    """Where a logprob of either side is NaN or infinite."""
    first_request: str | None = None
    first_position: int | None = None
    first_left_bits: str | None = None
    first_right_bits: str | None = None


class Graft(Record):
    """The graft-all run: each site judged on the reference's inputs."""

    sites: int
    """Sites that took part."""
    judged: int
    """Sites with at least one row whose inputs were all compared and equal."""
    unjudged: tuple[str, ...]
    rows: int
    """Output rows judged."""
    requests: tuple[str, ...]
    positions: dict[str, int]
    """Request -> number of leading positions whose reference outputs were kept."""
    tokens_total: int
    reference_bytes: int
    memory_budget: int


class Confirmation(Record):
    """Left side again with only the culprits replaced: everything else must then be equal."""

    confirmed: bool
    compared: int
    differing: int
    sites: tuple[str, ...] = ()
    logprobs_compared: int
    logprobs_differing: int


class SelfTest(Record):
    """Whether this very set-up finds one flipped bit. A verdict counts only if both are found."""

    passed: bool
    activation: str
    weight: str


class SideRecord(Record):
    """One side as it ran."""

    side: str
    engine: str
    plan: str
    run: str
    steps: int
    rows: int
    samples: int
    seconds: float
    trace: str | None = None


class Divergence(Record):
    """The verdict on two runs. ``status`` decides the exit code: see ``EXIT_CODES``."""

    schema_version: Literal[1] = 1
    kind: Literal["divergence"] = "divergence"
    status: Status
    reason: str
    """One sentence for a person, ending with the next step where there is one."""
    model: str
    dtype: str
    left: SideRecord
    right: SideRecord
    anchor: Anchor
    coverage: Coverage | None = None
    logprobs: LogprobReport | None = None
    first_divergence: FirstDivergence | None = None
    culprits: tuple[Culprit, ...] = ()
    groups: tuple[CulpritGroup, ...] = ()
    graft: Graft | None = None
    confirmation: Confirmation | None = None
    self_test: SelfTest | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """What ``zm localize`` returns for this verdict."""
        return EXIT_CODES[self.status]
