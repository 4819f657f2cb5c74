"""Planted faults: the culprit is the operator that holds the fault, and its cause is measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zeromismatch.agent_tools.cause import conclude
from zeromismatch.agent_tools.localize import Options, localize
from zeromismatch.agent_tools.records import Divergence, Probe
from zeromismatch.agent_tools.sides import Side
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import Plan, aligned_plan
from zeromismatch.trainer.engines import paged_batch
from zeromismatch.trainer.engines.base import Request
from zeromismatch.trainer.engines.paged_batch import PagedBatch

NORM = "model.layers.1.input_layernorm"
DOWN = "model.layers.0.mlp.down_proj"
FEW = 8


def find(
    model: LoadedModel, requests: tuple[Request, ...], plan: Plan | str = "aligned"
) -> Divergence:
    """Decode against one packed forward."""
    sides = Side.parse("paged:decode"), Side.parse("packed:packed")
    return localize(*sides, model, requests[:2], plan=plan, options=Options(self_test=False))


def all_but(site: str) -> Plan:
    """Aligned everywhere, except that this one site runs what the framework would run."""
    plan = aligned_plan("float32", "cpu")
    return Plan(name="one-stock", rules=plan.rules, overrides={site: "stock"})


def plant(
    monkeypatch: pytest.MonkeyPatch,
    target: nn.Module,
    kind: type[nn.Module],
    faulty: Callable[[Any, Tensor], Tensor],
) -> None:
    original = kind.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        return faulty(self, x) if self is target else original(self, x)

    monkeypatch.setattr(kind, "forward", forward)


def num_rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def lanes_by_row_count(self: Any, x: Tensor) -> Tensor:
    """vllm 48271: the width of the partial sums follows the number of rows."""
    width = 120 if num_rows(x) < FEW else 36
    partial = x.pow(2).unflatten(-1, (-1, width))
    total = torch.zeros_like(partial[..., 0, :])
    for part in partial.unbind(-2):
        total = total + part
    while total.shape[-1] > 1:
        odd = total[..., -1:] if total.shape[-1] % 2 else total[..., :0]
        half = total.shape[-1] // 2
        total = torch.cat([total[..., :half] + total[..., half : 2 * half], odd], -1)
    return self.weight * (x * torch.rsqrt(total / x.shape[-1] + self.variance_epsilon))


def bf16_for_few_rows(self: Any, x: Tensor) -> Tensor:
    y = norm(self, x)
    return y.bfloat16().float() if num_rows(x) < FEW else y


def weight_first_for_few_rows(self: Any, x: Tensor) -> Tensor:
    if num_rows(x) >= FEW:
        return norm(self, x)
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return x * (scale * self.weight)


def noise_for_few_rows(self: Any, x: Tensor) -> Tensor:
    y = norm(self, x)
    return y * (1 + 1e-6 * torch.rand(1)) if num_rows(x) < FEW else y


def one_scale_for_the_batch(self: Any, x: Tensor) -> Tensor:
    """vllm 57016: the quantisation scale is taken over all rows of all requests."""
    scale = x.abs().max() / 127
    return F.linear(torch.round(x / scale) * scale, self.weight)


@pytest.mark.parametrize(
    ("faulty", "cause"),
    [
        (lanes_by_row_count, "reduction order"),
        (bf16_for_few_rows, "intermediate dtype"),
        (weight_first_for_few_rows, "rounding point"),
        (noise_for_few_rows, "nondeterminism"),
    ],
)
def test_a_faulty_norm_is_the_only_culprit_and_its_cause_is_found(
    model: LoadedModel,
    requests: tuple[Request, ...],
    monkeypatch: pytest.MonkeyPatch,
    faulty: Callable[[Any, Tensor], Tensor],
    cause: str,
) -> None:
    plant(monkeypatch, model.module.get_submodule(NORM), LlamaRMSNorm, faulty)
    found = find(model, requests, all_but(NORM))
    assert [culprit.site for culprit in found.culprits] == [NORM]
    assert found.culprits[0].cause.name == cause, found.culprits[0].cause
    assert found.first_divergence is not None
    assert found.first_divergence.site == NORM


def test_a_scale_over_the_whole_batch_is_a_batch_leak(
    model: LoadedModel, requests: tuple[Request, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, model.module.get_submodule(DOWN), nn.Linear, one_scale_for_the_batch)
    found = find(model, requests, all_but(DOWN))
    assert [culprit.site for culprit in found.culprits] == [DOWN]
    assert found.culprits[0].cause.name == "batch leak"


def attend_with(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[PagedBatch, dict[str, Any]], PagedBatch]
) -> None:
    """Disturb attention where a request decodes."""
    original = PagedBatch.attend

    def attend(self: PagedBatch, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any):
        batch = change(self, options) if len(q) == 1 else self
        return original(batch, layer, q, k, v, **options)

    monkeypatch.setattr(PagedBatch, "attend", attend)


def test_attention_that_reads_another_page_has_a_wrong_state(
    model: LoadedModel, requests: tuple[Request, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_page_twice(batch: PagedBatch, options: dict[str, Any]) -> PagedBatch:
        table = batch.batch.block_table.clone()
        table[:, 1] = table[:, 0]
        return replace(batch, batch=replace(batch.batch, block_table=table))

    attend_with(monkeypatch, first_page_twice)
    found = find(model, requests)
    assert {culprit.op_class for culprit in found.culprits} == {"attention"}
    assert {culprit.cause.name for culprit in found.culprits} == {"stale or wrong state"}


def test_attention_with_another_scale_is_a_rounding_point_not_an_order(
    model: LoadedModel, requests: tuple[Request, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def scale_one_ulp_off(batch: PagedBatch, options: dict[str, Any]) -> PagedBatch:
        options["scale"] *= 1 + 2**-22
        return batch

    attend_with(monkeypatch, scale_one_ulp_off)
    found = find(model, requests)
    assert {culprit.op_class for culprit in found.culprits} == {"attention"}
    assert {culprit.cause.name for culprit in found.culprits} == {"rounding point"}


def test_a_cache_write_that_is_lost_is_found_at_the_cache_write(
    model: LoadedModel, requests: tuple[Request, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = paged_batch.write_kv

    def lose_every_decoded_row(cache: Any, k: Tensor, v: Tensor, slot: Tensor) -> None:
        original(cache, *((k * 0, v * 0) if len(slot) == 1 else (k, v)), slot)

    monkeypatch.setattr(paged_batch, "write_kv", lose_every_decoded_row)
    found = find(model, requests)
    assert {culprit.op_class for culprit in found.culprits} == {"kv_write", "attention"}
    writes = [culprit for culprit in found.culprits if culprit.op_class == "kv_write"]
    assert {culprit.cause.name for culprit in writes} == {"stale or wrong state"}
    assert found.first_divergence is not None
    assert found.first_divergence.op_class == "kv_write"


def test_a_table_of_another_dtype_is_named_and_what_uses_it_is_not_judged(
    requests: tuple[Request, ...],
) -> None:
    model = load_model("tiny:llama", dtype="bfloat16")
    sides = Side.parse("paged+stock:mixed"), Side.parse("packed+aligned:packed")
    found = localize(*sides, model, requests[:2], options=Options(self_test=False))
    table = next(culprit for culprit in found.culprits if culprit.op_class == "rotary_table")
    assert table.cause.name == "intermediate dtype"
    assert table.cause.detail == "each row is bfloat16 [96] on the left, float32 [96] on the right"
    assert found.graft is not None
    assert "model.layers.0.self_attn#rotary_q" in found.graft.unjudged
    head = next(culprit for culprit in found.culprits if culprit.op_class == "lm_head")
    assert head.cause.name == "intermediate dtype"


def test_without_a_deciding_experiment_the_cause_is_unclassified_and_says_what_was_tried() -> None:
    cause = conclude([Probe(name="again", result="equal"), Probe(name="narrow", result="none")])
    assert (cause.name, cause.detail) == ("unclassified", "tried: again, narrow")
