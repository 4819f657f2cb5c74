"""Real TRL on a CPU: a recipe in a GRPO run, and the logprobs that TRL trains on.

TRL's own colocated vLLM needs a GPU, so that the rollout here is our paged engine behind TRL's
``rollout_func``; ``tests/trainer/vllm`` has what vLLM is told. The trainer is TRL's, untouched.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeromismatch
from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import RecipeError, UsageError
from zeromismatch.model_recipes.apply import identify
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import aligned_plan
from zeromismatch.model_recipes.schema import Recipe
from zeromismatch.model_recipes.state import named_state
from zeromismatch.trainer.engines.base import Policy, Request, Sampling
from zeromismatch.trainer.engines.packed import PackedEngine
from zeromismatch.trainer.engines.paged import PagedEngine

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
trl = pytest.importorskip("trl")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    # of TRL, accelerate and the Trainer; none is about what is tested
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning",
                               "ignore::UserWarning"),
]  # fmt: skip
PROMPTS = ["t5 t6 t7", "t9", "t11 t3 t8 t4 t2", "t12 t13"]


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"t{i}": 3 + i for i in range(3008)}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def copied(model: LoadedModel) -> LoadedModel:
    module = copy.deepcopy(model.module)
    return replace(model, module=module, config=module.config)


def packed_of(model: LoadedModel, weights: dict[str, Tensor]) -> PackedEngine:
    engine = PackedEngine(copied(model), aligned_plan(model.dtype, model.device))
    with torch.no_grad():
        for name, tensor in named_state(engine.loaded.module).items():
            tensor.copy_(weights[name])
    return engine


@dataclass
class Rollout:
    """TRL's rollout_func: the trainer's weights of the moment, published to a paged engine."""

    engine: PagedEngine
    requests: list[Request] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    version: int = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.version += 1
        weights = {name: each.clone() for name, each in named_state(trainer.model).items()}
        self.engine.publish(weights, self.version)
        asked = [
            Request(id=f"r{i}", tokens=tuple(trainer.processing_class(text)["input_ids"]),
                    sampling=Sampling(seed=i, max_new_tokens=3 + i % 4))
            for i, text in enumerate(prompts)
        ]  # fmt: skip
        run = self.engine.generate(asked, Policy(max_step_tokens=7))
        known = {(s.request, s.position): s.logprob_bits for s in run.samples}
        self.requests = list(run.requests)
        lengths = [len(each.tokens) for each in asked]
        replies = [r.tokens[n:] for r, n in zip(run.requests, lengths, strict=True)]
        self.logprobs = [
            torch.tensor([known[r.id, at] for at in range(n, len(r.tokens))], dtype=torch.int32)
            .view(torch.float32).tolist()
            for r, n in zip(run.requests, lengths, strict=True)
        ]  # fmt: skip
        return {
            "prompt_ids": [list(each.tokens) for each in asked],
            "completion_ids": [list(each) for each in replies],
            "logprobs": self.logprobs,
        }


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("tiny:llama")


@pytest.fixture
def trainer_of(model: LoadedModel, tmp_path: Path) -> Callable[..., Any]:
    def make(rollout: Any = None, **settings: Any) -> Any:
        from datasets import Dataset

        asked = {
            "output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "max_steps": 2,
            "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8,
            "learning_rate": 1e-2, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
            "disable_tqdm": True, "beta": 0.0,
        }  # fmt: skip
        return trl.GRPOTrainer(
            model=copied(model).module,
            args=trl.GRPOConfig(**(asked | settings)),
            reward_funcs=lambda completions, **_: [float(len(set(c))) for c in completions],
            train_dataset=Dataset.from_list([{"prompt": each} for each in PROMPTS]),
            processing_class=tokenizer(),
            rollout_func=rollout,
        )

    return make


@pytest.fixture(scope="module")
def recipe(model: LoadedModel) -> Recipe:
    return Recipe(
        name="test", model=identify(model.module, "this test"), dtype="float32", device="cpu",
        plan=aligned_plan(model.dtype, model.device),
    )  # fmt: skip


def test_trl_trains_on_the_rollouts_own_logprobs(
    trainer_of: Callable[..., Any], recipe: Recipe, model: LoadedModel
) -> None:
    rollout = Rollout(PagedEngine(copied(model), aligned_plan(model.dtype, model.device)))
    trainer = trainer_of(rollout)
    zeromismatch.apply(trainer.model, recipe)
    scored: list[tuple[Tensor, dict[str, Tensor], list[Request], dict[Any, list[float]]]] = []
    own = trainer._get_per_token_logps_and_entropies

    def watched(model: Any, ids: Tensor, mask: Tensor, kept: int, **keywords: Any) -> Any:
        weights = {name: each.clone() for name, each in named_state(trainer.model).items()}
        found = own(model, ids, mask, kept, **keywords)
        requests = [
            Request(id=f"r{i}", tokens=tuple(row[real].tolist()),
                    sampled_mask=tuple([False] * int(real[:-kept].sum())
                                       + [True] * int(real[-kept:].sum())))
            for i, (row, real) in enumerate(zip(ids, mask.bool(), strict=True))
        ]  # fmt: skip
        drawn = {r.tokens: each for r, each in zip(rollout.requests, rollout.logprobs, strict=True)}
        scored.append((found[0].detach(), weights, requests, drawn))
        return found

    trainer._get_per_token_logps_and_entropies = watched
    trainer.train()
    assert trainer.state.global_step == len(scored) == 2
    for logps, weights, requests, drawn in scored:
        wanted = packed_of(model, weights).logprobs(requests).detach()
        lengths = [sum(each.sampled_mask) for each in requests]
        ours = torch.cat([row[:n] for row, n in zip(logps, lengths, strict=True)])
        assert len(ours) == sum(lengths) > 10
        assert bits.equal(ours, wanted)  # the packed engine
        sampled = torch.cat([torch.tensor(drawn[each.tokens]) for each in requests])
        assert bits.equal(ours, sampled)  # the rollout, TRL's order of samples is its own
    before, after = scored[0][1], scored[1][1]
    assert any(not bits.equal(before[name], after[name]) for name in before)
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    assert all(bool(torch.isfinite(each).all()) for each in gradients)
    history = [each for each in trainer.state.log_history if "entropy" in each]
    assert all(0 < each["entropy"] < 8.1 for each in history)  # log 3011 is 8.01


def test_without_the_recipe_trls_logprobs_are_others(
    trainer_of: Callable[..., Any], recipe: Recipe, model: LoadedModel
) -> None:
    """The red control, and that a plan is taken off TRL's forward again."""
    trainer = trainer_of()
    ids = torch.tensor([[0, 0, 5, 6, 7, 9], [4, 5, 8, 3, 0, 0]])
    mask = (ids != 0).long()
    requests = [
        Request(id="a", tokens=(5, 6, 7, 9), sampled_mask=(False, False, True, True)),
        Request(id="b", tokens=(4, 5, 8, 3), sampled_mask=(False, False, True, True)),
    ]
    labels = torch.full_like(ids, -100)
    labels[0, 4:], labels[1, 2:4] = ids[0, 4:], ids[1, 2:4]

    def score() -> Tensor:
        with torch.no_grad():
            out = trainer.model(input_ids=ids, attention_mask=mask, labels=labels,
                                fused_lm_head=True)  # fmt: skip
        return out.log_probs[out.label_mask]

    wanted = packed_of(model, named_state(trainer.model)).logprobs(requests).detach()
    assert not bits.equal(score(), wanted)
    instrument = zeromismatch.apply(trainer.model, recipe)
    assert bits.equal(score(), wanted)
    with pytest.raises(UsageError, match="position_ids"):
        trainer.model(input_ids=ids, labels=labels, position_ids=ids, fused_lm_head=True)
    labels[0, 2] = 5
    with pytest.raises(UsageError, match="follows padding"):
        score()
    labels[0, 2] = -100
    instrument.remove()
    assert not bits.equal(score(), wanted)


def test_a_head_that_is_not_known_is_refused(
    trainer_of: Callable[..., Any], recipe: Recipe
) -> None:
    trainer = trainer_of(cast_lm_head_to_fp32=True)
    with pytest.raises(RecipeError, match="casts the head to fp32"):
        zeromismatch.apply(trainer.model, recipe)
