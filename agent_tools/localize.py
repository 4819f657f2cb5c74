"""Localize: which operators make two sides differ, all of them, in one go.

    divergence = localize(Side.parse("transformers:decode"), Side.parse("transformers:alone"),
                          load_model("smollm2-135m"), requests)
    divergence.status, divergence.groups

In this order, and no further than it makes sense:

1. Both sides run once; every row of every operator is digested.
2. Alignment anchor (``anchor.py``): with other tokens or weights the verdict is MISALIGNED.
3. Comparison (``compare.py``), coverage, logprob bits. Too little compared is INCONCLUSIVE.
4. Where something differs, graft-all (``graft.py``): every operator is judged on the right side's
   inputs. Those that still differ are the culprits; each is probed for its cause (``cause.py``).
5. Confirming run: with only the culprits replaced, everything else must be equal.
6. Both sides on exact sums (``exact.py``): tells an order of summation from a rounding point.
7. Self-test (``selftest.py``): one flipped bit must be found, or the verdict does not count.

The right side is the reference. Command:
``zm localize MODEL --left SIDE --right SIDE [--plan PLAN]``.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..model_recipes.models import LoadedModel
from ..model_recipes.plan import Plan
from ..trainer.engines.base import Request
from .anchor import locate_weight, prove_alignment
from .cause import probe_call
from .compare import STATE_CLASSES, Comparison
from .exact import PASSES, ExactInputs, exact_probes
from .findings import culprits, group, logprob_report, within
from .graft import Grafter, Reference, choose_rows
from .records import (
    Anchor,
    Confirmation,
    Coverage,
    Divergence,
    Graft,
    LogprobReport,
    Probe,
    SelfTest,
    SideRecord,
    Status,
)
from .selftest import Fault, self_test
from .sides import Runner, Side, closure
from .trace import DEFAULT_DISK_BYTES, Trace, Tracer
from .trace_store import save_trace
from .verdict import equal_reason, judge, side_record, too_little

EXACT_REQUESTS = 3
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How far to go.

    memory_bytes: for the reference's tensors; positions beyond it are compared but not grafted.
    coverage: share of operators that must be seen on both sides.
    causes: run the experiments that classify culprits.
    self_test: flip one bit and demand that it is found.
    out: folder for both traces; disk_bytes: their budget, together.
    fault: plants a fault on the left side in every run (tests and red controls).
    progress: told each stage.
    """

    memory_bytes: int = 1_500_000_000
    coverage: float = 0.8
    causes: bool = True
    self_test: bool = True
    out: Path | None = None
    disk_bytes: int = DEFAULT_DISK_BYTES
    fault: Fault = field(default=lambda observer: observer)
    progress: Progress = field(default=lambda stage: None)


def localize(
    left: Side,
    right: Side,
    model: LoadedModel,
    requests: Sequence[Request],
    *,
    plan: str | Plan = "stock",
    right_model: LoadedModel | None = None,
    options: Options = Options(),
) -> Divergence:
    """Compare two sides and name every culprit. right_model: None for the same model.

    A left side with ``vllm+graphs`` is compared by the digests that operators leave inside graphs.
    """
    if left.engine == "vllm" and "graphs" in left.settings:
        from .graph_trace import localize_graphs

        return localize_graphs(left, right, model, requests, plan=plan, coverage=options.coverage)
    sides = (
        Runner(side=left, model=model, requests=tuple(requests), plan=plan),
        Runner(side=right, model=right_model or model, requests=tuple(requests), plan=plan),
    )
    return _Localization(*sides, options).run()


class _Localization:
    """One localization; ``run`` is the flow, the other methods are its stages."""

    def __init__(self, left: Runner, right: Runner, options: Options) -> None:
        self.left, self.right, self.options = left, right, options
        self.started = time.perf_counter()
        self.records: list[SideRecord] = []
        self.notes: list[str] = []
        self.disk_left = options.disk_bytes

    def run(self) -> Divergence:
        left = self._first_run("left", self.left, self.options.fault)
        right = self._first_run("right", self.right, lambda observer: observer)
        anchor = self._anchor(left, right)
        if anchor.misalignment is not None:
            return self._verdict("MISALIGNED", anchor.misalignment.message, anchor)
        comparison = Comparison(left, right)
        coverage = comparison.coverage(self.options.coverage)
        logprobs = logprob_report(left, right)
        lacking = too_little(coverage, logprobs)
        if lacking:
            return self._verdict("INCONCLUSIVE", lacking, anchor, coverage, logprobs)
        differing = coverage.differing_rows or coverage.differing_inputs or logprobs.differing
        if not differing:
            return self._equal(anchor, coverage, logprobs)
        return self._divergent(comparison, anchor, coverage, logprobs)

    def _first_run(self, name: str, runner: Runner, fault: Fault) -> Trace:
        self.options.progress(f"{name}: {runner.side}")
        tracer = Tracer()
        trace = runner.traced(fault(tracer), tracer)
        folder = None
        if self.options.out is not None:
            folder = save_trace(trace, self.options.out / name, disk_bytes=self.disk_left)
            self.disk_left -= sum(file.stat().st_size for file in folder.iterdir())
        self.records.append(
            side_record(
                trace,
                str(runner.side),
                seconds=runner.seconds,
                folder=None if folder is None else str(folder),
            )
        )
        return trace

    def _anchor(self, left: Trace, right: Trace) -> Anchor:
        anchor = prove_alignment(left, right)
        found = anchor.misalignment
        if found is None or found.tensor is None:
            return anchor
        index = locate_weight(self.left.model.module, self.right.model.module, found.tensor)
        if index is None:
            return anchor
        message = f"tensor {found.tensor} differs, first at {list(index)}; publish the same weights"
        better = found.model_copy(update={"index": index, "message": f"{message} to both sides"})
        return anchor.model_copy(update={"misalignment": better})

    def _equal(self, anchor: Anchor, coverage: Coverage, logprobs: LogprobReport) -> Divergence:
        tested = self._self_test()
        if tested is not None and not tested.passed:
            reason = f"no difference was found, but the self-test failed ({tested.activation}; "
            reason += f"{tested.weight}), so that proves nothing; report this"
            return self._verdict(
                "INCONCLUSIVE", reason, anchor, coverage, logprobs, self_test=tested
            )
        reason = equal_reason(coverage, logprobs)
        return self._verdict("EQUAL", reason, anchor, coverage, logprobs, self_test=tested)

    def _divergent(
        self, comparison: Comparison, anchor: Anchor, coverage: Coverage, logprobs: LogprobReport
    ) -> Divergence:
        limits, _ = choose_rows(comparison, self.options.memory_bytes)
        reference, right = self._reference(limits, comparison.right)
        self.options.progress("left, every operator on the reference's inputs")
        grafter = Grafter(reference, probes=probe_call if self.options.causes else None)
        left = self.left.traced(self.options.fault(grafter), grafter.tracer)
        grafted = Comparison(left, right)
        guilty = frozenset(site.site for site in grafted.sites if site.affected)
        confirmation = self._confirm(reference, right, guilty) if guilty else None
        exact = self._exact(comparison, guilty) if self.options.causes and guilty else {}
        found = culprits(grafted, grafter.evidence, exact)
        tested = self._self_test()
        status, reason = judge(found, coverage, logprobs)
        wavers = any(culprit.cause.name == "nondeterminism" for culprit in found)
        if tested is not None and not tested.passed and not wavers:
            status = "INCONCLUSIVE"
            reason += f"; the self-test failed ({tested.activation}; {tested.weight}): report it"
        return self._verdict(
            status, reason, anchor, coverage, logprobs,
            first_divergence=comparison.first(), culprits=found, groups=group(found),
            graft=self._graft_record(grafted, reference, comparison), confirmation=confirmation,
            self_test=tested,
        )  # fmt: skip

    def _reference(self, limits: dict[str, int], before: Trace) -> tuple[Reference, Trace]:
        self.options.progress("right, keeping reference tensors")
        reference = Reference(limits)
        trace = self.right.traced(reference, reference.tracer)
        moved = Comparison(trace, before, repeated=True).count()[1]
        if moved:
            self.notes.append(
                f"the right side does not repeat itself: {moved} rows differ between two runs; a "
                "reference must be deterministic"
            )
        return reference, trace

    def _confirm(self, reference: Reference, right: Trace, guilty: frozenset[str]) -> Confirmation:
        self.options.progress("left, only the culprits replaced")
        grafter = Grafter(reference, replace=guilty, sample=False)
        left = self.left.traced(self.options.fault(grafter), grafter.tracer)
        comparison = Comparison(left, right)
        compared, differing, sites = 0, 0, []
        for site in comparison.sites:
            if site.site in guilty:
                continue
            inside = within(comparison, site, reference.limits)
            wrong = int((inside & (site.output.state > 0)).sum())
            compared, differing = compared + int(inside.sum()), differing + wrong
            sites += [site.site] if wrong else []
        logprobs = logprob_report(left, right, reference.limits)
        return Confirmation(
            confirmed=compared > 0 and not differing and not logprobs.differing,
            compared=compared,
            differing=differing,
            sites=tuple(dict.fromkeys(sites)),
            logprobs_compared=logprobs.compared,
            logprobs_differing=logprobs.differing,
        )

    def _exact(self, plain: Comparison, guilty: frozenset[str]) -> dict[str, list[Probe]]:
        """Probes per culprit from runs on exact sums, over a few requests."""
        schedules = [runner.schedule for runner in (self.left, self.right) if runner.schedule]
        first = [request.id for request in self.left.requests[:EXACT_REQUESTS]]
        names = closure(schedules, first)
        probes: dict[str, list[Probe]] = {name: [] for name in guilty}
        classes = {site.site: site.op_class for site in plain.sites}
        keep = frozenset(name for name in guilty if classes.get(name) in STATE_CLASSES)
        attends = any(classes[name] == "attention" for name in keep)
        for keys in PASSES if attends else PASSES[:1]:
            self.options.progress(f"both sides on exact sums, {keys}")
            traces = []
            for runner, fault in ((self.left, self.options.fault), (self.right, lambda o: o)):
                observer = ExactInputs(keys, runner.requests, keep)
                traces.append(runner.traced(fault(observer), observer.tracer, only=names))
            for site, probe in exact_probes(keys, Comparison(*traces)).items():
                if site in guilty and not any(p.name == probe.name for p in probes[site]):
                    probes[site].append(probe)
        return probes

    def _self_test(self) -> SelfTest | None:
        if not self.options.self_test:
            return None
        self.options.progress("self-test: one flipped bit")
        return self_test(self.left, self.options.fault)

    def _graft_record(self, grafted: Comparison, reference: Reference, plain: Comparison) -> Graft:
        inside = {s.site: within(grafted, s, reference.limits) for s in grafted.sites}
        judged = {s.site for s in grafted.sites if (s.eligible & inside[s.site]).any()}
        return Graft(
            sites=len(inside),
            judged=len(judged),
            unjudged=tuple(name for name in inside if name not in judged),
            rows=sum(int((s.eligible & inside[s.site]).sum()) for s in grafted.sites),
            requests=tuple(reference.limits),
            positions=dict(reference.limits),
            tokens_total=sum(len(request.tokens) for request in plain.left.requests),
            reference_bytes=reference.nbytes,
            memory_budget=self.options.memory_bytes,
        )

    def _verdict(
        self,
        status: Status,
        reason: str,
        anchor: Anchor,
        coverage: Coverage | None = None,
        logprobs: LogprobReport | None = None,
        **found: Any,
    ) -> Divergence:
        return Divergence(
            status=status,
            reason=reason,
            model=self.left.model.spec,
            dtype=str(self.left.model.dtype).removeprefix("torch."),
            left=self.records[0],
            right=self.records[1],
            anchor=anchor,
            coverage=coverage,
            logprobs=logprobs,
            notes=tuple(self.notes),
            seconds=time.perf_counter() - self.started,
            **found,
        )
