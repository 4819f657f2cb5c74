"""Every dense architecture: stock kernels are red, aligned ones equal and still the right model."""

import random

import pytest

from zeromismatch.agent_tools.accuracy import measure_accuracy, reference_logprobs
from zeromismatch.agent_tools.localize import Options, localize
from zeromismatch.agent_tools.records import Divergence
from zeromismatch.agent_tools.sides import Side
from zeromismatch.model_recipes.models import DTypeName, LoadedModel, load_model
from zeromismatch.trainer.engines.base import Request, Run, Scenario
from zeromismatch.trainer.engines.build import make_engine
from zeromismatch.trainer.engines.schedules import build_schedule

ARCHITECTURES = ("tiny:llama", "tiny:qwen2", "tiny:qwen3", "tiny:mistral", "tiny:gemma3_text")
SEEDS: dict[DTypeName, tuple[int, ...]] = {"float32": (1, 2), "bfloat16": (3,)}
GROUPED = {"tiny:gemma3_text": "gated_gelu"}


def requests() -> tuple[Request, ...]:
    """Five pages each, longer than every window; 35 tokens are shared, the last 20 sampled."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 3000) for _ in range(35)]
    made: list[Request] = []
    for index, length in enumerate((70, 66)):
        tokens = (*shared, *(rng.randrange(3, 3000) for _ in range(length - 35)))
        mask = (False,) * (length - 20) + (True,) * 20
        made.append(Request(id=f"r{index}", tokens=tokens, sampled_mask=mask))
    return tuple(made)


def compare(model: LoadedModel, left: str, right: str, plan: str) -> Divergence:
    named = (side.partition(":") for side in (left, right))
    sides = [Side(engine=engine, schedule=schedule) for engine, _, schedule in named]
    options = Options(causes=False, self_test=False)
    return localize(*sides, model, requests(), plan=plan, options=options)


def score(model: LoadedModel, side: str, plan: str) -> Run:
    name, _, schedule = side.partition(":")
    engine = make_engine(name, model, plan)
    built = build_schedule(schedule, requests(), engine.state_specs())
    try:
        return engine.run(
            Scenario(model=model.spec, plan=plan, requests=requests(), schedule=built)
        )
    finally:
        engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", ARCHITECTURES)
def test_aligned_is_equal_and_stock_is_not(spec: str, dtype: DTypeName) -> None:
    model = load_model(spec, dtype=dtype)
    for seed in SEEDS[dtype]:
        aligned = compare(model, f"paged:fuzz:{seed}", "packed:packed", "aligned")
        assert (aligned.status, aligned.groups) == ("EQUAL", ()), aligned.reason
    stock = compare(model, "transformers:decode", "transformers:alone", "stock")
    assert stock.status == "DIVERGENT"
    culprits = {group.op_class for group in stock.groups}
    assert "attention" in culprits
    if dtype == "float32":
        assert {"linear", "lm_head", GROUPED.get(spec, "gated")} <= culprits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [*ARCHITECTURES, "tiny:gemma2", "tiny:gpt_oss+dense"])
def test_aligned_error_against_fp64_is_at_most_twice_the_stock_error(
    spec: str, dtype: DTypeName
) -> None:
    model = load_model(spec, dtype=dtype)
    reference = reference_logprobs(model, requests())
    stock = score(model, "transformers:alone", "stock")
    accuracy = measure_accuracy(
        reference, ours=score(model, "packed:packed", "aligned"), stock=stock
    )
    assert accuracy.compared == 40
    assert accuracy.passed


def test_as_many_tokens_as_heads_are_not_taken_for_heads() -> None:
    """Gemma's norms see q as [batch, heads, tokens, D]; six rows of six heads look alike."""
    model = load_model("tiny:gemma3_text")
    short = [Request(id="a", tokens=tuple(range(5, 29)), sampled_mask=(False, *(True,) * 23))]
    sides = [Side(engine=e, schedule=s) for e, s in (("paged", "chunk:6"), ("packed", "packed"))]
    found = localize(*sides, model, short, plan="aligned", options=Options(causes=False))
    assert found.status == "EQUAL", found.reason
