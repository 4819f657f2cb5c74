"""C5: the trainer computes what the rollout sampled, and it is still the right model.

First site by site (``localize``, self-test included), then every sampled token; padded = packed =
whole requests one by one; with gradient checkpointing, logprobs and gradients. Equal bits prove
nothing if both compute another model, so the logprobs' error against transformers' own module,
untouched, in fp64, may be at most twice that of the stock model at the same dtype (``routing.py``
says how where experts are chosen); and a model whose next token is nearly random proves nothing
either: its mean entropy may be at most 70 % of a uniform one's. Red controls: a stock operator, a
rotary table that is wrong in one row of a hundred, and a wrong expert there.

C6 is in ``gradient.py``.
"""

import functools
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from ...kernels import bits
from ...model_recipes.plan import Plan, stock_plan
from ...trainer.engines.base import Observer, Request, Run, Schedule, SiteCall, Slice, Step
from ..accuracy import Accuracy, measure_accuracy, reference_logprobs
from ..align import shorten
from ..rollouts import TokenCount, batching_facts, compare_tokens, logprob_values, steps_of
from ..routing import Replay, RoutingTrace, judged, routers, slack
from .base import Findings, Gate
from .bench import (
    STOCK_TRIED,
    Bench,
    Try,
    compare_scored,
    first_red,
    gradients,
    only,
    with_stock,
)
from .inference import culprit_lines

MAX_ENTROPY = 0.7
LOCALIZED = 4


def check(bench: Bench, found: Findings) -> None:
    """See the module."""
    _site_by_site(bench, found)
    requests, packed, engines = bench.requests, bench.packed, bench.on()
    bench.progress("C5: every sampled token")
    facts = batching_facts(bench.sampled.executed, requests)
    found.require("sampled in steps that mix prompt and decode rows", facts.mixed_steps)
    (step,) = steps_of(packed.executed)
    found.require(
        "requests in the packed step", len(step.slices), len(step.slices) == len(requests)
    )
    found.tokens("sampled by the rollout = packed trainer", compare_tokens(bench.sampled, packed))
    found.tokens("rollout, mixed = packed trainer",
                 compare_scored(bench.mixed, packed))  # fmt: skip
    for name, schedule in _paddings(requests).items():
        run = engines.run(schedule, requests, engine="packed")
        found.tokens(f"{name} = packed", compare_scored(run, packed))
        steps = steps_of(run.executed)
        found.require(f"{name}: steps, padding rows",
                      f"{len(steps)}, {sum(each.padded_rows for each in steps)}",
                      len(steps) > 1 or steps[0].padded_rows > 0)  # fmt: skip
    _checkpointing(bench, found)
    _accuracy(bench, found)
    _entropy(bench, found)
    bench.progress("C5: red control, a stock operator")
    found.stock_control(*first_red(_controls(bench)))


def _controls(bench: Bench) -> Iterator[Try]:
    """Stock decode against stock trainer; where no class differs there, the rollout against a
    trainer that alone has a stock operator."""
    yield from bench.stock_controls("packed")
    op_class = STOCK_TRIED[0]
    plan = with_stock(bench.plan, op_class)
    yield (
        f"stock {op_class} in the trainer alone",
        lambda: compare_tokens(bench.sampled, bench.on(plan).pack(bench.requests)),
    )


def _site_by_site(bench: Bench, found: Findings) -> None:
    bench.progress("C5: site by site")
    few = shorten(bench.requests, 2 if bench.quick else LOCALIZED)
    verdict, heat = bench.culprits_and_heat("packed:packed", "paged:mixed", few)
    coverage = verdict.coverage
    if coverage is not None:
        detail = f"{coverage.shared} sites, coverage {coverage.share:.0%}"
        found.part("packed = rollout, site by site", coverage.rows, coverage.differing_rows,
                   "site rows", detail)  # fmt: skip
        found.require("coverage of sites", f"{coverage.share:.0%}",
                      coverage.share >= coverage.threshold)  # fmt: skip
    found.require("the two sides may be compared", verdict.status,
                  verdict.status in ("EQUAL", "DIVERGENT"))  # fmt: skip
    if verdict.self_test is not None:
        found.control("one activation bit and one weight bit", verdict.self_test.activation, 2,
                      2 * verdict.self_test.passed, red=verdict.self_test.passed)  # fmt: skip
    if verdict.status != "EQUAL":
        found.divergence, found.heat = verdict, heat
        found.culprits += culprit_lines(found)


def _paddings(requests: Sequence[Request]) -> dict[str, Schedule]:
    def whole(group: Sequence[Request], padded: int) -> Step:
        slices = (Slice(request=r.id, start=0, stop=len(r.tokens)) for r in group)
        return Step(slices=tuple(slices), padded_rows=padded)

    longest = max(len(request.tokens) for request in requests)
    each = (whole([r], longest - len(r.tokens)) for r in requests)
    return {
        "padded to the longest, one by one": Schedule(events=tuple(each)),
        "all, beside 33 padding rows": Schedule(events=(whole(requests, 33),)),
        "micro-batches of two": Schedule(
            events=tuple(
                whole(requests[first : first + 2], 0) for first in range(0, len(requests), 2)
            )
        ),
    }


@contextmanager
def checkpointed(module: nn.Module) -> Generator[None]:
    """Gradient checkpointing, which transformers does in training mode only."""
    model = cast(Any, module)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    modes = {child: child.training for child in module.modules()}
    module.train()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        for child, training in modes.items():
            child.training = training


def _checkpointing(bench: Bench, found: Findings) -> None:
    bench.progress("C5: gradient checkpointing")
    requests, engine = bench.learned, bench.on().packed
    counted = 0

    def forwards(*_: object) -> None:
        nonlocal counted
        counted += 1

    def once() -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = engine.logprobs(requests)
        logprobs.sum().backward()
        return logprobs.detach(), gradients(bench.model)

    layer = next(m for m in bench.model.module.modules() if hasattr(m, "gradient_checkpointing"))
    watched = next(child for child in layer.modules() if isinstance(child, nn.Linear))
    handle = watched.register_forward_hook(forwards)
    try:
        plain, wanted = once()
        before = counted
        with checkpointed(bench.model.module):
            again, got = once()
    finally:
        handle.remove()
    found.require("checkpointing recomputes (forwards of one layer)",
                  f"{before}, then {counted - before}", counted - before > before)  # fmt: skip
    wrong = int((~bits.equal_rows(plain, again)).sum())
    found.part("with gradient checkpointing", len(plain), wrong)
    odd = [name for name, grad in wanted.items() if not bits.equal(grad, got[name])]
    found.part("gradients with checkpointing", len(wanted), len(odd), "tensors", ", ".join(odd[:3]))


class WrongRows:
    """Observer that spoils chosen rows of what tells positions apart: the rotary table is computed
    for half their position; without one, Mamba-2's step is twice as long, and a delta rule decays
    64 steps in one, which forgets its state."""

    def __init__(self, rows: frozenset[tuple[str, int]], *, rotary: bool) -> None:
        self.chosen = rows
        self.rotary = rotary
        self.rows = 0
        self._index: list[int] = []
        self._count = 0

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        """Find the rows."""
        self._index = [i for i, row in enumerate(rows) if tuple(row) in self.chosen]
        self._count = len(rows)

    def on_site(self, call: SiteCall, /) -> Tensor | None:
        """Replace the rows."""
        if not self._index or call.rerun is None:
            return None
        if not self.rotary and call.site.op_class in ("decay", "time_step"):
            spoiled = call.output.clone()
            spoiled[self._index] *= 2 if call.site.op_class == "time_step" else 64
            self.rows += len(self._index)
            return spoiled
        if call.site.op_class != "rotary_table":
            return None
        positions = call.inputs["positions"].clone()
        positions[self._index] //= 2
        self.rows += len(self._index)
        return call.rerun({"positions": positions})


def _accuracy(bench: Bench, found: Findings) -> None:
    bench.progress("C5: error against untouched transformers in fp64")
    requests = bench.requests[: bench.size.phase_requests]
    stock = _referred(bench, requests, only(bench.stock_packed, requests), stock_plan())
    ours = _referred(bench, requests, only(bench.packed, requests), bench.plan, like=stock)
    accuracy = _measured(ours, stock)
    found.part("error against fp64 at most twice stock's", accuracy.compared, _beyond(accuracy),
               detail=_sizes(accuracy))  # fmt: skip
    rows = sum(len(request.tokens) for request in requests)
    chosen = [(r.id, r.sampled_mask.index(True) - 1) for r in requests if True in r.sampled_mask]
    few = frozenset(chosen[: max(1, rows // 100)])
    _choices(found, ours, stock, few, rows)
    classes = {site.op_class for site in bench.on().paged.instrument.sites}

    def spoiled(*, rotary: bool) -> TokenCount:
        wrong = WrongRows(few, rotary=rotary)
        control = _measured(_referred(bench, requests, None, bench.plan, wrong, like=stock), stock)
        return TokenCount(compared=control.compared, differing=_beyond(control))

    tries = [
        (what, functools.partial(spoiled, rotary=rotary))
        for what, rotary, needed in (
            ("a wrong rotary table", True, {"rotary_table"}),
            ("decays of another time", False, {"decay", "time_step"}),
        )
        if classes & needed
    ]
    what, count = first_red(tries)
    found.control(what, f"{len(few)} of {rows} rows", count.compared, count.differing)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Referred:
    """A run and its fp64 reference; replay: its choices of experts, if it makes any."""

    run: Run
    reference: dict[tuple[str, int], float]
    replay: Replay | None


def _referred(
    bench: Bench,
    requests: Sequence[Request],
    run: Run | None,
    plan: Plan,
    observer: Observer | None = None,
    *,
    like: _Referred | None = None,
) -> _Referred:
    """A packed run, made anew where it is not given or where experts are chosen.

    like: a run of the same requests, whose reference serves where no experts are chosen.
    """
    if not routers(bench.pristine.module):
        run = bench.on(plan).pack(requests, observer) if run is None else run
        reference = like.reference if like else reference_logprobs(bench.pristine, requests)
        return _Referred(run=run, reference=reference, replay=None)
    trace = RoutingTrace(observer)
    run = bench.on(plan).pack(requests, trace)
    replay = Replay(bench.pristine.module, trace)
    reference = reference_logprobs(bench.pristine, requests, replay=replay)
    return _Referred(run=run, reference=reference, replay=replay)


def _measured(ours: _Referred, stock: _Referred) -> Accuracy:
    return measure_accuracy(
        ours.reference, ours=ours.run, stock=stock.run, of_stock=stock.reference
    )


def _choices(
    found: Findings, ours: _Referred, stock: _Referred, few: frozenset[tuple[str, int]], rows: int
) -> None:
    """Experts are those of fp64 up to what twice the error of stock's scores explains."""
    if ours.replay is None or stock.replay is None:
        return
    error = slack(stock.replay)
    mine, theirs = judged(ours.replay, error), judged(stock.replay, error)
    found.part("experts as fp64 chooses them, up to twice the error of stock's scores",
               mine.compared, mine.wrong, "choices",
               f"{mine.flipped} flips (stock {theirs.flipped}), allowed: {error:.1e}")  # fmt: skip
    control = judged(ours.replay, error, few)
    found.control("the worst expert in the place of the last", f"{len(few)} of {rows} rows",
                  control.compared, control.wrong)  # fmt: skip


def _beyond(accuracy: Accuracy) -> int:
    """Tokens beyond the allowance; all of them when the mean is."""
    too_far = accuracy.ours.mean > accuracy.allowance * accuracy.stock.mean
    return accuracy.compared if too_far else accuracy.beyond


def _sizes(accuracy: Accuracy) -> str:
    ours, stock = accuracy.ours, accuracy.stock
    return (
        f"mean {ours.mean:.2e} (stock {stock.mean:.2e}), largest {ours.largest:.2e} "
        f"(stock {stock.largest:.2e})"
    )


def _entropy(bench: Bench, found: Findings) -> None:
    """Sampled tokens' mean -logprob estimates the entropy of what they were drawn from."""
    values = logprob_values(bench.sampled).values()
    entropy = -math.fsum(values) / max(1, len(values))
    share = entropy / math.log(bench.model.config.vocab_size)
    found.require("mean next-token entropy at most 70 % of a uniform one's", f"{share:.0%}",
                  len(values) > 0 and share <= MAX_ENTROPY)  # fmt: skip


GATE = Gate(
    id="C5",
    title="Trainer",
    claim="The packed trainer forward is the rollout, site by site and token by token, padded or "
    "packed or checkpointed; and it is still the right model.",
    check=check,
)
