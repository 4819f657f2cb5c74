"""Parts of gates by themselves: schedules that they build, and what they must not overlook."""

from typing import Any, cast

import pytest

from zeromismatch.agent_tools.gates import environment, inference, lifecycle
from zeromismatch.agent_tools.gates.base import Findings
from zeromismatch.agent_tools.gates.bench import QUICK, Bench, Engines, engines_on
from zeromismatch.kernels.errors import RecipeError
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import aligned_plan, stock_plan
from zeromismatch.trainer.engines.base import Request, Step


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("tiny:llama")


def test_the_ramp_has_a_step_of_every_size_and_runs_every_token(model: LoadedModel):
    lengths = (40, 33, 52, 34, 47, 38, 9, 2)
    requests = [
        Request(id=f"r{n}", tokens=tuple(range(3, 3 + length)), sampled_mask=(True,) * length)
        for n, length in enumerate(lengths)
    ]
    steps = [e for e in inference._ramp(requests).events if isinstance(e, Step)]
    sizes = [len(step.slices) for step in steps]
    assert sizes[8:15] == [1, 2, 3, 4, 5, 6, 7]  # eight prompts first
    reached = dict.fromkeys((r.id for r in requests), 0)
    for step in steps:
        for piece in step.slices:
            assert piece.start == reached[piece.request]
            reached[piece.request] = piece.stop
    assert [*reached.values()] == list(lengths)
    steps = [e for e in inference._ramp(requests[:7]).events if isinstance(e, Step)]
    assert {len(step.slices) for step in steps} == set(range(1, 8))


def test_a_plan_that_runs_in_one_engine_only_is_not_alive(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    tokens = tuple(range(5, 30))
    request = Request(id="a", tokens=tokens, sampled_mask=(False,) + (True,) * 24)
    plan = aligned_plan("float32", "cpu")
    bench = Bench(model=model, plan=plan, prompts=(), size=QUICK, quick=True)
    bench.sampled = bench.on().pack([request])  # type: ignore[misc]
    stock = engines_on(load_model("tiny:llama"), stock_plan())
    try:
        healthy, dead = Findings(), Findings()
        environment._alive(bench, healthy)
        assert healthy.parts[0].compared > 20
        assert healthy.parts[0].differing == 0
        monkeypatch.setattr(Engines, "pack", lambda self, *given: stock.run("packed", *given,
                            engine="packed"))  # fmt: skip
        environment._alive(bench, dead)
        assert dead.parts[0].differing > 20
    finally:
        stock.paged.close()
        bench.release()


def test_a_reload_that_derives_a_buffer_anew_is_seen_by_its_address():
    """vllm-ascend PR #7473: a graph would go on reading the old storage."""
    model = load_model("tiny:llama")
    before, rotary = lifecycle._addresses(model), cast(Any, model.module).model.rotary_emb
    digests = lifecycle._derived(model)
    rotary.inv_freq = rotary.inv_freq.clone()
    after = lifecycle._addresses(model)
    assert [n for n in before if before[n] != after[n]] == ["model.rotary_emb.inv_freq"]
    assert lifecycle._derived(model) == digests
    rotary.inv_freq[3] *= 1.5
    changed = lifecycle._derived(model)
    assert [n for n in digests if digests[n] != changed[n]] == ["model.rotary_emb.inv_freq"]


class _SampledElsewhere(Bench):
    """A bench whose rollout takes the plan off the model, as vLLM's does."""

    @property
    def requests(self) -> tuple[Request, ...]:
        self.release()
        tokens = tuple(range(5, 30))
        return (Request(id="a", tokens=tokens, sampled_mask=(False,) + (True,) * 24),)


def test_the_trainers_forward_runs_under_the_plan_whatever_sampled(model: LoadedModel):
    plan = aligned_plan("float32", "cpu")
    bench = _SampledElsewhere(model=model, plan=plan, prompts=(), size=QUICK, quick=True)
    requests, engines = bench.requests, bench.on()
    wanted = engines.pack(requests)
    assert bench.packed.samples == wanted.samples
    assert bench.alone.samples == wanted.samples
    bench.release()
    with pytest.raises(RecipeError, match="was taken off this model"):
        engines.pack(requests)
