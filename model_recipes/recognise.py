"""Find the operators of a transformers model by what they are, not by the model's name.

A module is recognised by its class or by the names in its ``forward``'s bytecode, and what matters
is then proved by running it: an ``*RMSNorm`` is compared with the formula (which also tells whether
it multiplies by the weight or by 1 + weight), a gated MLP with its own composition. What is not
recognised stays a container, and the audit (:mod:`.audit`) names every number it computes.

    recognise(module)  ->  [Operator(kind="linear", path="model.layers.0.mlp.up_proj", ...), ...]

One operator may have several sites: rotary embedding acts on q and on k.
"""

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..kernels.errors import UncoveredSiteError
from .extension import extension_for

Kind = Literal[
    "extension",
    "linear",
    "lm_head",
    "rmsnorm",
    "embedding",
    "scaled_embedding",
    "rotary_table",
    "attention",
    "gated",
    "activation",
    "router",
    "experts",
    "mixer",
    "gated_norm",
    "shared_gate",
]

ROTARY_FUNCTIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
"""Names that modelling code gives to its rotation; the second takes pairs of neighbours."""
INTERFACES = "ALL_ATTENTION_FUNCTIONS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One recognised module.

    kind: which patch it gets. path: module path. facts: what the proof found out (``eps``,
    ``unit_offset``, ``activation``, child names).
    """

    kind: Kind
    path: str
    module: nn.Module
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


def recognise(module: nn.Module) -> list[Operator]:
    """All recognised operators, in module order; raises when there is no LM head to score with."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear):
        raise UncoveredSiteError(
            f"{type(module).__name__} has no linear LM head; use a transformers *ForCausalLM model"
        )
    found: list[Operator] = []
    proofs: dict[Any, Mapping[str, Any] | None] = {}
    for path, child in module.named_modules():
        operator = _recognise_one(path, child, head, proofs, cast(Any, module).config)
        if operator is not None:
            found.append(operator)
    inside = {
        f"{operator.path}.{operator.facts['act']}" for operator in found if operator.kind == "gated"
    }
    inside |= {f"{operator.path}.act_fn" for operator in found if operator.kind == "experts"}
    inside |= {f"{operator.path}.act" for operator in found if operator.kind == "mixer"}
    return [operator for operator in found if operator.path not in inside]


def _recognise_one(
    path: str,
    child: nn.Module,
    head: nn.Module,
    proofs: dict[Any, Mapping[str, Any] | None],
    config: Any,
) -> Operator | None:
    from . import experts, recurrent, recurrent_sites  # their proofs build on this module

    facts: Mapping[str, Any] | None = {}
    kind: Kind
    if child is head:
        kind = "lm_head"
    elif extension_for(child) is not None:
        kind = "extension"
    elif type(child) is nn.Linear:
        kind = "linear"
    elif type(child) is nn.Embedding:
        kind = "embedding"
    elif isinstance(child, nn.Embedding) and hasattr(child, "embed_scale"):
        kind = "scaled_embedding"
    elif type(child).__name__.endswith("RMSNorm"):
        kind, facts = "rmsnorm", norm_facts(child, proofs)
    elif type(child).__name__.endswith("RotaryEmbedding"):
        kind = "rotary_table"
    elif INTERFACES in _names(child):
        kind = "attention"
    elif type(child).__name__.endswith("Router"):
        kind, facts = "router", experts.router_facts(child)
    elif type(child).__name__.endswith("Experts"):
        kind, facts = "experts", experts.experts_facts(child)
    elif type(child).__name__.endswith("RMSNormGated"):
        kind, facts = "gated_norm", recurrent_sites.gated_norm_facts(child)
    elif (mixer := recurrent.mixer_facts(path, child, config)) is not None:
        kind, facts = "mixer", mixer
    elif recurrent_sites.gates_inline(child):
        kind = "shared_gate"
    elif is_activation(child):
        kind, facts = "activation", {"activation": activation_name(child)}
    else:
        kind, facts = "gated", gated_facts(child, proofs)
    if facts is None:
        return None
    return Operator(kind=kind, path=path, module=child, facts=facts)


def _names(child: nn.Module) -> tuple[str, ...]:
    """Names in the bytecode of the class's forward."""
    code = getattr(type(child).forward, "__code__", None)
    return code.co_names if code is not None else ()


def is_activation(child: nn.Module) -> bool:
    """Whether a module is an activation of torch or transformers without weights."""
    home = type(child).__module__
    known = home in ("transformers.activations", "torch.nn.modules.activation")
    return known and not list(child.parameters())


def activation_name(child: nn.Module) -> str:
    """``silu``, ``gelu_tanh`` (only the one that torch computes in one step), else the class."""
    name = type(child).__name__
    if name in ("SiLU", "SiLUActivation"):
        return "silu"
    if name == "ReLUSquaredActivation":
        return "relu2"
    in_one_step = name == "GELUTanh" and isinstance(getattr(child, "act", None), functools.partial)
    if in_one_step or (isinstance(child, nn.GELU) and child.approximate == "tanh"):
        return "gelu_tanh"
    return name


def norm_facts(
    child: nn.Module, proofs: dict[Any, Mapping[str, Any] | None]
) -> Mapping[str, Any] | None:
    """``eps``, ``unit_offset`` and ``wide`` of an RMSNorm, proved by running it, else None."""
    weight = getattr(child, "weight", None)
    eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    key = (type(child), eps, weight.shape[0])
    if key not in proofs:
        proofs[key] = _prove_norm(child, weight.shape[0], eps)
    return proofs[key]


def _prove_norm(child: nn.Module, width: int, eps: float) -> Mapping[str, Any] | None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, width, generator=generator)
    trial = torch.randn(width, generator=generator) + 0.5
    with torch.no_grad():
        got = torch.func.functional_call(child, {"weight": trial}, (x,)).double()
    unit = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    for unit_offset in (False, True):
        expected = unit * (trial.double() + (1.0 if unit_offset else 0.0))
        if float((got - expected).abs().max()) < 1e-4:
            wide = not unit_offset and _applies_weight_in_fp32(child, x.bfloat16(), eps)
            return {"eps": eps, "unit_offset": unit_offset, "wide": wide}
    return None


def _applies_weight_in_fp32(child: nn.Module, x: Tensor, eps: float) -> bool:
    """Whether a bf16 row is rounded once, after its product with the weight (gpt_oss)."""
    weight = torch.linspace(0.5, 1.5, x.shape[1]).bfloat16()
    with torch.no_grad():
        got = torch.func.functional_call(child, {"weight": weight}, (x,))
    unit = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    once = (unit * weight.double()).bfloat16()
    twice = unit.bfloat16() * weight
    return int((got == once).sum()) > int((got == twice).sum())


def gated_facts(
    child: nn.Module, proofs: dict[Any, Mapping[str, Any] | None]
) -> Mapping[str, Any] | None:
    """Child names of ``down(act(gate(x)) * up(x))``, proved by running it, else None."""
    names = _names(child)
    if len(names) != 4:
        return None
    parts = [getattr(child, name, None) for name in names]
    down, act, gate, up = parts
    linear = all(type(part) is nn.Linear for part in (down, gate, up))
    if not linear or not isinstance(act, nn.Module) or not is_activation(act):
        return None
    assert isinstance(down, nn.Linear)
    assert isinstance(gate, nn.Linear)
    assert isinstance(up, nn.Linear)
    if type(child) not in proofs:
        x = torch.linspace(
            -1.0, 1.0, gate.in_features, dtype=gate.weight.dtype, device=gate.weight.device
        )
        with torch.no_grad():
            same = torch.equal(child(x[None]), down(act(gate(x[None])) * up(x[None])))
        proofs[type(child)] = {} if same else None
    if proofs[type(child)] is None:
        return None
    return {"down": names[0], "act": names[1], "gate": names[2], "up": names[3],
            "activation": activation_name(act)}  # fmt: skip


def replace_globals(
    module: nn.Module, values: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """The module's ``forward`` with globals of its code replaced, for this instance only."""
    forward = cast(types.FunctionType, type(module).forward)
    copy = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, **values},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(copy, module)


def original_global(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """What that global is in the module's own code; None where its forward does not use it."""
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType):
        return None
    return forward.__globals__.get(name) if name in forward.__code__.co_names else None


def tensor_names(module: nn.Module, prefix: str, names: Mapping[int, str]) -> tuple[str, ...]:
    """Names of the module's own parameters, as the whole model lists them."""
    own: list[str] = []
    for name, parameter in module.named_parameters(recurse=False):
        own.append(names.get(id(parameter), f"{prefix}.{name}"))
    return tuple(own)


def first_tensor(*values: Any) -> Tensor:
    """The first argument that is a tensor."""
    return next(value for value in values if isinstance(value, Tensor))
