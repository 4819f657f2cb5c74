"""Coverage is total: whatever a model computes outside its sites is named, with its module."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from zeromismatch.kernels.errors import UncoveredSiteError
from zeromismatch.model_recipes import tiny
from zeromismatch.model_recipes.apply import apply_plan, find_sites
from zeromismatch.model_recipes.inspection import inspect_model
from zeromismatch.model_recipes.models import LoadedModel
from zeromismatch.model_recipes.plan import aligned_plan, stock_plan
from zeromismatch.model_recipes.sites import SiteCall
from zeromismatch.model_recipes.watch import is_exact


class Mixer(nn.Module):
    """A block that no contract covers: it normalises with a softmax of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.softmax(x, dim=-1)


class Rescaled(nn.Module):
    """Exact inline operations only: one product, one difference in place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * 0.5
        y -= x
        return y.float().to(x.dtype).reshape(x.shape)


def wrap_mlp(model: Any, wrapper: type[nn.Module]) -> None:
    model.model.layers[1].mlp = wrapper(model.model.layers[1].mlp)


@pytest.mark.parametrize("mode", ["context", "module"])
def test_a_softmax_outside_every_site_is_named_with_its_module(model: Any, mode: Any) -> None:
    wrap_mlp(model, Mixer)
    with pytest.raises(
        UncoveredSiteError, match=r"model\.layers\.1\.mlp: torch\.softmax"
    ) as caught:
        apply_plan(model, stock_plan(), mode)
    assert "zm inspect MODEL" in str(caught.value)
    assert "forward" not in model.model.layers[1].mlp.__dict__  # taken off again


def test_inspect_lists_uncovered_functions_instead_of_raising(model: Any) -> None:
    wrap_mlp(model, Mixer)
    loaded = LoadedModel(spec="custom", module=model, tokenizer=None, config=model.config)
    rows = inspect_model(loaded)
    uncovered = [row for row in rows if row.op_class == "uncovered"]
    assert [(row.site, row.has_kernel) for row in uncovered] == [("model.layers.1.mlp", False)]
    assert "torch.softmax" in uncovered[0].note
    assert all(row.has_kernel for row in rows if row.op_class != "uncovered")


def test_inspect_says_which_variant_has_no_kernel(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = ACT2FN["gelu_new"]
    loaded = LoadedModel(spec="custom", module=model, tokenizer=None, config=model.config)
    bare = [row for row in inspect_model(loaded) if not row.has_kernel]
    assert [row.site for row in bare] == ["model.layers.1.mlp#gated"]
    assert all("NewGELUActivation" in row.note for row in bare)


@torch.no_grad()
def test_inline_products_and_differences_become_sites(model: Any, sequences: list[Tensor]) -> None:
    wrap_mlp(model, Rescaled)
    ids = sequences[0][None]
    before = model(ids).logits
    names = {site.name: site.op_class for site in find_sites(model)}
    assert names["model.layers.1.mlp#mul_0"] == "mul"
    assert names["model.layers.1.mlp#sub_0"] == "add"
    instrument = apply_plan(model, stock_plan(), "module")
    seen: dict[str, Tensor] = {}

    def listener(call: SiteCall) -> None:
        seen[call.site.name] = call.output.clone()  # the model overwrites it in place
        if call.site.name.endswith("#mul_0"):
            assert torch.equal(call.rerun({"a": call.inputs["a"]}), call.output)
        elif call.site.name.endswith("#sub_0"):
            assert call.rerun is None
            assert torch.equal(call.inputs["a"] - call.inputs["b"], call.output)

    instrument.listener = listener
    assert torch.equal(model(ids).logits, before)
    graft = torch.zeros_like(seen["model.layers.1.mlp#sub_0"])
    instrument.listener = lambda call: graft if call.site.name.endswith("#sub_0") else None
    assert not torch.equal(model(ids).logits, before)


def test_scaled_logits_are_refused(model: Any) -> None:
    """A head that scales its logits would be skipped by ``head_logits``."""

    class Scaled(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits / 8.0
            return output

    model.__class__ = Scaled
    with pytest.raises(UncoveredSiteError, match="on the logits"):
        apply_plan(model, stock_plan())


def test_a_norm_that_is_no_rmsnorm_is_not_taken_for_one(model: Any) -> None:
    class BrokenRMSNorm(type(model.model.norm)):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) * 1.001

    model.model.norm.__class__ = BrokenRMSNorm
    with pytest.raises(UncoveredSiteError, match=r"model\.norm: .*torch\.rsqrt"):
        apply_plan(model, aligned_plan("float32", "cpu"))


def test_unknown_rope_types_are_refused_by_name(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.9)
    with pytest.raises(UncoveredSiteError, match=r"model\.rotary_emb: rope_type 'default'"):
        apply_plan(model, aligned_plan("float32", "cpu"))


def test_a_model_without_a_head_is_refused() -> None:
    from transformers import AutoModel

    with pytest.raises(UncoveredSiteError, match="no linear LM head"):
        apply_plan(AutoModel.from_config(tiny.config_for("tiny:llama")), stock_plan())


def test_the_tables_know_exact_from_inexact() -> None:
    x = torch.ones(3)
    for function, arguments in (
        (torch.Tensor.__iadd__, (x, x)),
        (torch.Tensor.mul_, (x, 2.0)),
        (torch.Tensor.transpose, (x[None], 0, 1)),
        (torch.Tensor.shape.__get__, (x,)),  # type: ignore[attr-defined]
        (torch.cumsum, (torch.arange(3), 0)),
    ):
        assert is_exact(function, arguments, function(*arguments)), function
    for function, arguments in (
        (torch.cumsum, (x, 0)),
        (torch.exp, (x,)),
        (torch.Tensor.__pow__, (x, 2)),
        (torch.matmul, (x, x)),
        (torch.addcmul, (x, x, x)),
        (torch.Tensor.mean, (x,)),
    ):
        assert not is_exact(function, arguments, function(*arguments)), function
