"""Adapters beside a recurrent model with experts, and merged into it: two policies, each with one
set of bits under every schedule."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import CheckpointError, RecipeError
from zeromismatch.model_recipes.adapters import (
    CONFIG,
    TENSORS,
    AdaptedLinear,
    Adapter,
    Factors,
    attach,
    fresh_adapter,
    merge,
    read_adapter,
    write_adapter,
)
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.trainer.engines.base import Request, Run, Scenario
from zeromismatch.trainer.engines.build import make_engine

SPEC = "tiny:nemotron_h"
LENGTH = 39  # a chunk of 32 and a part of one
TOKENS = tuple((7919 * i * i) % 3000 + 3 for i in range(LENGTH))
REQUEST = Request(id="r", tokens=TOKENS, sampled_mask=(False,) * 30 + (True,) * 9)


def runs(loaded: LoadedModel, *schedules: str) -> list[Run]:
    """The trainer's run, then the paged engine's."""
    packed = make_engine("packed", loaded, "aligned")
    paged = make_engine("paged", loaded, "aligned", instrument=packed.instrument)
    try:
        return [
            engine.run(
                Scenario(
                    model="", plan="", requests=(REQUEST,),
                    schedule=engine.schedule(name, (REQUEST,)),
                )
            )
            for engine, name in ((packed, "packed"), *((paged, each) for each in schedules))
        ]  # fmt: skip
    finally:
        packed.close()


def logprob_bits(run: Run) -> dict[int, int]:
    return {sample.position: sample.logprob_bits for sample in run.samples}


def module_of(loaded: LoadedModel) -> Any:
    return loaded.module


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(SPEC)


@pytest.fixture(scope="module")
def adapter(model: LoadedModel) -> Adapter:
    return fresh_adapter(model.module, rank=4, spread=0.05, seed=1)


@pytest.fixture(scope="module")
def policies(model: LoadedModel, adapter: Adapter) -> dict[str, list[Run]]:
    """Runs of the base, of the base with the adapter beside it, and of the merged model."""
    found = {"base": runs(model)}
    attached = attach(model.module, adapter)
    found["beside"] = runs(model, "decode", "chunk:33")
    attached.remove()
    found["again"] = runs(model)
    merged = load_model(SPEC)
    merge(merged.module, adapter)
    found["merged"] = runs(merged, "decode")
    return found


def test_linear_modules_below_the_head_experts_and_the_embedding_are_adapted(
    model: LoadedModel, adapter: Adapter
) -> None:
    head = module_of(model).get_output_embeddings()
    linear = {n for n, m in model.module.named_modules() if type(m) is nn.Linear and m is not head}
    embedding = {n for n, f in adapter.factors.items() if f.embedding}
    stacked = {n for n, f in adapter.factors.items() if f.stacked}
    assert set(adapter.factors) == linear | embedding | stacked
    assert {name.rpartition(".")[2] for name in stacked} == {"up_proj", "down_proj"}
    assert len(stacked) == 4
    assert embedding == {"model.embeddings"}
    assert {"in_proj", "out_proj", "q_proj"} <= {name.rpartition(".")[2] for name in linear}


@pytest.mark.parametrize("policy", ["beside", "merged"])
def test_either_policy_has_the_trainers_bits_under_every_schedule(
    policies: dict[str, list[Run]], policy: str
) -> None:
    trainer, *rollouts = (logprob_bits(run) for run in policies[policy])
    assert len(trainer) == LENGTH - 1
    assert all(rollout == trainer for rollout in rollouts)


def test_merged_and_unmerged_are_two_policies_and_neither_is_the_base(
    policies: dict[str, list[Run]],
) -> None:
    base, beside, merged = (
        logprob_bits(policies[name][0]) for name in ("base", "beside", "merged")
    )
    assert len({tuple(each.items()) for each in (base, beside, merged)}) == 3


def test_taken_off_again_the_base_has_its_bits(policies: dict[str, list[Run]]) -> None:
    assert logprob_bits(policies["again"][0]) == logprob_bits(policies["base"][0])


def test_an_adapter_that_begins_with_zeros_changes_no_bit(
    model: LoadedModel, policies: dict[str, list[Run]]
) -> None:
    attached = attach(model.module, fresh_adapter(model.module, rank=2))
    try:
        assert logprob_bits(runs(model)[0]) == logprob_bits(policies["base"][0])
    finally:
        attached.remove()


class Small(nn.Module):
    """One linear module of whole numbers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.head = nn.Linear(7, 5), nn.Linear(5, 3)
        with torch.no_grad():
            self.proj.weight.copy_(torch.arange(35.0).view(5, 7) % 9 - 4)
            self.proj.bias.fill_(2.0)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_merged_and_unmerged_are_one_function_where_every_sum_is_exact() -> None:
    model, x = Small(), torch.arange(21.0).view(3, 7) % 5
    factors = Factors(down=torch.arange(14.0).view(2, 7) % 3, up=torch.arange(10.0).view(5, 2) % 4)
    adapter = Adapter(scale=0.5, factors={"proj": factors})
    base, attached = model.proj, attach(model, adapter)
    beside = model.proj(x)
    attached.remove()
    assert model.proj is base
    plain = model.proj(x)
    merge(model, adapter)
    assert bits.equal(model.proj(x), beside)
    assert not bits.equal(plain, beside)


def test_only_the_factors_learn(model: LoadedModel, adapter: Adapter) -> None:
    attached = attach(model.module, adapter)
    try:
        packed = make_engine("packed", model, "aligned")
        packed.logprobs([REQUEST]).sum().backward()
        packed.close()
        learned = {n for n, p in model.module.named_parameters() if p.grad is not None}
        wanted = {
            f"{path}.{half}.weight"
            for path, each in adapter.factors.items() if not each.stacked
            for half in ("down", "up")
        } | {
            f"{path.rpartition('.')[0]}.parametrizations.{path.rpartition('.')[2]}.0.{half}"
            for path, each in adapter.factors.items() if each.stacked
            for half in ("down", "up")
        }  # fmt: skip
        assert learned == wanted
        changed = attached.adapter()
        assert all(
            bits.equal(changed.factors[path].up, adapter.factors[path].up)
            for path in changed.factors
        )
    finally:
        attached.remove()
    assert all(parameter.requires_grad for parameter in model.module.parameters())


def test_written_and_read_it_is_the_same(tmp_path: Path, adapter: Adapter) -> None:
    write_adapter(adapter, tmp_path)
    again = read_adapter(tmp_path)
    assert again.scale == adapter.scale
    assert again.factors.keys() == adapter.factors.keys()
    assert all(bits.equal(again.factors[p].down, f.down) for p, f in adapter.factors.items())
    assert all(again.factors[p].embedding == f.embedding for p, f in adapter.factors.items())
    names = load_file(tmp_path / TENSORS)
    assert names["base_model.model.model.embeddings.lora_embedding_A"].shape == (4, 3011)


def test_experts_lie_in_a_file_as_peft_writes_them(tmp_path: Path, adapter: Adapter) -> None:
    """Names, shapes and sums as PEFT 0.21.2 has them for two ``target_parameters``."""
    where = "model.layers.1.mixer.experts"
    experts = {
        path: Factors(down=(each.down * 8).round(), up=(each.up * 99).round())  # sums are exact
        for path, each in adapter.factors.items() if path.startswith(f"{where}.")
    }  # fmt: skip
    write_adapter(replace(adapter, factors=experts), tmp_path)
    names = load_file(tmp_path / TENSORS)
    inner, outer = f"base_model.model.{where}.base_layer", f"base_model.model.{where}"
    shapes = {name: tuple(tensor.shape) for name, tensor in names.items()}
    assert shapes == {
        f"{inner}.lora_A.weight": (64, 120), f"{inner}.lora_B.weight": (184, 64),
        f"{outer}.lora_A.weight": (64, 184), f"{outer}.lora_B.weight": (120, 64),
    }  # fmt: skip
    down, up = (names[f"{inner}.lora_{half}.weight"] for half in "AB")
    theirs = torch.einsum("ore,eri->eoi", up.reshape(184, 4, 16), down.reshape(16, 4, 120))
    mine = experts[f"{where}.up_proj"]
    assert bits.equal(theirs.contiguous(), mine.up @ mine.down)
    assert bool(theirs.any())
    again = read_adapter(tmp_path)
    assert again.factors.keys() == experts.keys()
    assert all(bits.equal(again.factors[p].up, f.up) for p, f in experts.items())
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"target_parameters": ["experts.up_proj"]}))
    with pytest.raises(CheckpointError, match="has 2 pairs"):
        read_adapter(tmp_path)


def test_experts_beside_the_base_have_the_bits_of_merged_ones(
    model: LoadedModel, adapter: Adapter, policies: dict[str, list[Run]]
) -> None:
    experts = replace(
        adapter, factors={p: f for p, f in adapter.factors.items() if f.stacked}
    )
    attached = attach(model.module, experts)
    beside = logprob_bits(runs(model)[0])
    attached.remove()
    merged = load_model(SPEC)
    merge(merged.module, experts)
    assert logprob_bits(runs(merged)[0]) == beside
    assert beside != logprob_bits(policies["base"][0])


def test_an_embedding_that_is_tied_to_the_head_is_refused(adapter: Adapter) -> None:
    tied = load_model("tiny:llama").module
    assert not any(f.embedding for f in fresh_adapter(tied, rank=2).factors.values())
    factors = adapter.factors["model.embeddings"]
    with pytest.raises(CheckpointError, match="tied to the head"):
        merge(tied, replace(adapter, factors={"model.embed_tokens": factors}))


def test_adapters_that_do_not_fit_are_refused_by_name(model: LoadedModel, adapter: Adapter) -> None:
    path, factors = next(iter(adapter.factors.items()))
    experts = next(
        n for n, m in model.module.named_modules() if type(m).__name__.endswith("Experts")
    )
    head = next(n for n, m in model.module.named_modules()
                if m is module_of(model).get_output_embeddings())  # fmt: skip
    stacked = next(f for p, f in adapter.factors.items() if p.endswith("experts.up_proj"))
    wide = Factors(down=torch.zeros(4, 7), up=factors.up)
    wrong: list[tuple[dict[str, Factors], str]] = [
        ({}, "binds no module"),
        ({"model.layers.99.mixer.in_proj": factors}, "layers.99.* does not have"),
        ({experts: factors}, "adapters go on linear modules"),
        ({f"{experts}.gate_proj": stacked}, "no weight of stacked experts"),
        ({f"{experts}.up_proj": Factors(down=stacked.down[:, :, 1:], up=stacked.up)}, "do not fit"),
        ({"model.layers.0.mixer.conv1d": factors}, "depthwise"),
        ({head: factors}, "the head"),
        ({path: wide}, "do not fit"),
        ({path: Factors(down=factors.down * float("nan"), up=factors.up)}, "not finite"),
    ]
    for given, says in wrong:
        for act in (attach, merge):
            with pytest.raises(CheckpointError, match=says):
                act(model.module, replace(adapter, factors=given))
    with pytest.raises(CheckpointError, match="scale is inf"):
        attach(model.module, replace(adapter, scale=float("inf")))
    with pytest.raises(CheckpointError, match="rank 0"):
        fresh_adapter(model.module, rank=0)
    assert not any(isinstance(m, AdaptedLinear) for m in model.module.modules())


def test_a_second_adapter_or_one_under_a_plan_is_refused(
    model: LoadedModel, adapter: Adapter
) -> None:
    attached = attach(model.module, adapter)
    with pytest.raises(CheckpointError, match="carries an adapter already"):
        attach(model.module, adapter)
    engine = make_engine("packed", model, "aligned")
    with pytest.raises(RecipeError, match="a plan is on this model"):
        attached.remove()
    engine.close()
    attached.remove()


def test_folders_that_hold_no_plain_adapter_are_refused(tmp_path: Path, adapter: Adapter) -> None:
    with pytest.raises(CheckpointError, match="holds no adapter"):
        read_adapter(tmp_path)
    write_adapter(adapter, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    for change, says in (({"use_dora": True}, "use_dora"), ({"r": 5}, "says rank 5"),
                         ({"peft_type": "IA3"}, "IA3")):  # fmt: skip
        (tmp_path / CONFIG).write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=says):
            read_adapter(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    tensors = load_file(tmp_path / TENSORS)
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, tmp_path / TENSORS)
    with pytest.raises(CheckpointError, match="no pair lora_A"):
        read_adapter(tmp_path)
