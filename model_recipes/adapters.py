"""Low-rank adapters: beside the frozen base (unmerged) or added to its weights (merged).

    adapter = read_adapter("my-adapter")             # PEFT's adapter_config.json + safetensors
    adapter = fresh_adapter(module, rank=8)          # on linear modules and embedding, not the head
    attached = attach(module, adapter)               # base frozen; y = W x + scale * up(down(x))
    attached.remove()                                # as before
    merge(module, adapter)                           # W + scale * up down, rounded once

Unmerged, each adapted module becomes an :class:`AdaptedLinear` of three linear modules, a product
and a sum (:class:`AdaptedEmbedding`: two look-ups, then the same): operator sites like all others,
covered by the same contracts and gates. Merged and
unmerged are two policies with two sets of weights and other bits; ``zm`` calls a comparison between
them MISALIGNED. Attach before a plan is applied.

Stacked experts (PEFT's ``target_parameters``) are another matter, as in PEFT: the weights of all
experts are made anew in every forward (:mod:`.adapted_experts`), so an adapter of experts alone has
the bits of the merged model. It costs a copy of the weights.

Left out: adapters of the LM head, of an embedding tied to it, of routers, and of depthwise
convolutions, which PEFT adapts only at a rank that is a multiple of their channels and cannot
merge: they are refused by name. ``pytest tests/model_recipes/test_adapters.py``.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..kernels.errors import CheckpointError, RecipeError
from .adapted_experts import (
    StackedSum,
    from_peft,
    peft_paths,
    stacked_names,
    stacked_sum,
    stacked_weight,
    to_peft,
)
from .apply import is_applied

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_HALVES = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
"""PEFT's names of a linear module's factors, and of an embedding's (those without ``.weight``)."""
_UNKNOWN = ("use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """``down [rank, in]``, ``up [out, rank]`` of one module; an embedding's ``in`` are tokens.

    Of stacked experts, by the path of their weight: ``[experts, rank, in]``, ``[experts, out,
    rank]``.
    """

    down: Tensor
    up: Tensor
    embedding: bool = False

    @property
    def stacked(self) -> bool:
        """Whether these are of experts."""
        return self.down.dim() == 3

    @property
    def rank(self) -> int:
        """Rows of ``down``, per expert."""
        return self.down.shape[-2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Factors by module path, and what their product is multiplied by (alpha / rank)."""

    scale: float
    factors: Mapping[str, Factors]


class AdaptedLinear(nn.Module):
    """A frozen linear module and two small ones: ``base(x) + up(down(x)) * scale``."""

    def __init__(self, base: nn.Linear, factors: Factors, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.down, self.up = (_linear(each, base.weight) for each in (factors.down, factors.up))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in] -> [..., out]``."""
        return self.base(x) + self.up(self.down(x)) * self.scale


class AdaptedEmbedding(nn.Module):
    """A frozen embedding and a small one: ``base(ids) + up(down(ids)) * scale``."""

    def __init__(self, base: nn.Embedding, factors: Factors, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        tokens, rank = factors.down.shape[::-1]
        self.down = nn.Embedding(tokens, rank, device="meta")
        self.down.weight = _like(factors.down.t().contiguous(), base.weight)
        self.up = _linear(factors.up, base.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """``[...] -> [..., out]``."""
        return self.base(ids) + self.up(self.down(ids)) * self.scale


Adapted = AdaptedLinear | AdaptedEmbedding


def _adapted(base: nn.Linear | nn.Embedding, factors: Factors, scale: float) -> Adapted:
    if isinstance(base, nn.Embedding):
        return AdaptedEmbedding(base, factors, scale)
    return AdaptedLinear(base, factors, scale)


def _like(weight: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().to(like.device, like.dtype, copy=True))


def _linear(weight: Tensor, like: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = _like(weight, like)
    return made


class Attached:
    """An adapter on a model, until :meth:`remove`."""

    def __init__(self, module: nn.Module, adapter: Adapter) -> None:
        self._module = module
        plain = {path: each for path, each in adapter.factors.items() if not each.stacked}
        self._stacked = {p: each for p, each in adapter.factors.items() if each.stacked}
        self._bases = {path: _target(module, path) for path in plain}
        self._frozen = [p for p in module.parameters() if p.requires_grad]
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        for path, base in self._bases.items():
            _replace(module, path, _adapted(base, adapter.factors[path], adapter.scale))
        for path, each in self._stacked.items():
            experts, name = stacked_weight(module, path)
            base = cast(Tensor, getattr(experts, name))
            added = StackedSum(_like(each.down, base), _like(each.up, base), adapter.scale)
            parametrize.register_parametrization(experts, name, added)
        self._scale = adapter.scale

    def adapter(self) -> Adapter:
        """The factors as they are now, for instance after training."""
        found = {p: cast(Adapted, self._module.get_submodule(p)) for p in self._bases}
        factors: dict[str, Factors] = {}
        for path in self._stacked:
            experts, name = stacked_weight(self._module, path)
            own = cast(Any, experts).parametrizations[name][0]
            factors[path] = Factors(down=own.down.detach(), up=own.up.detach())
        for path, each in found.items():
            down, rows = each.down.weight.detach(), isinstance(each, AdaptedEmbedding)
            down = down.t().contiguous() if rows else down
            factors[path] = Factors(down=down, up=each.up.weight.detach(), embedding=rows)
        return Adapter(scale=self._scale, factors=factors)

    def remove(self) -> None:
        """Take the adapter off; the base is as it was."""
        _require_bare(self._module)
        for path, base in self._bases.items():
            _replace(self._module, path, base)
        for path in self._stacked:
            parametrize.remove_parametrizations(*stacked_weight(self._module, path), False)
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._bases, self._stacked, self._frozen = {}, {}, []


def attach(module: nn.Module, adapter: Adapter) -> Attached:
    """Put an adapter beside the base, which is frozen; its factors take the base's dtype.

    Raises CheckpointError for an adapter that does not fit, RecipeError under an applied plan.
    """
    _check(module, adapter)
    return Attached(module, adapter)


def merge(module: nn.Module, adapter: Adapter) -> None:
    """Add an adapter to the weights for good: the product in fp32, the sum rounded once."""
    _check(module, adapter)
    with torch.no_grad():
        for path, each in adapter.factors.items():
            if each.stacked:
                weight = cast(Tensor, getattr(*stacked_weight(module, path)))
                up, down = (x.to(weight.device, weight.dtype) for x in (each.up, each.down))
                weight.copy_(stacked_sum(weight, up, down, adapter.scale))
                continue
            base = _target(module, path)
            up, down = (x.to(base.weight.device).float() for x in (each.up, each.down))
            added = adapter.scale * (up @ down)
            added = added.t() if isinstance(base, nn.Embedding) else added
            base.weight.copy_((base.weight.float() + added).to(base.weight.dtype))


def fresh_adapter(
    module: nn.Module, *, rank: int, alpha: float | None = None, seed: int = 0, spread: float = 0.0
) -> Adapter:
    """Factors for every linear module but the LM head, for stacked experts, and for an embedding
    that is not tied to the head.

    alpha: by default ``2 * rank``.

    spread: standard deviation of ``up``; 0, as training begins, leaves the model what it computes.
    """
    if rank < 1:
        raise CheckpointError(f"an adapter of rank {rank} adapts nothing; give a rank of 1 or more")
    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, Factors] = {}
    for path, child in module.named_modules():
        for name in stacked_names(child):
            count, out, width = getattr(child, name).shape
            down = torch.randn(count, rank, width, generator=generator) / math.sqrt(width)
            up = torch.randn(count, out, rank, generator=generator) * spread
            factors[f"{path}.{name}"] = Factors(down=down, up=up)
        if _unfit(module, child) is None:
            width, out = _sizes(cast("nn.Linear | nn.Embedding", child))
            rows = isinstance(child, nn.Embedding)
            down = torch.randn(rank, width, generator=generator)
            up = torch.randn(out, rank, generator=generator) * spread
            down = down / math.sqrt(rank if rows else width)  # a look-up adds nothing up
            factors[path] = Factors(down=down, up=up, embedding=rows)
    return Adapter(scale=(alpha or 2.0 * rank) / rank, factors=factors)


def read_adapter(folder: str | Path) -> Adapter:
    """A LoRA adapter as PEFT writes it. Raises CheckpointError where the files do not fit."""
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / TENSORS)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} holds no adapter: {error!r}; give a folder with {CONFIG} (r, lora_alpha) "
            f"and {TENSORS}"
        ) from error
    strange = [name for name in _UNKNOWN if config.get(name)]
    if config.get("peft_type", "LORA") != "LORA" or strange or rank < 1:
        what = ", ".join(strange) or f"peft_type {config.get('peft_type')}, r {rank}"
        raise CheckpointError(f"{folder / CONFIG} asks for {what}; only plain LoRA is supported")
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, half = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        halves.setdefault(path, {})[half] = tensor
    wrong = [path for path, pair in halves.items() if tuple(sorted(pair)) not in _HALVES]
    if wrong:
        raise CheckpointError(
            f"{folder / TENSORS} has no pair lora_A.weight, lora_B.weight for {wrong[0]}; export "
            "the adapter again"
        )
    factors: dict[str, Factors] = {}
    stacked = peft_paths(halves, config.get("target_parameters") or [])
    for path, pair in halves.items():
        names = tuple(sorted(pair))
        if path in stacked:
            down, up = from_peft(pair["lora_A"], pair["lora_B"], rank)
            factors[stacked[path]] = Factors(down=down, up=up)
            continue
        factors[path] = Factors(
            down=pair[names[0]], up=pair[names[1]], embedding=names == _HALVES[1]
        )
    odd = [path for path, each in factors.items() if each.rank != rank]
    if odd:
        has = factors[odd[0]].rank
        raise CheckpointError(f"{CONFIG} says rank {rank}, but {odd[0]} has {has}; correct r")
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return Adapter(scale=alpha / divisor, factors=factors)


def write_adapter(adapter: Adapter, folder: str | Path) -> None:
    """Write what :func:`read_adapter` reads."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(adapter.factors.values())).rank
    plain = {path: each for path, each in adapter.factors.items() if not each.stacked}
    named = {
        f"{_PREFIX}{path}.{half}{'' if each.embedding else '.weight'}": tensor.contiguous()
        for path, each in plain.items()
        for half, tensor in zip(_HALVES[each.embedding], (each.down, each.up), strict=True)
    }
    stacked = {path: each for path, each in adapter.factors.items() if each.stacked}
    by_name, parameters = to_peft(stacked)
    named |= {f"{_PREFIX}{name}": tensor for name, tensor in by_name.items()}
    save_file(named, folder / TENSORS)
    targets = sorted({path.rpartition(".")[2] for path in plain})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": adapter.scale * rank,
              "target_modules": targets}  # fmt: skip
    if parameters:
        config["target_parameters"] = parameters
    (folder / CONFIG).write_text(json.dumps(config, indent=1))


def _check(module: nn.Module, adapter: Adapter) -> None:
    _require_bare(module)
    if not adapter.factors:
        raise CheckpointError("the adapter binds no module; give it factors of at least one")
    if not math.isfinite(adapter.scale):
        raise CheckpointError(f"the adapter's scale is {adapter.scale}; give a finite one")
    for path, each in adapter.factors.items():
        if each.stacked:
            experts, name = stacked_weight(module, path)
            if parametrize.is_parametrized(experts, name):
                raise CheckpointError(f"{path} carries an adapter already; remove() it first")
            count, *sizes = getattr(experts, name).shape
            wanted = (sizes[1], sizes[0])
            fits = each.up.dim() == 3 and {len(each.up), len(each.down)} == {count}
        else:
            wanted = _sizes(_target(module, path))
            fits = each.down.dim() == each.up.dim() == 2
        fits = fits and each.rank == each.up.shape[-1]
        if not fits or (each.down.shape[-1], each.up.shape[-2]) != wanted:
            raise CheckpointError(
                f"the adapter's factors of {path} are {tuple(each.down.shape)} and "
                f"{tuple(each.up.shape)}, which do not fit a module from {wanted[0]} to "
                f"{wanted[1]}; it was made for another model"
            )
        if not bool(each.down.isfinite().all() and each.up.isfinite().all()):
            raise CheckpointError(f"the adapter of {path} has values that are not finite; mend it")


def _target(module: nn.Module, path: str) -> nn.Linear | nn.Embedding:
    """The module of that path; CheckpointError says why it takes no adapter."""
    try:
        child = module.get_submodule(path)
    except AttributeError:
        raise CheckpointError(
            f"the adapter names {path or 'no module at all'}, which this model does not have; "
            "`zm inspect MODEL` lists its modules"
        ) from None
    if isinstance(child, Adapted):
        raise CheckpointError(f"{path} carries an adapter already; remove() it first")
    unfit = _unfit(module, child)
    if unfit is not None:
        raise CheckpointError(
            f"{path} is a {type(child).__name__}{unfit}; adapters go on linear modules below the "
            "head and on an embedding that is not tied to it: leave it out, or merge it beforehand"
        )
    return cast("nn.Linear | nn.Embedding", child)


def _unfit(module: nn.Module, child: nn.Module) -> str | None:
    """Why a module takes no adapter, to be put behind its name; None where it does."""
    head = _head(module)
    if type(child) not in (nn.Linear, nn.Embedding):
        depthwise = isinstance(child, nn.Conv1d) and child.groups > 1
        return " (depthwise: PEFT merges no adapter of it)" if depthwise else ""
    if child is head:
        return " (the head)"
    tied = head is not None and cast(Any, child).weight is cast(Any, head).weight
    return " (tied to the head)" if tied else None


def _sizes(base: nn.Linear | nn.Embedding) -> tuple[int, int]:
    if isinstance(base, nn.Embedding):
        return base.num_embeddings, base.embedding_dim
    return base.in_features, base.out_features


def _head(module: nn.Module) -> nn.Module | None:
    return cast(Any, module).get_output_embeddings()


def _replace(module: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, child)


def _require_bare(module: nn.Module) -> None:
    if is_applied(module):
        raise RecipeError("a plan is on this model; remove() it, change the adapter, apply again")
