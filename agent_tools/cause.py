"""Cause classes: why an operator gave other bits, from experiments on the operator itself.

Each experiment runs one call of the culprit again with one thing changed and looks at the bits of
one affected row. Evidence is what was measured, never a guess; where no experiment decides, the
cause is ``unclassified`` and the list says what was tried.

    experiment    what it does                                a change of bits means
    again         the same inputs                             nondeterminism
    neighbours    other rows become NaN, large, then 0        batch leak
    definition    the model's own code, other rows 0, then      model-defined: no kernel can help
                  large (modules that no formula defines)
    row count     the row alone; as many copies of it as      reduction order, or a rounding point
                  the reference's call had rows               where the operator sums nothing
    one term      inputs of which each sum has one non-zero   rounding point: with such inputs the
                  term; row count again                       order of a sum cannot matter
                  ... the same with bf16 terms: equal again   intermediate dtype: terms are narrowed
    narrow        do all outputs of one side only fit a       intermediate dtype
                  narrower dtype?

Operators that read state (attention) cannot be run again alone; ``exact.py`` runs the whole model
on inputs that make every sum exact. ``pytest tests/agent_tools/localize`` plants such faults.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..kernels import bits
from ..trainer.engines.base import SiteCall
from .records import Cause, CauseName, Probe

LARGE = 1e4
SUMMING_CLASSES = frozenset((
    "linear", "lm_head", "rmsnorm", "rmsnorm_wide", "attention", "logprob", "router",
    "grouped_linear", "combine", "topk_weights", "convolution", "l2norm", "gated_rmsnorm",
    "gated_rmsnorm_wide", "recurrence_ssd", "recurrence_gated_delta", "recurrence_kda",
))  # fmt: skip
COPY_CLASSES = frozenset({"kv_write"})
CHOICE_CLASSES = frozenset({"topk"})
PRODUCT_CLASSES = frozenset({"linear", "lm_head", "router"})
ONE_TERM_CLASSES = frozenset({"linear", "lm_head", "rmsnorm", "rmsnorm_wide"})
ONE_TERM_TRIALS = 8
NARROWER = {torch.float32: (torch.bfloat16, torch.float16)}
NARROW_COPIES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def probe_call(call: SiteCall, row: int, reference: Tensor, rows: int) -> tuple[Probe, ...]:
    """Experiments on one call at one affected row.

    reference: the other side's output row [1, ...]; rows: how many rows its call had.
    """
    if call.site.op_class in COPY_CLASSES:
        narrow = _narrow_copy(call.output[row : row + 1], reference)
        result = "this operator only moves bits, and what it moved does not come back"
        moved = None if narrow.decided else "stale or wrong state"
        return narrow, Probe(name="copy", result=result, decided=moved)
    if call.site.op_class in CHOICE_CLASSES:
        own = call.output[row : row + 1]
        return _again(call, row, own), _tie(call, row, own, reference)
    probes = [_narrow(call.output[row : row + 1], reference)]
    if call.rerun is None:
        probes.append(Probe(name="again", result="this operator reads state: not run alone"))
        return tuple(probes)
    own = call.output[row : row + 1]
    probes.append(_again(call, row, own))
    if len(call.output) > 1:
        probes.append(_neighbours(call, row, own))
    probes += _definition(call, row, rows)
    probes.append(_row_count(call, row, own, reference, rows))
    if call.site.op_class in ONE_TERM_CLASSES:
        probes.append(_one_term(call, row, rows))
    return tuple(probes)


def _run(call: SiteCall, inputs: Mapping[str, Tensor]) -> Tensor:
    assert call.rerun is not None
    output = call.rerun(inputs)
    return output.reshape(-1, *call.output.shape[1:])


def _again(call: SiteCall, row: int, own: Tensor) -> Probe:
    times = [_run(call, call.inputs)[row : row + 1] for _ in range(3)]
    other = sum(not bits.equal(output, own) for output in times)
    return Probe(
        name="again",
        result=f"{other} of 3 repeats with the same inputs gave other bits",
        decided="nondeterminism" if other else None,
    )


def _tie(call: SiteCall, row: int, own: Tensor, reference: Tensor) -> Probe:
    """Whether two choices from equal scores differ only among candidates of equal score."""
    scores = call.inputs["logits"][row : row + 1]
    mine, theirs = (scores.gather(1, chosen).sort().values for chosen in (own, reference))
    if not bits.equal(mine, theirs):
        return Probe(name="tie", result="the two choices have other scores: not a tie")
    same = bits.equal(own.sort().values, reference.sort().values)
    what = "the same candidates in another order" if same else "other candidates of equal score"
    return Probe(name="tie", result=f"from equal scores, {what}", decided="tie-break")


def _neighbours(call: SiteCall, row: int, own: Tensor) -> Probe:
    changed = []
    for name, value in (("NaN", float("nan")), (f"{LARGE:.0e}", LARGE), ("0", 0.0)):
        inputs = {key: _fill_others(tensor, row, value) for key, tensor in call.inputs.items()}
        if not bits.equal(_run(call, inputs)[row : row + 1], own):
            changed.append(name)
    result = "the row's bits do not depend on its neighbours' values"
    if changed:
        result = f"the row's bits change when its neighbours become {' or '.join(changed)}"
    return Probe(name="neighbours", result=result, decided="batch leak" if changed else None)


def _definition(call: SiteCall, row: int, rows: int) -> list[Probe]:
    """Whether the model itself lets a token's value depend on its companions.

    Only where its own code is the definition: what is a linear layer or a norm here has a formula,
    row by row; what leaks there is a fault. Companions are finite: 0 times NaN defines nothing.
    """
    if call.definition is None:
        return []
    many = _copies(call.inputs, row, max(2, rows, len(call.output)))
    own = [
        call.definition({key: _fill_others(each, 0, value) for key, each in many.items()})[:1]
        for value in (0.0, LARGE)
    ]
    if bits.equal(*own):
        return [Probe(name="definition", result="the model's own code takes each row by itself")]
    result = "by the model's own code a token's value depends on which others are in the batch"
    return [Probe(name="definition", result=result, decided="model-defined")]


def _fill_others(tensor: Tensor, row: int, value: float) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    filled = torch.full_like(tensor, value)
    filled[row] = tensor[row]
    return filled


def _row_count(call: SiteCall, row: int, own: Tensor, reference: Tensor, rows: int) -> Probe:
    counts = sorted({1, rows, len(call.output)})
    outputs = {count: _run(call, _copies(call.inputs, row, count))[:1] for count in counts}
    changed = [count for count in counts if not bits.equal(outputs[count], own)]
    as_reference = [count for count in counts if bits.equal(outputs[count], reference)]
    result = f"equal bits at {', '.join(map(str, counts))} rows"
    if changed:
        result = (
            f"in a call of {len(call.output)} rows; other bits at "
            f"{', '.join(map(str, changed))} rows of the same input"
        )
        if as_reference:
            result += f"; the reference's bits at {', '.join(map(str, as_reference))}"
    cause: CauseName = (
        "reduction order" if call.site.op_class in SUMMING_CLASSES else "rounding point"
    )
    return Probe(name="row count", result=result, decided=cause if changed else None)


def _copies(inputs: Mapping[str, Tensor], row: int, count: int) -> dict[str, Tensor]:
    return {
        key: tensor[row : row + 1].expand(count, *tensor.shape[1:]).contiguous()
        for key, tensor in inputs.items()
    }


def _one_term(call: SiteCall, row: int, rows: int) -> Probe:
    """With one non-zero input per row every order of summation gives the same bits."""
    counts = sorted({1, rows, len(call.output)})
    where = ", ".join(map(str, counts))

    def same(dtype: torch.dtype | None = None) -> bool:
        alone = _copies(call.inputs, row, 1)
        trials = [_single_term(alone, trial, dtype) for trial in range(ONE_TERM_TRIALS)]
        inputs = {key: torch.cat([trial[key] for trial in trials]) for key in alone}
        outputs = [_in_calls_of(call, inputs, count) for count in counts]
        return all(bits.equal(output, outputs[0]) for output in outputs[1:])

    if same():
        return Probe(
            name="one term",
            result=f"with one non-zero term in every sum: equal bits at {where} rows",
        )
    result = f"even with one non-zero term in every sum the bits differ between {where} rows"
    if call.site.op_class in PRODUCT_CLASSES and same(torch.bfloat16):
        result += ", but not where that term is a bfloat16 number: one of them narrows its inputs"
        return Probe(name="one term", result=result, decided="intermediate dtype")
    return Probe(name="one term", result=result, decided="rounding point")


def _in_calls_of(call: SiteCall, inputs: Mapping[str, Tensor], count: int) -> Tensor:
    """The output of every trial's row, computed in calls of ``count`` rows."""
    parts: list[Tensor] = []
    for first in range(0, ONE_TERM_TRIALS, count):
        rows = (first + torch.arange(count)) % ONE_TERM_TRIALS
        output = _run(call, {key: tensor[rows] for key, tensor in inputs.items()})
        parts.append(output[: ONE_TERM_TRIALS - first])
    return torch.cat(parts)


def _single_term(
    inputs: Mapping[str, Tensor], trial: int, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """dtype: the term is a number of that dtype, too."""
    single = dict(inputs)
    for key, tensor in inputs.items():
        if tensor.is_floating_point():
            single[key] = torch.zeros_like(tensor)
            flat = single[key].view(1, -1)
            term = torch.tensor(0.5 + (trial + 1) * 0.6180339 % 0.5)
            flat[0, (trial + 1) * 7919 % flat.shape[1]] = term.to(dtype or term.dtype)
    return single


def _narrow(own: Tensor, reference: Tensor) -> Probe:
    for dtype in NARROWER.get(own.dtype, ()):
        mine = bits.equal(own.to(dtype).to(own.dtype), own)
        theirs = bits.equal(reference.to(dtype).to(own.dtype), reference)
        if mine != theirs:
            side, name = ("left" if mine else "right"), str(dtype).removeprefix("torch.")
            return Probe(
                name="narrow",
                result=f"every value on the {side} is a {name} number, on the other side not",
                decided="intermediate dtype",
            )
    return Probe(name="narrow", result="neither side's values all fit a narrower dtype")


def _narrow_copy(own: Tensor, reference: Tensor) -> Probe:
    """Whether one side's copy is the other's, rounded to a narrower dtype."""
    for dtype in NARROW_COPIES:
        for side, mine, theirs in (("left", own, reference), ("right", reference, own)):
            if dtype.itemsize < own.dtype.itemsize and bits.equal(
                theirs.to(dtype).to(own.dtype), mine
            ):
                name = str(dtype).removeprefix("torch.")
                return Probe(
                    name="narrow",
                    result=f"the {side} holds the other side's values rounded to {name}",
                    decided="intermediate dtype",
                )
    return Probe(name="narrow", result="neither side's values are the other's, rounded")


PRECEDENCE: tuple[CauseName, ...] = (
    "nondeterminism",
    "model-defined",
    "batch leak",
    "padding read",
    "stale or wrong state",
    "tie-break",
    "wrong formula",
    "intermediate dtype",
    "rounding point",
    "reduction order",
)


def conclude(probes: Sequence[Probe]) -> Cause:
    """The class that the experiments point to; the strongest finding wins."""
    decided = {probe.decided: probe for probe in reversed(probes) if probe.decided is not None}
    for name in PRECEDENCE:
        if name in decided:
            return Cause(name=name, detail=decided[name].result, probes=tuple(probes))
    tried = ", ".join(probe.name for probe in probes) or "nothing"
    return Cause(name="unclassified", detail=f"tried: {tried}", probes=tuple(probes))
