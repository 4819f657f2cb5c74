"""Localize inside captured graphs: ``zm localize MODEL --left vllm+graphs:mixed --right packed``.

The left side keeps CUDA graphs and compilation; its operators leave digests of their outputs
(``trainer/engines/vllm/graph_tap.py``). The right side is watched as ever, and what vLLM fuses is
digested fused. Rows pair by (request, position). Nothing can be grafted into a graph, so one
operator is named: the first in execution order with other bits, whose inputs are what all earlier
ones, all equal, gave. What has no tap is told as coverage; where only tokens' logprobs differ, the
head or something without a tap is to blame, and the answer is INCONCLUSIVE. Self-test: the same
graphs, replayed with one bit of one operator wrong, must be found different at that operator.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import bits
from ..kernels.errors import UsageError
from ..model_recipes.models import LoadedModel
from ..model_recipes.plan import Plan
from ..model_recipes.sites import SiteCall
from ..trainer.engines.base import Request, Run, Scenario
from ..trainer.engines.vllm.engine import VllmEngine
from ..trainer.engines.vllm.graph_tap import Seen
from .anchor import prove_alignment
from .findings import logprob_report
from .records import Coverage, Divergence, FirstDivergence, RowRef, SelfTest, Status
from .selftest import weight_test
from .sides import Runner, Side
from .trace import Trace, Tracer, weight_digests
from .verdict import equal_reason, side_record, too_little

FUSED = {
    "q_proj": ("qkv_proj", 3),
    "k_proj": ("qkv_proj", 3),
    "v_proj": ("qkv_proj", 3),
    "gate_proj": ("gate_up_proj", 2),
    "up_proj": ("gate_up_proj", 2),
}
"""Projection -> vLLM's fused one, and how many make it up, in this order."""


@dataclass(slots=True)
class FusedDigests:
    """Observer of the right side: the digest of every row of every site, fused as vLLM fuses.

    rows: (request, position) of each forward; sites: name -> digest by (request, position).
    """

    tracer: Tracer = field(default_factory=Tracer)
    sites: dict[str, dict[tuple[str, int], tuple[int, int]]] = field(
        default_factory=dict[str, dict[tuple[str, int], tuple[int, int]]]
    )
    classes: dict[str, str] = field(default_factory=dict[str, str])
    _rows: Sequence[tuple[str, int]] = ()
    _parts: list[Tensor] = field(default_factory=list[Tensor])

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        """The engine says whose rows the next calls hold."""
        self._rows = rows

    def on_site(self, call: SiteCall, /) -> None:
        """Digest; never replaces anything."""
        output, name = call.output.detach(), call.site.name
        output = output.reshape(output.shape[0], -1)
        path, _, last = name.rpartition(".")
        if last in FUSED:
            fused, count = FUSED[last]
            self._parts.append(output)
            if len(self._parts) < count:
                return
            output, name = torch.cat(self._parts, dim=1), f"{path}.{fused}"
            self._parts.clear()
        digests = bits.digest_rows(output.contiguous()).tolist()
        self.classes.setdefault(name, call.site.op_class)
        held = self.sites.setdefault(name, {})
        held |= {(r, p): (a, b) for (r, p), (a, b) in zip(self._rows, digests, strict=True)}


def localize_graphs(
    left: Side,
    right: Side,
    model: LoadedModel,
    requests: Sequence[Request],
    *,
    plan: str | Plan,
    coverage: float = 0.8,
) -> Divergence:
    """See the module. Raises UsageError unless the left side alone is vLLM with graphs."""
    if right.engine == "vllm":
        raise UsageError("the right side of vllm+graphs is the reference; use packed or paged")
    began = time.perf_counter()
    steps: list[Seen] = []
    runners = [Runner(side=each, model=model, requests=tuple(requests), plan=plan)
               for each in (left, right)]  # fmt: skip
    shortest = min(requests, key=lambda request: len(request.tokens))
    spoiled: list[Seen] = []
    with runners[0].engine() as engine:
        assert isinstance(engine, VllmEngine)

        def tapped(few: Sequence[Request], keep: list[Seen]) -> Run:
            scenario = Scenario(model=model.spec, plan=engine.instrument.plan.name,
                                requests=tuple(few),
                                schedule=engine.schedule(left.schedule, few))  # fmt: skip
            return engine.run_tapped(scenario, keep.append)

        run = tapped(requests, steps)
        theirs = Tracer().finish(run, engine.describe(), weight_digests(model.module))
        with engine.faulty() as site:
            tapped([shortest], spoiled)
    watched = FusedDigests()
    ours = runners[1].traced(watched, watched.tracer)
    anchor, logprobs = prove_alignment(theirs, ours), logprob_report(theirs, ours)
    seen, first = _compared(steps, watched, coverage)
    tested = _self_test(site, spoiled, watched, theirs, model)

    def verdict(status: Status, reason: str, **found: Any) -> Divergence:
        return Divergence(
            status=status, reason=reason, model=model.spec,
            dtype=str(model.dtype).removeprefix("torch."), anchor=anchor,
            left=side_record(theirs, str(left)), right=side_record(ours, str(right)),
            coverage=seen, logprobs=logprobs, self_test=tested, seconds=time.perf_counter() - began,
            notes=("digests of outputs from inside captured graphs: the first operator is named, "
                   "later ones are not judged, and nothing is grafted",), **found,
        )  # fmt: skip

    if anchor.misalignment is not None:
        return verdict("MISALIGNED", anchor.misalignment.message)
    lacking = too_little(seen, logprobs)
    if lacking:
        return verdict("INCONCLUSIVE", lacking)
    tokens = f"{logprobs.differing} of {logprobs.compared} scored tokens differ"
    if first is not None:
        reason = f"{tokens}; {first.site} is the first operator inside the graphs with other bits"
        return verdict("DIVERGENT", reason, first_divergence=first)
    if logprobs.differing:
        return verdict("INCONCLUSIVE", f"{tokens}, but every operator with a tap agrees; not seen: "
                       f"{', '.join(seen.right_only[-5:])}")  # fmt: skip
    if not tested.passed:
        return verdict("INCONCLUSIVE", f"no difference was found, but the self-test failed "
                       f"({tested.activation}; {tested.weight}): report it")  # fmt: skip
    return verdict("EQUAL", equal_reason(seen, logprobs))


def _self_test(
    site: str, spoiled: Sequence[Seen], watched: FusedDigests, theirs: Trace, model: LoadedModel
) -> SelfTest:
    """Whether graphs with one bit wrong at ``site`` were found different there first, in row 0."""
    seen, first = _compared(spoiled, watched, 0.0)
    right = first is not None and first.site == site and first.at.row == 0
    named = "nothing" if first is None else f"{first.site}, row {first.at.row}"
    activation = (
        f"one bit of {site}, row 0 of each of {len(spoiled)} steps, in the same graphs: named "
        f"{named}, {seen.differing_rows} of {seen.rows} rows differ"
    )
    placed, weight = weight_test(theirs, model.module)
    return SelfTest(passed=right and placed, activation=activation, weight=weight)


def _compared(
    steps: Sequence[Seen], watched: FusedDigests, threshold: float
) -> tuple[Coverage, FirstDivergence | None]:
    """Rows compared by site, and the first operator, in the reference's order, that differs."""
    order = {name: index for index, name in enumerate(watched.sites)}
    tapped = dict.fromkeys(name for step in steps for name in step.digests)
    rows = differing = 0
    best: tuple[int, FirstDivergence] | None = None
    for number, step in enumerate(steps):
        for name, digests in step.digests.items():
            wanted = watched.sites.get(name)
            if wanted is None:
                continue
            for row, (at, digest) in enumerate(zip(step.rows, digests, strict=True)):
                if at not in wanted:
                    continue
                rows += 1
                if tuple(digest.tolist()) == wanted[at]:
                    continue
                differing += 1
                if best is None or order[name] < best[0]:
                    place = RowRef(request=at[0], position=at[1], step=number, row=row,
                                   rows=len(step.rows))  # fmt: skip
                    best = order[name], _first(name, place, digest, watched)
    seen = Coverage(
        share=len(tapped.keys() & order.keys()) / max(1, len(tapped.keys() | order.keys())),
        threshold=threshold, shared=len(tapped.keys() & order.keys()),
        left_only=tuple(name for name in tapped if name not in order),
        right_only=tuple(name for name in order if name not in tapped),
        rows=rows, differing_rows=differing, inputs=0, differing_inputs=0,
    )  # fmt: skip
    return seen, None if best is None else best[1]


def _first(
    name: str, at: RowRef, digest: NDArray[np.int64], watched: FusedDigests
) -> FirstDivergence:
    wanted = watched.sites[name][at.request, at.position]
    pair = torch.from_numpy(digest.copy()), torch.tensor(wanted)
    left, right = (bits.digest_hex(each) for each in pair)
    return FirstDivergence(
        site=name, op_class=watched.classes[name], at=at, left_digest=left, right_digest=right
    )  # fmt: skip
