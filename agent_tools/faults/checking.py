"""Run what must find a fault, with the fault or without, and say who named what.

    check("B01", model)                  -> Caught(named=("rmsnorm: reduction order",), right=True)
    check("B01", model, planted=False)   -> Caught(named=(), right=False)

Without a fault nothing may be named. ``zm`` has no command for it: gates and tests call it.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ...kernels.attention import PAGE
from ...kernels.errors import ZeroMismatchError
from ...model_recipes.bindings import device_kind, dtype_name
from ...model_recipes.models import LoadedModel
from ...model_recipes.plan import aligned_plan
from ...model_recipes.state import named_state
from ...trainer.engines.base import Hit, Policy, Request, Sampling, Scenario, Schedule, Slice, Step
from ...trainer.engines.packed import PackedEngine
from ...trainer.engines.paged import PagedEngine
from ..anchor import addresses
from ..localize import Options, localize
from ..records import Divergence, Record
from ..rollouts import compare_tokens
from ..scenarios import random_requests
from ..sides import Side
from .catalogue import ROWS, By, Fault, fault_named, plant
from .sweep import swept

TEMPERATURE = 0.7
GROWTH = 1.0078125
"""New weights are the old ones times this."""


class Caught(Record):
    """What named a fault. ``right``: exactly what the catalogue expects, and nothing else."""

    fault: str
    planted: bool
    expected: str
    named: tuple[str, ...]
    right: bool
    detail: str = ""
    divergence: Divergence | None = None


def fault_requests(model: LoadedModel) -> tuple[Request, ...]:
    """Three short requests at a temperature of their own; the last two share a page."""
    first, second, _, fourth = random_requests(model, count=4, max_reply=6, seed=3)
    chosen = (_cut(first, 26), _cut(second, 37), _cut(fourth, 30))
    return tuple(
        replace(request, sampling=replace(request.sampling, temperature=TEMPERATURE))
        for request in chosen
    )


def _cut(request: Request, length: int) -> Request:
    tokens = request.tokens[:length]
    start = len(tokens) - 4
    return replace(
        request, tokens=tokens, turns=((start, len(tokens)),),
        sampled_mask=(False,) * start + (True,) * (len(tokens) - start),
    )  # fmt: skip


def check(
    name: str, model: LoadedModel, *, planted: bool = True,
    requests: Sequence[Request] | None = None,
) -> Caught:  # fmt: skip
    """Plant a fault (or not) and run what must find it. Seconds on a tiny model."""
    fault = fault_named(name)
    chosen = tuple(requests or fault_requests(model))
    if fault.sides == ROWS:  # every row is a step
        chosen = chosen[1:2]
    run = _CHECKS.get(fault.by)
    if run is None:  # two sides with weights of their own: the other one is no victim
        other = replace(model, module=copy.deepcopy(model.module))
        run = functools.partial(_published, trainer=other)
    with plant(name, model) if planted else contextlib.nullcontext():
        return run(fault, model, chosen, planted)


def _caught(
    fault: Fault, planted: bool, named: Sequence[str], detail: str = "",
    divergence: Divergence | None = None, right: bool = True,
) -> Caught:  # fmt: skip
    names = tuple(dict.fromkeys(named))
    return Caught(
        fault=fault.id, planted=planted, expected=fault.expected, named=names, detail=detail,
        right=right and names == (fault.expected,), divergence=divergence,
    )  # fmt: skip


def _localized(
    fault: Fault, model: LoadedModel, requests: Sequence[Request], planted: bool,
    right_model: LoadedModel | None = None,
) -> Caught:  # fmt: skip
    left, right = Side.parse(fault.sides[0]), Side.parse(fault.sides[1])
    found = localize(
        left, right, model, requests, plan="aligned", right_model=right_model,
        options=Options(self_test=False),
    )  # fmt: skip
    return name_divergence(fault, found, planted)


def name_divergence(fault: Fault, found: Divergence, planted: bool = True) -> Caught:
    """What a localization says, in the catalogue's words."""
    if found.anchor.misalignment is not None:
        what = found.anchor.misalignment
        return _caught(fault, planted, [f"{fault.by}: {what.what}"], what.message, found)
    named = [f"{each.op_class}: {each.cause.name}" for each in found.culprits]
    sites = {each.site for each in found.culprits}
    if fault.op_class == "kv_write":  # attention reads what was written there, and differs too
        named = [name for name in named if not name.startswith("attention")]
    facts = " ".join(fact for each in found.culprits for fact in each.pattern.facts)
    right = fault.site in (None, *sites) and len(sites) <= (1 if fault.site else len(sites))
    detail = "; ".join(each.cause.detail for each in found.culprits[:1]) or found.reason
    return _caught(fault, planted, named, detail, found, right and (fault.fact or "") in facts)


def _published(
    fault: Fault, model: LoadedModel, requests: Sequence[Request], planted: bool,
    trainer: LoadedModel,
) -> Caught:  # fmt: skip
    """Publish new weights to both sides, then compare them."""
    old = {name: tensor.clone() for name, tensor in named_state(model.module).items()}
    new = {name: tensor * GROWTH for name, tensor in named_state(trainer.module).items()}
    plan = aligned_plan(model.dtype, model.device)
    try:
        for loaded in (model, trainer):
            with contextlib.closing(PagedEngine(loaded, plan)) as engine:
                engine.publish(new, 1)
        return _localized(fault, model, requests, planted, right_model=trainer)
    finally:
        with torch.no_grad():
            for name, tensor in named_state(model.module).items():
                tensor.copy_(old[name])


def _moved(fault: Fault, model: LoadedModel, requests: Sequence[Request], planted: bool) -> Caught:
    """Publish the same weights; every tensor must lie where it lay, buffers included."""
    before = addresses(model)
    with contextlib.closing(PagedEngine(model, aligned_plan(model.dtype, model.device))) as engine:
        engine.publish(dict(named_state(model.module)), 1)
    after = addresses(model)
    moved = [name for name, address in before.items() if after[name] != address]
    detail = f"{len(moved)} of {len(before)} tensors lie elsewhere after the publication"
    return _caught(fault, planted, [f"{fault.by}: {name}" for name in moved], detail)


def _sampled(
    fault: Fault, model: LoadedModel, requests: Sequence[Request], planted: bool
) -> Caught:
    """Sample a few tokens; the trainer must give each the rollout's logprob."""
    prompts = [
        Request(id=r.id, tokens=r.tokens, sampling=Sampling(temperature=1.0, max_new_tokens=3))
        for r in requests
    ]
    plan = aligned_plan(model.dtype, model.device)
    with contextlib.closing(PagedEngine(model, plan)) as engine:
        rollout = engine.generate(prompts, Policy())
    with contextlib.closing(PackedEngine(model, plan)) as engine:
        schedule = engine.schedule("packed", rollout.requests)
        packed = engine.run(Scenario(
            model=model.spec, plan=plan.name, requests=rollout.requests, schedule=schedule
        ))  # fmt: skip
    count = compare_tokens(rollout, packed)
    named = [] if count.equal else [f"{fault.by}: {fault.expect}"]
    detail = f"{count.differing} of {count.compared} sampled tokens differ, first {count.first}"
    return _caught(fault, planted, named, detail)


def _refused(
    fault: Fault, model: LoadedModel, requests: Sequence[Request], planted: bool
) -> Caught:
    """Do what an engine must refuse; what it accepts is named."""
    state = {name: tensor.clone() for name, tensor in named_state(model.module).items()}
    engine = PagedEngine(model, aligned_plan(model.dtype, model.device))
    one = requests[1]
    try:
        if fault.expect == "a partial publication":
            engine.publish(dict(list(state.items())[1:]), 1)
        else:
            first = Step(slices=(Slice(request=one.id, start=0, stop=2 * PAGE),))
            rest = Step(slices=(Slice(request=one.id, start=PAGE, stop=len(one.tokens)),))
            publish = engine.stage({n: tensor * GROWTH for n, tensor in state.items()}, 1)
            hit = Hit(request=one.id, source=one.id, upto=PAGE)
            engine.run(Scenario(
                model=model.spec, plan="aligned", requests=(one,),
                schedule=Schedule(events=(first, publish, hit, rest)),
            ))  # fmt: skip
    except ZeroMismatchError as refusal:
        return _caught(fault, planted, [], str(refusal))
    finally:
        with torch.no_grad():
            for name, tensor in named_state(model.module).items():
                tensor.copy_(state[name])
        engine.close()
    return _caught(fault, planted, [f"{fault.by}: {fault.expect}"], "the engine accepted it")


def _certified(
    fault: Fault, model: LoadedModel, requests: Sequence[Request], planted: bool
) -> Caught:
    """Offer the kernel that serves to the sweep that admits kernels (``sweep.py``)."""
    assert fault.expect is not None
    found = swept(fault.expect, dtype_name(model.dtype), device_kind(model.device))
    named = [] if found.named is None else [f"{fault.by}: {found.named}"]
    return _caught(fault, planted, named, found.detail)


_CHECKS: dict[By, Callable[[Fault, LoadedModel, Sequence[Request], bool], Caught]] = {
    "operator": _localized,
    "anchor": _localized,
    "moved": _moved,
    "sampled": _sampled,
    "refused": _refused,
    "certified": _certified,
}
