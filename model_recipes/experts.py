"""Mixtures of experts in a transformers model: the router's and the experts' sites.

    model.layers.1.mlp.gate#scores       router           x -> logits, fp32 by contract
    model.layers.1.mlp.gate#experts      topk             logits -> which experts, best first
    model.layers.1.mlp.gate#weights      topk_weights     logits, experts -> weights
    model.layers.1.mlp.experts#gate_up   grouped_linear   x, experts -> [T, K, 2 I]
    model.layers.1.mlp.experts#gated     gated            the product of each slot's halves
    model.layers.1.mlp.experts#down      grouped_linear   -> [T, K, H]
    model.layers.1.mlp.experts#combine   combine          slots and weights -> [T, H]

Experts without a gate (Nemotron-H) have ``#up`` and ``#activation`` in the places of ``#gate_up``
and ``#gated``.

The choice of experts is an observation of its own (integers, kind *choice*), so that a flipped
expert is named where it flips: at ``#experts`` if equal logits gave another choice, else at the
site that moved the logits. Recognised by class name and proved by running; under ``stock`` the
original arithmetic runs, cut at the sites, with slots in transformers' own (sorted) order.

A router obeys ``forced`` choices, recorded in another run (routing replay).

Legend: T tokens, E experts, K slots per token, H width, I inner width.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.errors import UncoveredSiteError
from .bindings import kernel
from .operators import ACTIVATIONS, Installer
from .plan import STOCK
from .recognise import Operator, activation_name, is_activation, tensor_names

_PROBE_TOKENS = 3
_IMPLEMENTATION = "grouped_mm"


def router_facts(module: nn.Module) -> Mapping[str, Any] | None:
    """``routing`` and ``bias`` (name of the correction bias) of a router, proved, else None."""
    from ..kernels.moe import Routing

    weight = getattr(module, "weight", None)
    top_k, experts = getattr(module, "top_k", None), getattr(module, "num_experts", None)
    if not type(module).__name__.lower().endswith("topkrouter") or weight is None:
        return None
    if not isinstance(top_k, int) or not isinstance(experts, int):
        return None
    if weight.dim() != 2 or len(weight) != experts:
        return None
    if not hasattr(module, "norm_topk_prob"):
        return None  # another kind of router (gpt_oss): the audit names what it computes
    sigmoid = hasattr(module, "e_score_correction_bias")
    own = cast(Any, module)
    routing = Routing(
        num_experts=experts,
        top_k=top_k,
        scoring="sigmoid" if sigmoid else "softmax",
        normed=bool(own.norm_topk_prob),
        eps=1e-20 if sigmoid else 0.0,
        scale=float(getattr(module, "routed_scaling_factor", 1.0)),
        groups=getattr(module, "num_group", 1) or 1,
        groups_kept=getattr(module, "topk_group", 1) or 1,
    )
    facts = {"routing": routing, "bias": "e_score_correction_bias" if sigmoid else None}
    return facts if _proves_router(module, facts) else None


def _proves_router(module: nn.Module, facts: Mapping[str, Any]) -> bool:
    """Whether the module's own outputs are those of the facts, on rows without ties."""
    weight = cast(Tensor, module.weight)
    x = _probe(weight.shape[1], weight)
    with torch.no_grad():
        logits, weights, chosen = type(module).forward(module, x)
        mine = weights_of_choice(logits, chosen, facts["routing"]).to(weights.dtype)
        scores = _scores(logits, facts["routing"])
        if facts["bias"]:
            scores = scores + getattr(module, facts["bias"])
        lowest = scores.gather(1, chosen).min(dim=1, keepdim=True).values
        better = (scores > lowest).sum(dim=1)
    best = facts["routing"].groups > 1 or bool((better < facts["routing"].top_k).all())
    return best and torch.equal(mine, weights)


def _probe(width: int, like: Tensor) -> Tensor:
    x = torch.linspace(-1.0, 1.0, _PROBE_TOKENS * width).view(_PROBE_TOKENS, width).sin()
    return x.to(like.device, like.dtype)


def _scores(logits: Tensor, routing: Any) -> Tensor:
    return logits.sigmoid() if routing.sigmoid else logits.softmax(-1, dtype=torch.float32)


def weights_of_choice(logits: Tensor, chosen: Tensor, routing: Any) -> Tensor:
    """The arithmetic that transformers' routers share, from a given choice."""
    weights = _scores(logits, routing).gather(1, chosen)
    if routing.normed:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + routing.eps if routing.eps else total)
    return weights * routing.scale if routing.sigmoid else weights.to(logits.dtype)


class _GivenLogits:
    """``torch.nn.functional`` for a router's code, with its one product already computed."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: self._logits) if name == "linear" else getattr(F, name)


def _stock_choice(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """``(x, logits) -> chosen`` by the module's own code."""
    forward = cast(types.FunctionType, type(module).forward)

    def choose(x: Tensor, logits: Tensor) -> Tensor:
        scope = {**forward.__globals__, "F": _GivenLogits(logits)}
        return types.FunctionType(forward.__code__, scope)(module, x)[2]

    return choose


def install_router(installer: Installer, operator: Operator) -> None:
    """A router: its product, its choice, its weights."""
    module, path, tap = operator.module, operator.path, installer.tap
    routing, bias_name = operator.facts["routing"], operator.facts["bias"]
    scores, scores_choice = installer.site(path, "router", "scores")
    choice, topk_choice = installer.site(path, "topk", "experts")
    weights, weights_choice = installer.site(path, "topk_weights", "weights")
    names = tensor_names(module, path, installer.names)
    weight = cast(nn.Parameter, module.weight)
    own_choice = _stock_choice(module)

    def stock_logits(x: Tensor) -> Tensor:
        return type(module).forward(module, x)[0]

    def stock_weights(logits: Tensor, chosen: Tensor) -> Tensor:
        return weights_of_choice(logits, chosen, routing)

    def aligned_logits(x: Tensor) -> Tensor:
        return moe.router_logits(x, weight)

    def aligned_choice(x: Tensor, logits: Tensor) -> Tensor:
        return moe.topk(logits.float(), routing, getattr(module, bias_name) if bias_name else None)

    def aligned_weights(logits: Tensor, chosen: Tensor) -> Tensor:
        return moe.topk_weights(logits.float(), chosen, routing)

    moe = kernel("router")
    run_scores = stock_logits if scores_choice == STOCK else aligned_logits
    run_choice = own_choice if topk_choice == STOCK else aligned_choice
    run_weights = stock_weights if weights_choice == STOCK else aligned_weights
    tap.routings[choice.name] = routing

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden.reshape(-1, hidden.shape[-1])
        logits = tap.through(
            scores, lambda inputs: run_scores(inputs["x"]), {"x": x}, weights=names, flat=True
        )
        forced = tap.forced.get(choice.name)
        chosen = tap.through(
            choice,
            lambda inputs: run_choice(x, inputs["logits"]) if forced is None else forced,
            {"logits": logits},
            flat=True,
        )
        given = tap.through(
            weights,
            lambda inputs: run_weights(inputs["logits"], inputs["experts"]),
            {"logits": logits, "experts": chosen},
            flat=True,
        )
        return logits, given, chosen

    installer.put_forward(module, forward)


def experts_facts(module: nn.Module) -> Mapping[str, Any] | None:
    """``activation`` and ``up`` (name of the first product's weight) of a module of stacked
    experts, proved by running it, else None."""
    name = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    up, down = getattr(module, name, None), getattr(module, "down_proj", None)
    act = getattr(module, "act_fn", None)
    if not all(isinstance(each, Tensor) and each.dim() == 3 for each in (up, down)):
        return None
    if not isinstance(act, nn.Module) or not is_activation(act):
        return None
    own = cast(Any, module)
    odd = getattr(own, "has_bias", True) or getattr(own, "is_transposed", True)
    if odd or (own.has_gate and not getattr(own, "is_concatenated", False)):
        return None
    experts = len(cast(Tensor, up))
    x = _probe(cast(Tensor, up).shape[2], cast(Tensor, up))
    chosen = torch.arange(_PROBE_TOKENS, device=x.device)[:, None] + torch.arange(
        min(2, experts), device=x.device
    )
    chosen = chosen % experts
    weights = torch.full(chosen.shape, 0.375, device=x.device, dtype=x.dtype)
    stock = _StockExperts(module)
    with torch.no_grad():
        theirs = type(module).forward(module, x, chosen, weights)
        inner = stock.inner(stock.grouped(x, chosen, cast(Tensor, up)), chosen)
        mine = stock.combine(stock.grouped(inner, chosen, own.down_proj), weights, x.dtype)
    facts = {"activation": activation_name(act), "up": name}
    return facts if torch.equal(mine, theirs) else None


class _StockExperts:
    """transformers' grouped experts, cut at the sites; slots in its own order inside each part."""

    def __init__(self, module: nn.Module) -> None:
        self.module = cast(Any, module)

    def _sorted(self, rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows in the order of their experts, that order, and the end of each expert's rows."""
        owner, order = torch.sort(chosen.reshape(-1))
        counts = torch.bincount(owner, minlength=self.module.num_experts)
        source = order // chosen.shape[1] if len(rows) == len(chosen) else order
        return rows[source], order, counts.cumsum(0).to(torch.int32)

    @staticmethod
    def _by_token(sorted_rows: Tensor, order: Tensor, chosen: Tensor) -> Tensor:
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return sorted_rows[back].unflatten(0, chosen.shape)

    def grouped(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """[T, H] or [T, K, I] -> [T, K, N]."""
        from transformers.integrations import moe

        rows, order, ends = self._sorted(x.flatten(0, 1) if x.dim() == 3 else x, chosen)
        product = moe._grouped_linear  # pyright: ignore[reportPrivateUsage]
        return self._by_token(product(rows, weight, ends), order, chosen)

    def inner(self, up: Tensor, chosen: Tensor) -> Tensor:
        """[T, K, 2 I], without a gate [T, K, I] -> [T, K, I]."""
        rows, order, _ = self._sorted(up.flatten(0, 1), chosen)
        module = self.module
        activated = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        return self._by_token(activated, order, chosen)

    def combine(self, y: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, K, H] -> [T, H]."""
        return (y * weights[..., None]).sum(dim=1).to(dtype)


def install_experts(installer: Installer, operator: Operator) -> None:
    """Stacked experts: two grouped products, what is between, and the combination."""
    module, path, tap = operator.module, operator.path, installer.tap
    own = cast(Any, module)
    has_gate, up_name = bool(own.has_gate), operator.facts["up"]
    up_part = up_name.removesuffix("_proj")
    activation = operator.facts["activation"]
    inner_class, alone, fused = ACTIVATIONS.get(activation, ("activation", "", ""))
    inner_class = inner_class.replace("activation", "gated") if has_gate else inner_class
    function = fused if has_gate else alone
    up_site, up_choice = installer.site(path, "grouped_linear", up_part)
    inner_site, inner_choice = installer.site(
        path, inner_class, "gated" if has_gate else "activation"
    )
    down_site, down_choice = installer.site(path, "grouped_linear", "down")
    sum_site, sum_choice = installer.site(path, "combine", "combine")
    if inner_choice != STOCK and not function:
        raise UncoveredSiteError(
            f"{inner_site.name} uses {operator.facts['activation']}, for which there is no kernel "
            "contract; override this site with stock, or use `--plan stock`"
        )
    choices = (up_choice, inner_choice, down_choice, sum_choice)
    if STOCK in choices and own.config._experts_implementation != _IMPLEMENTATION:
        raise UncoveredSiteError(
            f"{path} runs its experts by {own.config._experts_implementation!r}, which has no "
            f"sites; load the model with experts_implementation={_IMPLEMENTATION!r}"
        )
    stock, moe = _StockExperts(module), kernel("grouped_linear")
    activate = getattr(kernel(inner_class), function) if function else None

    def grouped(choice: str, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        return (stock.grouped if choice == STOCK else moe.grouped_linear)(x, chosen, weight)

    def between(up: Tensor, chosen: Tensor) -> Tensor:
        if inner_choice == STOCK or activate is None:
            return stock.inner(up, chosen)
        return activate(*up.chunk(2, dim=-1)) if has_gate else activate(up)

    def combine(y: Tensor, weights: Tensor) -> Tensor:
        if sum_choice == STOCK:
            return stock.combine(y, weights, y.dtype)
        return moe.combine(y, weights.float())

    def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        up = tap.through(
            up_site,
            lambda inputs: grouped(
                up_choice, inputs["x"], inputs["experts"], getattr(own, up_name)
            ),
            {"x": x, "experts": chosen},
            weights=names[up_name],
            flat=True,
        )
        inner = tap.through(
            inner_site,
            lambda inputs: between(inputs[up_part], inputs["experts"]),
            {up_part: up, "experts": chosen},
            flat=True,
        )
        out = tap.through(
            down_site,
            lambda inputs: grouped(down_choice, inputs["x"], inputs["experts"], own.down_proj),
            {"x": inner, "experts": chosen},
            weights=names["down_proj"],
            flat=True,
        )
        return tap.through(
            sum_site,
            lambda inputs: combine(inputs["y"], inputs["weights"]),
            {"y": out, "weights": weights},
            flat=True,
        )

    names = {
        name: (installer.names.get(id(getattr(own, name)), f"{path}.{name}"),)
        for name in (up_name, "down_proj")
    }
    installer.put_forward(module, forward)
