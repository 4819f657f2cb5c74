"""A module as data: what the kernel of a model's own operator gets for ``module``.

    tree, tensors = described(module)          # in the verifier, which loaded the model
    part = rebuilt(tree, tensors)              # in a worker, which knows nothing of the model
    part.weight, part.eps, part.maps[0]

Tensors, plain attributes and children are there by their names; nothing can be called. The standard
library and torch only, since workers import it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

PLAIN = (int, float, bool, str, type(None))


class Part:
    """Stands in for a module, or for a list of modules or parameters."""

    _items: tuple[Any, ...]

    def __init__(self, held: dict[str, Any], items: Sequence[Any]) -> None:
        self.__dict__.update(held)
        self.__dict__["_items"] = tuple(items)

    def __getitem__(self, index: int) -> Any:
        """An item of a list of modules or parameters."""
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def described(module: torch.nn.Module) -> tuple[dict[str, Any], list[str]]:
    """(tree, names of its tensors in the order of the tree's numbers)."""
    names = [name for name, _ in module.named_parameters()]
    names += [name for name, _ in module.named_buffers()]
    return _tree(module, "", {name: number for number, name in enumerate(names)}), names


def _tree(module: torch.nn.Module, prefix: str, numbers: dict[str, int]) -> dict[str, Any]:
    held = {**module._parameters, **module._buffers}  # pyright: ignore[reportPrivateUsage]
    known: dict[str, Any] = {}
    for owner in reversed(type(module).__mro__):
        known |= vars(owner)
    known |= vars(module)
    return {
        "values": {
            name: value for name, value in known.items()
            if not name.startswith("_") and type(value) in PLAIN
        },
        "tensors": {
            name: numbers[prefix + name] for name in held if prefix + name in numbers
        },
        "children": {
            name: _tree(child, f"{prefix}{name}.", numbers)
            for name, child in module.named_children()
        },
    }  # fmt: skip


def rebuilt(tree: dict[str, Any], tensors: Sequence[Tensor]) -> Part:
    """The part that a kernel sees."""
    held: dict[str, Any] = dict(tree["values"])
    held |= {name: tensors[number] for name, number in tree["tensors"].items()}
    held |= {name: rebuilt(child, tensors) for name, child in tree["children"].items()}
    items = [held[name] for name in (*tree["tensors"], *tree["children"]) if name.isdigit()]
    return Part(held, items)


def entries_for(
    forward: Callable[..., Any], trees: Sequence[dict[str, Any]]
) -> dict[str, Callable[..., Any]]:
    """``forward`` and ``backward`` over flat arguments: which tree, its inputs, its tensors.

    backward: the gradients that autograd finds through the kernel's own forward, for all of them.
    """

    def run(which: int, *tensors: Tensor) -> Any:
        count = trees[which]["inputs"]
        return forward(rebuilt(trees[which], tensors[count:]), *tensors[:count])

    def backward(dy: Tensor, which: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [
                each.detach().requires_grad_() if each.is_floating_point() else each
                for each in tensors
            ]
            output = run(which, *leaves)
            asked = [each for each in leaves if each.requires_grad]
            found = cast(
                "Sequence[Tensor | None]",
                torch.autograd.grad(output, asked, dy, allow_unused=True),
            )
        return tuple(
            torch.zeros_like(leaf) if grad is None else grad.detach().clone()
            for leaf, grad in zip(asked, found, strict=True)
        )

    return {"forward": run, "backward": backward}
