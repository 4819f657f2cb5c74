"""New weights arrive in place, complete, and invalidate every state computed before."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from zeromismatch.kernels.errors import NonFiniteError, ScheduleError, UsageError
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.state import state_digest, weights_root
from zeromismatch.trainer.engines.base import (
    Hit,
    Policy,
    Publish,
    Sampling,
    Scenario,
    Schedule,
    Slice,
    Step,
)
from zeromismatch.trainer.engines.build import make_engine
from zeromismatch.trainer.engines.legal import legal


@pytest.fixture
def paged(tiny: Any) -> Any:
    return make_engine("paged", tiny, "aligned")


@pytest.fixture
def new_weights() -> dict[str, torch.Tensor]:
    other = load_model("tiny:llama", seed=1).module
    return {name: parameter.detach() for name, parameter in other.named_parameters()}


def whole(request: str, stop: int) -> Step:
    return Step(slices=(Slice(request=request, start=0, stop=stop),))


def test_published_weights_compute_as_freshly_loaded_ones(
    paged: Any, new_weights: Any, requests: Any, scenario: Any, bits_of: Any
) -> None:
    module = paged.loaded.module
    addresses = {name: p.data_ptr() for name, p in module.named_parameters()}
    alone = scenario(paged.schedule("alone", requests), requests)
    before = bits_of(paged.run(alone))
    paged.publish(new_weights, version=1)
    run = paged.run(alone)
    fresh = make_engine("paged", load_model("tiny:llama", seed=1), "aligned")
    assert bits_of(run) == bits_of(fresh.run(alone)) != before
    assert {sample.version for sample in run.samples} == {1}
    assert addresses == {name: p.data_ptr() for name, p in module.named_parameters()}
    assert paged.describe()["weights_digest"] == fresh.describe()["weights_digest"]
    assert paged.weights.digests == state_digest(module)


def test_publish_event_drops_state_and_marks_later_samples(
    paged: Any, new_weights: Any, requests: Any, scenario: Any
) -> None:
    publish = paged.stage(new_weights, version=4)
    new_weights["model.norm.weight"].zero_()  # the staged copy is the engine's own
    stale = (whole("r0", 52), publish, Hit(request="r2", source="r0", upto=32))
    with pytest.raises(ScheduleError, match=r"event 2 \(Hit\).*has state for \[0, 0\)"):
        paged.run(scenario(Schedule(events=stale), requests))
    assert paged.version == 0
    run = paged.run(
        scenario(Schedule(events=(whole("r0", 52), publish, whole("r1", 70))), requests)
    )
    assert {(s.request, s.version) for s in run.samples} == {("r0", 0), ("r1", 4)}
    with pytest.raises(ScheduleError, match="does not exceed version 4"):
        paged.run(scenario(run.executed, requests))


def test_prefix_cache_does_not_outlive_a_version(
    paged: Any, new_weights: Any, requests: Any
) -> None:
    prompts = [r for r in requests if r.id != "r1"]
    prompts = [
        type(r)(id=r.id, tokens=r.tokens[:40], sampling=type(r.sampling)(max_new_tokens=2))
        for r in prompts
    ]
    first = paged.generate(prompts)
    paged.publish(new_weights, version=1)
    second = paged.generate(prompts, Policy(max_running=1))
    assert {s.version for s in second.samples} == {1}
    assert [e.source for e in second.executed.events if isinstance(e, Hit)] == ["r0"] * 3
    assert first.requests != second.requests


def test_republishing_the_installed_weights_needs_no_copy(
    paged: Any, requests: Any, scenario: Any
) -> None:
    same = Publish(version=1, digest=paged.weights.root)
    events = (whole("r0", 52), same, whole("r0", 52))
    run = paged.run(scenario(Schedule(events=events), requests))
    assert {s.version for s in run.samples} == {1}
    foreign = Publish(version=2, digest="0" * 32)
    with pytest.raises(UsageError, match="call the engine's stage"):
        paged.run(scenario(Schedule(events=(foreign,)), requests))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), UsageError, "missing, first 'model.norm.weight'"),
        (lambda w: w.update(extra=torch.ones(1)), UsageError, "no tensor 'extra'"),
        (lambda w: w.update({"model.norm.weight": torch.ones(3)}), UsageError, "convert it"),
        (
            lambda w: w.update({"model.norm.weight": w["model.norm.weight"].bfloat16()}),
            UsageError,
            "convert it",
        ),
        (
            lambda w: w.update({"model.norm.weight": w["model.norm.weight"] * float("nan")}),
            NonFiniteError,
            "model.norm.weight",
        ),
        (
            lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}),
            UsageError,
            "are tied in the model but differ",
        ),
    ],
)
def test_bad_publication_touches_nothing(
    change: Any, error: Any, message: str, paged: Any, new_weights: Any
) -> None:
    before = weights_root(state_digest(paged.loaded.module))
    change(new_weights)
    with pytest.raises(error, match=message):
        paged.publish(new_weights, version=1)
    assert weights_root(state_digest(paged.loaded.module)) == before
    assert paged.version == 0


def test_tied_tensor_may_come_under_both_names_and_versions_must_rise(
    paged: Any, new_weights: Any
) -> None:
    both = new_weights | {"lm_head.weight": new_weights["model.embed_tokens.weight"].clone()}
    paged.publish(both, version=2)
    with pytest.raises(UsageError, match="does not exceed the installed version 2"):
        paged.publish(both, version=2)


@pytest.mark.parametrize("policy", [Policy(), Policy(max_step_tokens=40, num_pages=13)])
def test_weights_that_arrive_while_sampling_draw_the_rest_and_nothing_older_is_reused(
    paged: Any, new_weights: Any, requests: Any, policy: Policy
) -> None:
    prompts = [
        replace(r, sampling=Sampling(seed=i, max_new_tokens=9)) for i, r in enumerate(requests)
    ]
    asked = 0

    def between() -> Publish | None:
        nonlocal asked
        asked += 1
        return paged.stage(new_weights, 1) if asked == 6 else None

    old = make_engine("packed", load_model("tiny:llama"), "aligned")
    run = paged.generate(prompts, policy, between=between)
    new = make_engine("packed", paged.loaded, "aligned", instrument=paged.instrument)
    assert not legal(run.executed, paged.state_specs(), run.requests)
    assert sum(isinstance(event, Publish) for event in run.executed.events) == 1
    assert {sample.version for sample in run.samples} == {0, 1}
    scored = {
        version: {
            (sample.request, sample.position): sample.logprob_bits
            for sample in engine.run(
                Scenario(
                    model="", plan="", requests=run.requests,
                    schedule=engine.schedule("batched", run.requests),
                )
            ).samples
        }
        for version, engine in ((0, old), (1, new))
    }  # fmt: skip
    for sample in run.samples:
        key = (sample.request, sample.position)
        assert sample.logprob_bits == scored[sample.version][key]
        assert sample.logprob_bits != scored[1 - sample.version][key]
    for request in prompts:
        versions = [sample.version for sample in run.samples if sample.request == request.id]
        assert versions == sorted(versions)
        assert len(versions) == 9
