"""vLLM's model classes with a plan on them, in every worker, before a weight is loaded.

For each architecture in :data:`compat.ARCHITECTURES` there is a subclass of vLLM's class. Its
constructor builds the stock model, then either becomes the stock class again (no recipe) or puts
the plan onto the finished module tree:

1. every setting that the recipe does not cover is collected (:mod:`.admission`);
2. every layer that computes is changed to its contract, or named as one that cannot be;
3. anything on either list is one error, before vLLM loads weights;
4. after loading, the weights' digests must be the recipe's.

:func:`evidence` reads the live tree back: what runs, not what was asked for.
Nothing here is imported without vLLM.
"""

import copy
from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....kernels.errors import RecipeError
from ....model_recipes.plan import STOCK, check_plan
from ....model_recipes.rope import frequencies
from ....model_recipes.state import config_digest, digests_of, named_state, weights_root
from . import compat, logprobs
from .admission import require_covered, violations
from .adoption import SLOT as _SLOT
from .adoption import Adopted, adopted
from .recurrent_options import NAME

_COMPUTED = frozenset(
    (
        *("linear", "rmsnorm", "gated", "rotary", "rotary_table", "attention"),
        *("router", "topk", "topk_weights", "grouped_linear", "combine"),
        *("lm_head", "logprob"),
    )
)
"""Operator classes that the changed layers serve; the others are exact whoever computes them."""


def register_architectures() -> list[str]:
    """Register a subclass for every architecture that this vLLM has; returns their names."""
    from . import recurrent_config

    registry = compat.need("vllm.model_executor.models", "ModelRegistry")
    known = [name for name in compat.ARCHITECTURES if name in registry.get_supported_archs()]
    for name in known:
        registry.register_model(name, _subclass(compat.model_class(name)))
    recurrent_config.register()
    registry.register_model(NAME, f"{__package__}.recurrent_model:AlignedModule")
    return [*known, NAME]


def _subclass(base: Any) -> Any:
    class Aligned(base):
        def __init__(self, *, vllm_config: Any, prefix: str = "", **keywords: Any) -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix, **keywords)
            asked = adopted(vllm_config.additional_config)
            if asked is None:
                self.__class__ = base
                return
            self.__dict__[_SLOT] = asked
            install(self, vllm_config, asked)

        def load_weights(self, weights: Any) -> Any:
            loaded = super().load_weights(weights)
            check_weights(self)
            return loaded

    Aligned.__name__, Aligned.__qualname__ = base.__name__, f"Aligned{base.__name__}"
    return Aligned


def install(model: nn.Module, vllm_config: Any, asked: Adopted) -> None:
    """Put a plan onto a vLLM model; CapabilityError lists everything that it does not cover."""
    from . import attention, layers

    found = violations(vllm_config, asked)
    check_plan(asked.plan, (), vllm_config.model_config.dtype, compat.device_of(vllm_config))
    mixed = [
        name for name in _COMPUTED if name in asked.plan.rules and asked.plan.rules[name] == STOCK
    ]
    if mixed or asked.plan.overrides:
        found.append(
            f"a plan that leaves {', '.join(sorted(mixed)) or 'single sites'} stock: vLLM's layers "
            "are changed together"
        )
    clones: dict[int, nn.Module] = {}
    parameters = vllm_config.model_config.hf_config.rope_parameters
    for path, parent, name, layer in _leaves(model):
        if isinstance(layer, compat.need("vllm.model_executor.layers.attention", "Attention")):
            why = attention.unfit(layer)
            if why is None:
                attention.put_on(layer)
        else:
            if type(layer).__name__ == "RotaryEmbedding":  # vLLM shares one between models
                layer = clones.setdefault(id(layer), _own_copy(layer))
                setattr(parent, name, layer)
            why = None if isinstance(layer, layers.ALIGNED) else layers.align(layer)
        if why is not None:
            found.append(f"{path} is {why}")
    if clones and frequencies(parameters, 2) is None:
        found.append(f"rope type {parameters['rope_type']!r}")
    require_covered(found)
    for clone in clones.values():
        cast(layers.AlignedRotary, clone).fill_table(parameters)
    if not vllm_config.model_config.enforce_eager:
        layers.join_heads(model)
    logprobs.serve(model)


def _own_copy(layer: nn.Module) -> nn.Module:
    """The same tensors in a module of our own."""
    twin = copy.copy(layer)
    twin._buffers = dict(layer._buffers)
    return twin


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Module]]:
    """(path, parent, name, layer) of everything that computes: layers with weights or a kernel."""
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    from .layers import BLOCKS

    kinds = (CustomOp, PluggableLayer, Attention, *BLOCKS)
    leaves: list[tuple[str, nn.Module, str, nn.Module]] = []
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(module, kinds) or isinstance(child, ApplyRotaryEmb):
                continue
            bare = isinstance(child, kinds) or any(True for _ in child.parameters(recurse=False))
            if bare:
                leaves.append((f"{path}.{name}" if path else name, module, name, child))
    return leaves


def evidence(model: nn.Module) -> dict[str, Any]:
    """What really serves a live model: classes of its layers, replaced functions, the plan."""
    from . import attention, layers

    asked = cast("Adopted | None", model.__dict__.get(_SLOT))
    served = Counter(cast("Counter[str]", getattr(model, "served", ())))
    stock: list[str] = []
    for path, _, _, layer in [] if served else _leaves(model):
        ours = (
            isinstance(layer, layers.ALIGNED)
            or isinstance(getattr(layer, "quant_method", None), layers.METHODS)
            or isinstance(getattr(layer, "impl", None), attention.AlignedImpl)
        )
        served[type(layer).__name__] += ours
        if not ours:
            stock.append(path)
    return {
        "alive": asked is not None and not stock and bool(logprobs.replaced()),
        "plan": None if asked is None else asked.plan.name,
        "plan_digest": None if asked is None else asked.plan.digest,
        "layers": {name: count for name, count in sorted(served.items()) if count},
        "stock_layers": stock,
        "logprobs": logprobs.replaced(),
    }


def attention_backends(model: nn.Module) -> list[str]:
    """Classes of the attention backends of a live model, each once."""
    attention = compat.need("vllm.model_executor.layers.attention", "Attention")
    layers = [module for module in model.modules() if isinstance(module, attention)]
    layers += getattr(model, "attention", {}).values()
    return sorted({type(cast(Any, layer).impl).__qualname__ for layer in layers})


def hf_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live weights under transformers' names: fused projections as views of their parts.

    Padding rows of the vocabulary are left out. A tied head is listed once, as the embedding. What
    stock vLLM packed into a form of its own (on a CPU: every linear layer) is missing.
    """
    from .experts import transformers_name

    if isinstance(module := getattr(model, "module", None), nn.Module):  # transformers' own
        return named_state(module)
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        parts = fused_parts(module)
        for name, parameter in module.named_parameters(recurse=False):
            full = transformers_name(path, name) or (f"{path}.{name}" if path else name)
            tensor = parameter.detach()
            if not parts:
                rows = getattr(module, "org_vocab_size", None)
                if tensor.numel():
                    tensors[full] = tensor if rows is None else tensor[:rows]
                continue
            prefix = path.rpartition(".")[0]
            sizes = [size for _, size in parts]
            if tensor.dim() == 0 or tensor.shape[0] != sum(sizes):
                continue  # packed away, as stock vLLM does on a CPU
            for (part, _), piece in zip(parts, tensor.split(sizes), strict=True):
                tensors[f"{prefix}.{part}.{name}"] = piece
    seen: dict[int, str] = {}
    for name, tensor in list(tensors.items()):
        if seen.setdefault(tensor.data_ptr(), name) != name and tensor.numel():
            del tensors[name]
    return tensors


def weight_places(model: nn.Module) -> dict[int, str]:
    """Address of each module's weight -> the module's path; a tied one under its first name."""
    places: dict[int, str] = {}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.numel():
            places.setdefault(weight.data_ptr(), path)
    return places


def fused_parts(module: nn.Module) -> list[tuple[str, int]]:
    """(name, rows) of the projections in a fused one; empty for any other module."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    if isinstance(module, QKVParallelLinear):
        kv = module.num_kv_heads * module.head_size
        return [("q_proj", module.num_heads * module.head_size), ("k_proj", kv), ("v_proj", kv)]
    if isinstance(module, MergedColumnParallelLinear):
        sizes = list(module.output_sizes)
        assert len(sizes) == 2
        return [("gate_proj", sizes[0]), ("up_proj", sizes[1])]
    return []


def tensor_digests(model: nn.Module) -> dict[str, str]:
    """Digest of every live weight, under transformers' names."""
    return digests_of(hf_tensors(model))


@torch.no_grad()
def check_weights(model: nn.Module) -> None:
    """Raise RecipeError unless the loaded config and weights are the recipe's."""
    asked = cast("Adopted | None", model.__dict__.get(_SLOT))
    if asked is None or asked.recipe is None:
        return
    wanted = asked.recipe.model
    found = {
        "config": config_digest(cast(Any, model).config),
        "weights": weights_root(tensor_digests(model)),
    }
    for what, digest in (("config", wanted.config_digest), ("weights", wanted.weights_root)):
        if found[what] != digest:
            raise RecipeError(
                f"recipe {asked.recipe.name} is for {wanted.spec}; the {what} loaded here differ "
                f"({digest} against {found[what]}); align this model to get a recipe of its own"
            )
