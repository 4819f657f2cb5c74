"""Put a plan onto recurrent mixers and what comes with them: gated norms, sigmoid gates.

    model.layers.0.linear_attn#conv, #q_norm, #decay, #beta, #recurrence ...   a mixer's parts
    model.layers.0.linear_attn.norm                                            gated_rmsnorm
    model.layers.1.self_attn#gate                                              sigmoid, inline
    model.layers.1.mlp#gate                                                    of a shared expert

A mixer gets the engine's ``batch`` as a keyword, as attention does. In ``module`` mode its state is
transformers' own cache. A gated norm is recognised by its formula, proved on random rows; a sigmoid
that is written inline is a site only where it gates attention's output or a shared expert.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..kernels.errors import RecipeError
from .attention import packed_context
from .bindings import BLOCKS, kernel
from .plan import STOCK
from .recognise import Operator, tensor_names
from .recurrent import Mixer, RecurrentContext, RecurrentLayer, TransformersState
from .sites import Site

if TYPE_CHECKING:
    from .operators import Installer

_ROWS = 3


def gated_norm_facts(module: nn.Module) -> Mapping[str, Any] | None:
    """``order``, ``group`` and ``eps`` of a gated RMSNorm, proved by running it, else None."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    width = weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, _ROWS, width, generator=generator).unbind()
    trial = torch.randn(width, generator=generator) + 0.5
    with torch.no_grad():
        got = torch.func.functional_call(module, {"weight": trial}, (x, gate)).double()
    x, gate, trial = x.double(), gate.double(), trial.double()
    group = int(getattr(module, "group_size", width))

    def unit(rows: Tensor) -> Tensor:
        grouped = rows.unflatten(-1, (-1, group))
        return (grouped * (grouped.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2)

    silu = gate * gate.sigmoid()
    formulas = {
        "silu_after": trial * unit(x) * silu,
        "sigmoid_after": trial * unit(x) * gate.sigmoid(),
        "silu_before": trial * unit(x * silu),
    }
    for order, expected in formulas.items():
        if float((got - expected).abs().max()) < 1e-4:
            return {"order": order, "group": group, "eps": eps}
    return None


def install_gated_norm(installer: "Installer", operator: Operator) -> None:
    """``*RMSNormGated``: one operator of rows, their gates and the weight."""
    module, facts, tap = operator.module, operator.facts, installer.tap
    # Nemotron-H hands over the state's fp32 output, whatever the model's dtype.
    wide = "_wide" if facts["order"] == "silu_before" else ""
    site, choice = installer.site(operator.path, f"gated_rmsnorm{wide}")
    weights = tensor_names(module, operator.path, installer.names)
    weight = cast(nn.Parameter, module.weight)
    stock: Callable[..., Tensor] = type(module).forward.__get__(module)
    group = facts["group"] if facts["order"] == "silu_before" else None

    def run(inputs: Mapping[str, Tensor]) -> Tensor:
        x, gate = inputs["x"], inputs["gate"]
        if choice == STOCK:
            return stock(x, gate)
        norm = kernel(site.op_class).gated_rmsnorm
        return norm(x, gate, weight, facts["eps"], order=facts["order"], group=group)

    def forward(hidden_states: Tensor, gate: Tensor) -> Tensor:
        inputs = {"x": hidden_states, "gate": gate}
        return tap.through(site, run, inputs, weights=weights) if tap.watching else run(inputs)

    installer.put_forward(module, forward)


def gates_inline(module: nn.Module) -> bool:
    """Whether a block multiplies its shared expert by an inline sigmoid (Qwen3-Next)."""
    code = getattr(type(module).forward, "__code__", None)
    shared = getattr(module, "shared_expert_gate", None)
    return isinstance(shared, nn.Linear) and code is not None and "sigmoid" in code.co_names


class _WithSigmoid:
    """``torch`` or ``torch.nn.functional`` as a forward's code sees it, with another sigmoid."""

    def __init__(self, module: types.ModuleType, sigmoid: Callable[[Tensor], Tensor]) -> None:
        self._module, self._sigmoid = module, sigmoid

    def __getattr__(self, name: str) -> Any:
        return self._sigmoid if name == "sigmoid" else getattr(self._module, name)


def sigmoid_globals(installer: "Installer", operator: Operator) -> dict[str, Any]:
    """Globals that make a forward's inline sigmoid a site; none where it has none."""
    forward = cast(Any, type(operator.module).forward)
    if "sigmoid" not in forward.__code__.co_names:
        return {}
    site, choice = installer.site(operator.path, "sigmoid", "gate")
    tap = installer.tap

    def run(inputs: Mapping[str, Tensor]) -> Tensor:
        x = inputs["x"]
        return torch.sigmoid(x) if choice == STOCK else kernel("sigmoid").sigmoid(x)

    def sigmoid(x: Tensor) -> Tensor:
        return tap.through(site, run, {"x": x}) if tap.watching else run({"x": x})

    used = {name: forward.__globals__.get(name) for name in ("torch", "F")}
    return {
        name: _WithSigmoid(module, sigmoid)
        for name, module in used.items()
        if isinstance(module, types.ModuleType) and name in forward.__code__.co_names
    }


def _with_rows(layer: RecurrentLayer, site: Site, choice: str) -> RecurrentLayer:
    """The layer as its recurrence's contract keeps rows; RecipeError where it cannot."""
    if not choice.startswith(BLOCKS):
        return layer
    from ..kernels.recurrence.gpu_blocks import BLOCK

    if layer.chunk % BLOCK:
        raise RecipeError(
            f"{choice} cannot serve {site.name}: its chunks of {layer.chunk} rows are no multiple "
            f"of {BLOCK}; in the plan, name recurrence.{layer.kind}.float32.sm90.v1 for "
            f"{site.op_class}"
        )
    return replace(layer, rows=torch.bfloat16)


def install_mixer(installer: "Installer", operator: Operator, mode: str) -> None:
    """Every part of a recurrent mixer, and the forward that joins them."""
    mixer: Mixer = operator.facts["mixer"]
    module, tap = operator.module, installer.tap
    sites: dict[str, tuple[Site, str]] = {}
    for part, entry in mixer.parts.items():
        sites[part] = installer.site(operator.path, entry.op_class, part)
        site, choice = sites[part]
        if mode == "module" and choice != STOCK:
            raise RecipeError(
                f"transformers' own cache can only serve stock, plan {installer.plan.name} wants "
                f"{choice} at {site.name}; use the packed or paged engine"
            )
    mixer.layer = _with_rows(mixer.layer, *sites["recurrence"])
    own = dict(module.named_parameters())
    weights = {
        part: tuple(
            installer.names.get(id(own[name]), f"{operator.path}.{name}") for name in entry.weights
        )
        for part, entry in mixer.parts.items()
    }

    def forward(
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        *,
        batch: RecurrentContext | None = None,
        **_: Any,
    ) -> Tensor:
        context: RecurrentContext
        if mode == "module":
            context = TransformersState(cache_params, mixer.layer.index, len(hidden_states))
        else:
            # Padding behind a sequence changes nothing before it; in front it was refused.
            context, attention_mask = batch or packed_context(tap), None

        def run(part: str, **rows: Tensor) -> Tensor:
            (site, choice), entry = sites[part], mixer.parts[part]

            def compute(inputs: Mapping[str, Tensor]) -> Tensor:
                return (entry.stock if choice == STOCK else entry.aligned)(context, inputs)

            if not tap.watching:
                return compute(rows)
            return tap.through(
                site, compute, rows, weights=weights[part], flat=True,
                alone=entry.alone[choice != STOCK],
            )  # fmt: skip

        return mixer.compute(hidden_states, attention_mask, run)

    installer.put_forward(module, forward)
