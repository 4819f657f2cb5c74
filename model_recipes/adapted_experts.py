"""Low-rank adapters of stacked experts: their weights are made anew in every forward, as in PEFT.

    StackedSum(weight, down, up, scale)      # a parametrization: W + scale * up down, per expert
    stacked_names(module)                    # ("gate_up_proj", "down_proj"), or ()
    from_peft(...), to_peft(...)             # PEFT's ``target_parameters`` in its files

``down [experts, rank, in]``, ``up [experts, out, rank]``. The product is the contract of linear
layers in fp32, the sum is rounded once: beside the base and merged it is the same number.
``pytest tests/model_recipes/test_adapters.py``.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.errors import CheckpointError
from .bindings import kernel
from .experts import experts_facts

_WRAPPED = ".base_layer"
"""PEFT wraps a module of experts once for each of its adapted weights: in the module's own order,
where transformers has ``down_proj`` last. The innermost wrapper is the first."""


class StackedSum(nn.Module):
    """Weights of stacked experts as their sum with low-rank products."""

    def __init__(self, down: nn.Parameter, up: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.down, self.up, self.scale = down, up, scale

    def forward(self, weight: Tensor) -> Tensor:
        """``[experts, out, in]``."""
        return stacked_sum(weight, self.up, self.down, self.scale)


def stacked_sum(weight: Tensor, up: Tensor, down: Tensor, scale: float) -> Tensor:
    """``W + scale * up down`` per expert, rounded once."""
    linear = kernel("linear").linear
    columns = down.float().transpose(1, 2).contiguous()
    pairs = zip(up.float().contiguous(), columns, strict=True)
    products = torch.stack([linear(one, other) for one, other in pairs])
    return (weight.float() + scale * products).to(weight.dtype)


def stacked_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the weights of a module of stacked experts; none for other modules."""
    facts = experts_facts(module)
    return (str(facts["up"]), "down_proj") if facts is not None else ()


def stacked_weight(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module of stacked experts and the weight's name, of a weight's path; CheckpointError."""
    where, _, name = path.rpartition(".")
    children = dict(module.named_modules())
    if where not in children or name not in stacked_names(children[where]):
        raise CheckpointError(
            f"the adapter names {path}, which is no weight of stacked experts in this model; "
            "`zm inspect MODEL` lists its modules"
        )
    return children[where], name


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (name.rpartition(".")[2] == "down_proj", name))


def peft_paths(found: Iterable[str], targets: Iterable[str]) -> dict[str, str]:
    """Wrapper's path in PEFT's file -> path of the weight that it adapts; others are left out.

    targets: the config's ``target_parameters``.
    """
    paths: dict[str, str] = {}
    bare = {path: path.replace(_WRAPPED, "") for path in found}
    ends = [each.rpartition(".") for each in targets]
    for module in set(bare.values()):
        names = _in_order({name for end, _, name in ends if f".{module}".endswith(f".{end}")})
        wrappers = sorted((path for path in bare if bare[path] == module), key=len, reverse=True)
        if names and len(names) != len(wrappers):
            raise CheckpointError(
                f"the adapter's config targets {', '.join(names)} of {module}, but its file has "
                f"{len(wrappers)} pairs for it; export the adapter again"
            )
        if names:
            paths |= {w: f"{module}.{name}" for w, name in zip(wrappers, names, strict=True)}
    return paths


def from_peft(down: Tensor, up: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """PEFT keeps ``[experts * rank, in]`` and ``[out, rank * experts]``, experts last."""
    experts = len(down) // rank
    if experts < 1 or len(down) % rank or up.shape[1:] != down.shape[:1]:
        raise CheckpointError(
            f"the adapter's config says rank {rank}, but factors {tuple(down.shape)} and "
            f"{tuple(up.shape)} are no experts' of that rank; correct r"
        )
    up = up.unflatten(1, (rank, experts)).permute(2, 0, 1)
    return down.unflatten(0, (experts, rank)), up.contiguous()


def to_peft(factors: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """(tensors by their names in PEFT's file, its ``target_parameters``) of stacked factors."""
    named: dict[str, Tensor] = {}
    for module in {path.rpartition(".")[0] for path in factors}:
        own = _in_order(path for path in factors if path.rpartition(".")[0] == module)
        for depth, path in enumerate(reversed(own)):
            wrapper = f"{module}{_WRAPPED * depth}"
            up = factors[path].up.permute(1, 2, 0).flatten(1)
            named[f"{wrapper}.lora_A.weight"] = factors[path].down.flatten(0, 1).contiguous()
            named[f"{wrapper}.lora_B.weight"] = up.contiguous()
    return named, sorted({".".join(path.split(".")[-2:]) for path in factors})
