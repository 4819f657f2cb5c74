"""C1: every operator of the model, at the model's own shapes, by itself.

The trainer's forward runs once over a few hundred rows; each operator is then run again on the very
inputs it got there, in ways that may not move a bit: any number of rows, rows in another order, one
row alone, NaN in the neighbouring rows, memory one element off alignment, one to three threads,
repeated. Operators of one class, contract and shape are swept once; all others are checked with one
row alone and with their rows shuffled. The same for the gradient with respect to rows; gradients of
weights add up over rows, so those are only repeated, misaligned and run under other threads.

Attention is in ``attention.py``, recurrent layers in ``recurrence.py``. Red controls: stock linear
layers and attention at the model's shapes, and one bit of one row in a hundred.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels import bits
from ...kernels.trial import Case, Variation, outputs, variations
from ...trainer.engines.base import Request, SiteCall
from .attention import sweep_attention
from .base import Findings, Gate
from .bench import Bench

ROW_COUNTS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 128, 129)
QUICK_ROW_COUNTS = (1, 2, 3, 7, 9, 17, 33, 65, 129)
MIN_ROWS = 130
CONSTANT = frozenset(("cos", "sin", "temperature"))
"""Inputs without a gradient."""
CACHED = frozenset(
    ("attention", "kv_write", "convolution", "recurrence_ssd", "recurrence_gated_delta",
     "recurrence_kda")
)  # fmt: skip
"""Classes that ``attention.py`` and ``recurrence.py`` sweep: they read and write a cache."""

Run = Callable[..., "Tensor | tuple[Tensor, ...]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One call of one site, kept: what a sweep starts from."""

    call: SiteCall
    inputs: dict[str, Tensor]

    @property
    def healthy(self) -> frozenset[int]:
        """Places of inputs that are refused when any row holds NaN."""
        refused = {"temperature"} | ({"logits"} if self.call.site.op_class == "topk" else set())
        return frozenset(place for place, name in enumerate(self.inputs) if name in refused)

    def run(self, *arguments: Tensor) -> Tensor:
        """The operator on other inputs of the same kind."""
        assert self.call.rerun is not None
        return self.call.rerun(dict(zip(self.inputs, arguments, strict=True)))


@dataclass(slots=True)
class Tally:
    """Rows compared and differing, by operator class; who differs first."""

    compared: dict[str, int] = field(default_factory=dict[str, int])
    differing: dict[str, int] = field(default_factory=dict[str, int])
    first: dict[str, str] = field(default_factory=dict[str, str])
    sites: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def add(self, op_class: str, site: str, how: str, wanted: Tensor, got: Tensor) -> None:
        """Compare rows (a scalar counts as one)."""
        pair = [each.reshape(1) if each.dim() == 0 else each for each in (wanted, got)]
        wrong = int((~bits.equal_rows(*pair)).sum())
        self.compared[op_class] = self.compared.get(op_class, 0) + pair[0].shape[0]
        self.differing[op_class] = self.differing.get(op_class, 0) + wrong
        if wrong:
            self.first.setdefault(op_class, f"{site}, {how}")
            self.sites.setdefault(op_class, set()).add(site)


class Collector:
    """Observer that keeps one operator of each class and shape, and checks the rest at once."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.kept: dict[tuple[object, ...], Operator] = {}
        self.seen: dict[str, int] = {}

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        """Rows are not needed by name."""

    def on_site(self, call: SiteCall, /) -> None:
        """Keep the first of a kind; check the others here, on one row and on shuffled rows."""
        op_class = call.site.op_class
        if op_class in CACHED or call.rerun is None:
            return
        self.seen[op_class] = self.seen.get(op_class, 0) + 1
        shapes = tuple((n, tuple(t.shape[1:]), t.dtype) for n, t in call.inputs.items())
        kind = (op_class, call.site.contract, shapes, tuple(call.output.shape[1:]))
        if kind not in self.kept:
            inputs = {name: tensor.clone() for name, tensor in call.inputs.items()}
            self.kept[kind] = Operator(call=call, inputs=inputs)
            return
        rows = call.output.shape[0]
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
        for how, index in (("one row alone", order[:1]), ("rows shuffled", order)):
            moved = {name: tensor[index] for name, tensor in call.inputs.items()}
            self.tally.add(op_class, call.site.name, how, call.output[index], call.rerun(moved))


def check(bench: Bench, found: Findings) -> None:
    """See the module."""
    tally, backward = Tally(), Tally()
    requests = enough(bench.requests)
    collector = Collector(tally)
    bench.progress("C1: one forward, every operator watched")
    engines = bench.on()
    engines.pack(requests, collector)
    parameters = dict(bench.model.module.named_parameters())
    for operator in collector.kept.values():
        bench.progress(f"C1: {operator.call.site.name}")
        sweep_rows(operator, tally, quick=bench.quick)
        sweep_gradients(operator, parameters, backward, quick=bench.quick)
    bench.progress("C1: operators that read a cache")
    stock = Tally()
    attended = sweep_attention(engines, requests, tally, backward, stock, quick=bench.quick)
    _report(found, "", tally)
    _report(found, " backward", backward)
    classes = {site.op_class for site in engines.paged.instrument.sites}
    tested = collector.seen.keys() | CACHED
    found.require("every operator class was swept", ", ".join(sorted(classes - tested)) or "all",
                  classes <= tested)  # fmt: skip
    rows = sum(len(request.tokens) for request in requests)
    found.require(f"at least {MIN_ROWS} rows", rows, rows >= MIN_ROWS)
    found.notes.append(
        f"{len(collector.kept)} kinds of operators swept, {sum(collector.seen.values())} sites and "
        f"{attended} sites that read a cache checked"
    )
    _controls(collector, parameters, stock, found, quick=bench.quick)


def enough(requests: Sequence[Request]) -> tuple[Request, ...]:
    """The fewest leading requests with ``MIN_ROWS`` rows; at least two."""
    rows = 0
    for count, request in enumerate(requests, 1):
        rows += len(request.tokens)
        if count > 1 and rows >= MIN_ROWS:
            return tuple(requests[:count])
    return tuple(requests)


def all_variations(
    case: Case, expected: Sequence[Tensor], healthy: frozenset[int], *, quick: bool, threads: bool
) -> Iterator[Variation]:
    """Everything that may not move a bit, and leading rows at every count in use.

    healthy: places of arguments that no operator takes with NaN in any row (a temperature).
    """
    for each in variations(case, expected, quick=not threads):
        whole = each.kept is not None
        arguments = (
            case.arguments[place] if whole and place in healthy else argument
            for place, argument in enumerate(each.arguments)
        )
        yield replace(each, arguments=tuple(arguments))
    if not case.rows:
        return
    rows = expected[0].shape[0]
    for count in QUICK_ROW_COUNTS if quick else ROW_COUNTS:
        if count < rows:
            head = tuple(
                each[:count].contiguous() if place in case.rows else each
                for place, each in enumerate(case.arguments)
            )
            yield Variation(
                label=f"{count} rows", arguments=head, expected=[each[:count] for each in expected]
            )


def sweep(
    run: Run,
    case: Case,
    tally: Tally,
    op_class: str,
    *,
    quick: bool,
    threads: bool = True,
    healthy: frozenset[int] = frozenset(),
) -> None:
    """Run a case in all variations and compare with the case as it is."""
    expected = outputs(run(*case.arguments))
    for variation in all_variations(case, expected, healthy, quick=quick, threads=threads):
        got = outputs(_under(variation.threads, run, variation.arguments))
        for wanted, each in zip(variation.expected, got, strict=True):
            kept = each if variation.kept is None else each[variation.kept]
            tally.add(op_class, case.label, variation.label, wanted, kept)


def _under(threads: int | None, run: Run, arguments: tuple[Tensor, ...]) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return run(*arguments)
    finally:
        torch.set_num_threads(before)


def sweep_rows(operator: Operator, tally: Tally, *, quick: bool) -> None:
    """The forward of one operator, compared with what the model itself got."""
    site = operator.call.site
    case = Case(
        label=site.name,
        arguments=tuple(operator.inputs.values()),
        rows=tuple(range(len(operator.inputs))),
    )
    with torch.no_grad():
        tally.add(site.op_class, site.name, "run again by itself", operator.call.output,
                  operator.run(*case.arguments))  # fmt: skip
        sweep(operator.run, case, tally, site.op_class, quick=quick, healthy=operator.healthy)


def sweep_gradients(
    operator: Operator, parameters: Mapping[str, Tensor], tally: Tally, *, quick: bool
) -> None:
    """Gradients with respect to rows, then to weights, under one fixed upstream gradient."""
    site, names = operator.call.site, list(operator.inputs)
    if not operator.call.output.is_floating_point():
        return  # a choice has no gradient
    differentiable = [
        place
        for place, (name, tensor) in enumerate(operator.inputs.items())
        if tensor.is_floating_point() and name not in CONSTANT
    ]
    weights = [parameters[name] for name in operator.call.weights if name in parameters]
    generator = torch.Generator().manual_seed(len(names))
    upstream = torch.randn(operator.call.output.shape, generator=generator)
    upstream = upstream.to(operator.call.output)
    arguments = (*operator.inputs.values(), upstream)

    def rows(*given: Tensor) -> tuple[Tensor, ...]:
        return gradient(operator, differentiable, (), given)

    def sums(*given: Tensor) -> tuple[Tensor, ...]:
        return gradient(operator, (), weights, given)

    if differentiable:
        case = Case(label=site.name, arguments=arguments, rows=tuple(range(len(arguments))))
        sweep(rows, case, tally, site.op_class, quick=quick, healthy=operator.healthy)
    if weights:
        sweep(sums, Case(label=site.name, arguments=arguments), tally, site.op_class, quick=quick,
              threads=not quick)  # fmt: skip


def gradient(
    operator: Operator, places: Sequence[int], weights: Sequence[Tensor], given: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of the chosen inputs and weights; the last of ``given`` is the upstream one."""
    *inputs, upstream = given
    for place in places:
        inputs[place] = inputs[place].detach().requires_grad_()
    wanted = [inputs[place] for place in places] + list(weights)
    with torch.enable_grad():
        out = operator.run(*inputs)
    found = cast(
        "tuple[Tensor | None, ...]",
        torch.autograd.grad(out, wanted, upstream, allow_unused=True),
    )
    return tuple(
        torch.zeros_like(each) if grad is None else grad
        for each, grad in zip(wanted, found, strict=True)
    )


def _report(found: Findings, suffix: str, tally: Tally) -> None:
    for op_class, compared in tally.compared.items():
        differing = tally.differing[op_class]
        detail = f"first: {tally.first[op_class]}" if differing else ""
        found.part(op_class + suffix, compared, differing, "rows", detail)
        names = sorted(tally.sites.get(op_class, ()))
        if names:
            found.culprits.append(f"{op_class}{suffix}: {len(names)} sites, first {names[0]}")


def _controls(
    collector: Collector,
    parameters: Mapping[str, Tensor],
    stock: Tally,
    found: Findings,
    *,
    quick: bool,
) -> None:
    """Stock linear layers and attention, and one bit of one row, through the same sweep.

    stock: already holds stock attention. Either may be invariant on some processor at some dtype
    (bf16 linear layers of oneDNN are); both never were.
    """
    linears = [o for o in collector.kept.values() if o.call.site.op_class in ("linear", "lm_head")]
    flipped = Tally()
    for operator in linears:
        tensors = [parameters[name] for name in operator.call.weights]
        weight = next(each for each in tensors if each.dim() == 2)
        bias = next((each for each in tensors if each.dim() == 1), None)
        case = Case(label="", arguments=tuple(operator.inputs.values()), rows=(0,))

        def run(x: Tensor, weight: Tensor = weight, bias: Tensor | None = bias) -> Tensor:
            return functional.linear(x, weight, bias)

        with torch.no_grad():
            sweep(run, case, stock, "linear", quick=quick)
    by_class = ", ".join(f"{stock.differing[name]} {name} rows" for name in stock.compared)
    found.control("stock linear layers and attention at the model's shapes",
                  f"stock operators: {by_class}", sum(stock.compared.values()),
                  sum(stock.differing.values()))  # fmt: skip
    operator = linears[0]
    case = Case(label="", arguments=tuple(operator.inputs.values()), rows=(0,))

    def one_bit(x: Tensor) -> Tensor:
        out = operator.run(x)
        if out.shape[0] > 100:
            bits.int_view(out)[out.shape[0] // 2, 0] ^= 1
        return out

    with torch.no_grad():
        sweep(one_bit, case, flipped, "flipped", quick=quick, threads=False)
    touches = f"1 of {operator.call.output.shape[0]} rows"
    found.control("one bit of one row, above 100 rows", touches,
                  flipped.compared["flipped"], flipped.differing["flipped"])  # fmt: skip


GATE = Gate(
    id="C1",
    title="Operators",
    claim="Each operator gives a row the same bits whatever the number of rows, their order, their "
    "neighbours, alignment and threads; forward and backward.",
    check=check,
)
