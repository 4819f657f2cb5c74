"""Parts of gates by themselves: schedules that they build, and what they must not overlook."""

from dataclasses import asdict
from typing import Any, cast

import pytest

from zeromismatch.agent_tools.anchor import addresses
from zeromismatch.agent_tools.gates import environment, inference, lifecycle
from zeromismatch.agent_tools.gates.apart import apart
from zeromismatch.agent_tools.gates.base import Control, Findings, judge
from zeromismatch.agent_tools.gates.base import Request as Asked
from zeromismatch.agent_tools.gates.bench import (
    FULL,
    QUICK,
    Bench,
    Engines,
    Size,
    engines_on,
    first_red,
    requests_digest,
)
from zeromismatch.agent_tools.gates.budget import LEAST, fitted, row_operations
from zeromismatch.agent_tools.gates.run import GATES, prompts_for, run_gate
from zeromismatch.agent_tools.rollouts import TokenCount
from zeromismatch.agent_tools.scenarios import default_requests
from zeromismatch.agent_tools.second_process import second_process
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
    before, rotary = addresses(model), cast(Any, model.module).model.rotary_emb
    digests = lifecycle._derived(model)
    rotary.inv_freq = rotary.inv_freq.clone()
    after = addresses(model)
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


@pytest.mark.parametrize("most", [QUICK, FULL])
def test_a_large_model_gets_less_of_everything_but_never_less_than_the_floors(most: Size):
    assert fitted(most, 1e6) == (most, 1.0)
    assert fitted(most, 1e13)[0] == LEAST[most]
    before = asdict(most)
    for operations in (1e8, 1.5e8, 3e8, 1e9):
        size, share = fitted(most, operations)
        assert 0 < share < 1.01
        now, least = asdict(size), asdict(LEAST[most])
        assert all(least[name] <= now[name] <= before[name] for name in now)
        before = now


def test_quick_runs_of_models_with_long_chunks_make_fewer_random_schedules():
    counts = {name: n for name, n in asdict(fitted(QUICK, 1e6, chunk=64)[0]).items()
              if n != asdict(QUICK)[name]}  # fmt: skip
    assert counts == {"fuzzed": 3, "fuzz_requests": 2, "timed": 4}
    assert fitted(QUICK, 1e6, chunk=32)[0] == QUICK
    assert fitted(FULL, 1e6, chunk=64)[0] == FULL


def test_a_row_of_a_tiny_model_costs_two_operations_per_weight(model: LoadedModel):
    weights = sum(p.numel() for p in model.module.parameters() if p.dim() > 1)
    assert row_operations(model) == 2 * weights  # the table is the head as well
    assert fitted(FULL, row_operations(model)) == (FULL, 1.0)


@pytest.mark.parametrize(("touches", "crude"), [
    ("1 of 100 rows", False), ("1 of 99 rows", True), ("3 of 299 rows", True),
    ("one stock operator class", False), ("1 bit of model.norm.weight", False),
])  # fmt: skip
def test_a_control_that_spoils_more_than_a_row_in_a_hundred_is_crude(touches: str, crude: bool):
    control = Control(name="a", touches=touches, compared=9, differing=9, red=True)
    assert control.crude == crude


@pytest.mark.slow
def test_gates_in_a_second_process_find_what_they_find_here(model: LoadedModel):
    plan, size = aligned_plan("float32", "cpu"), LEAST[QUICK]
    asked = Asked(model="tiny:llama", dtype="float32", device="cpu", seed=0, rollout="paged",
                  gates=("C7",), quick=True)  # fmt: skip
    prompts = tuple(prompts_for(model, size, 0, None))
    digest = requests_digest(prompts)
    with (
        second_process("tiny:llama", dtype="float32", device="cpu", seed=0) as pool,
        apart(asked, plan, size, ["C7"], prompts=digest, threads=1, pool=pool) as other,
    ):
        bench = Bench(model=model, plan=plan, prompts=prompts, size=size, quick=True)
        here = run_gate(next(gate for gate in GATES if gate.id == "C7"), bench)
        bench.release()
        (there,) = other.results()
    assert there.result == here.result == "pass"
    assert [*there.parts, *there.controls] == [*here.parts, *here.controls]


@pytest.mark.parametrize(("differing", "tried"), [((0, 3, 9), 2), ((0, 0, 0), 3)])
def test_red_controls_are_tried_until_one_bites(differing: tuple[int, ...], tried: int):
    ran: list[str] = []

    def make(name: str, count: int):
        def run() -> TokenCount:
            ran.append(name)
            return TokenCount(compared=10, differing=count)

        return name, run

    found = Findings()
    found.part("something", 10, 0)
    found.stock_control(*first_red([make(f"try {n}", c) for n, c in enumerate(differing)]))
    assert len(ran) == tried
    assert found.controls[0].name == ran[-1]
    assert judge(found)[0] == ("pass" if any(differing) else "inconclusive")


def test_stock_recurrences_differ_in_bf16_where_few_decoded_rows_hide_it():
    """Seen on an H200: 40 tokens that stock's gated delta rule decoded had their prompt's bits."""
    model = load_model("tiny:qwen3_next", dtype="bfloat16")
    requests = default_requests(model, count=2, max_reply=2)
    bench = Bench(model=model, plan=stock_plan(), prompts=(), size=QUICK, quick=True)
    bench.sampled = bench.on().pack(requests)  # type: ignore[misc]
    name, count = first_red(bench.stock_recurrence("recurrence_gated_delta"))
    bench.release()
    assert "chunk" in name
    assert count.differing > count.compared // 4
