"""The stock baseline: it really is transformers, it is red, and it says what it cannot do."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import CapabilityError, RecipeError, UsageError
from zeromismatch.model_recipes.models import load_model
from zeromismatch.trainer.engines.base import (
    Evict,
    Hit,
    Preempt,
    Publish,
    Resume,
    Schedule,
    Slice,
    Step,
)
from zeromismatch.trainer.engines.build import make_engine
from zeromismatch.trainer.engines.transformers import TransformersEngine, cache_argument


@pytest.fixture(scope="module")
def stock() -> Iterator[TransformersEngine]:
    engine = make_engine("transformers", load_model("tiny:llama"), "stock")
    assert isinstance(engine, TransformersEngine)
    yield engine
    engine.close()


def test_whole_prompt_gives_the_untouched_models_logprobs(
    stock: TransformersEngine, requests: Any, scenario: Any, bits_of: Any
) -> None:
    request = requests[0]
    run = stock.run(scenario(stock.schedule("alone", requests[:1]), requests[:1]))
    ids = torch.tensor([request.tokens])
    model = load_model("tiny:llama").module
    with torch.no_grad():
        keep = torch.arange(len(request.tokens) - 1)
        logits = model(ids, use_cache=False, logits_to_keep=keep).logits[0]
    expected = logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert list(bits_of(run).values()) == bits.int_view(expected).tolist()


def test_cached_steps_read_their_cache(
    stock: TransformersEngine, requests: Any, scenario: Any
) -> None:
    """Decode and chunks differ from the whole prompt in rounding, and only in rounding."""
    runs = {
        name: stock.run(scenario(stock.schedule(name, requests), requests)).samples
        for name in ("alone", "mixed", "decode", "chunk:7")
    }
    values = {
        name: torch.tensor([s.logprob_bits for s in run], dtype=torch.int32).view(torch.float32)
        for name, run in runs.items()
    }
    for name in ("mixed", "decode", "chunk:7"):
        assert [s.position for s in runs[name]] == [s.position for s in runs["alone"]]
        assert float((values[name] - values["alone"]).abs().max()) < 1e-3
        assert not bits.equal(values[name], values["alone"]), f"{name} should be red"


def test_evicted_and_preempted_requests_start_again(
    stock: TransformersEngine, requests: Any, scenario: Any
) -> None:
    name = requests[0].id
    first, second = (
        Step(slices=(Slice(request=name, start=start, stop=stop),))
        for start, stop in ((0, 20), (20, 52))
    )
    plain = stock.run(scenario(Schedule(events=(first, second)), requests[:1]))
    drops = [(Evict(request=name),), (Preempt(request=name), Resume(request=name))]
    for drop in drops:
        events = (first, *drop, first, second)
        assert stock.run(scenario(Schedule(events=events), requests[:1])).samples == plain.samples


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ((Hit(request="r2", source="r0", upto=16),), "prefix hits"),
        ((Publish(version=1, digest="x"),), "a publication"),
        ((Step(slices=(Slice(request="r2", start=0, stop=9),), padded_rows=1),), "padding rows"),
        ((Step(slices=(Slice(request="r2", start=0, stop=9, keep=8),)),), "rejected drafts"),
        (
            (
                Step(
                    slices=(
                        Slice(request="r0", start=30, stop=31),
                        Slice(request="r2", start=0, stop=9),
                    )
                ),
            ),
            "continues several requests at once",
        ),
        (
            (
                Step(
                    slices=(
                        Slice(request="r1", start=0, stop=9),
                        Slice(request="r2", start=0, stop=9),
                    )
                ),
                Step(slices=(Slice(request="r2", start=9, stop=10),)),
            ),
            "after a batched prefill",
        ),
    ],
)
def test_other_events_are_refused_with_the_engine_to_use(
    events: Any, reason: str, stock: TransformersEngine, requests: Any, scenario: Any
) -> None:
    whole = Step(slices=(Slice(request="r0", start=0, stop=30),))
    with pytest.raises(CapabilityError, match=rf"{reason}.*use the paged engine"):
        stock.run(scenario(Schedule(events=(whole, *events)), requests))


def test_only_the_stock_plan_is_accepted(tiny: Any) -> None:
    with pytest.raises(RecipeError, match="use the packed or the paged engine"):
        make_engine("transformers", tiny, "aligned")


def test_cache_argument_is_read_from_the_signature() -> None:
    class Newer:
        def forward(self, input_ids: Any, cache: Any = None) -> None: ...

    class Foreign:
        def forward(self, input_ids: Any) -> None: ...

    assert cache_argument(Newer()) == "cache"
    assert cache_argument(load_model("tiny:llama").module.base_model) == "past_key_values"
    with pytest.raises(CapabilityError, match="cannot find the cache argument"):
        cache_argument(Foreign())


def test_unknown_engines_and_settings_are_refused(tiny: Any) -> None:
    with pytest.raises(UsageError, match="use one of transformers, packed, paged"):
        make_engine("vlllm", tiny, "stock")
    with pytest.raises(UsageError, match="engine packed has no setting 'num_pages'"):
        make_engine("packed", tiny, "stock", num_pages=3)
    with pytest.raises(UsageError, match="num_pages is 0"):
        make_engine("paged", tiny, "stock", num_pages=0)
