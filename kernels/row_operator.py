"""An operator with a gradient contract, as autograd sees it: written once for all of its kind.

    _SKIP = RowOperator(name="skip", tensors=3, parameters=(2,), forward=..., gradient=...)
    y = _SKIP(o, x, d)

``forward(*tensors, *options)`` gives one tensor or a tuple; ``gradient(*d_outputs, *tensors,
*options, *chains)`` gives a gradient per tensor, None where there is none. ``parameters`` are the
tensors that all rows share: theirs are fp32 chains over rows, which continue those of earlier
micro-batches (:mod:`.accumulation`), and are handed to autograd in the parameter's dtype otherwise.
Both are contract ids looked up by the first tensor's dtype, served by certified dispatch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .accumulation import chain_of
from .contract import Contract
from .cpu.register import covering
from .dispatch import choose
from .errors import ContractError

Contracts = Mapping[torch.dtype, Contract]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOperator:
    """See the module. ``by``: which tensor's dtype names the contract. ``served``: runs the forward
    where that takes more than the contract and the arguments."""

    name: str
    tensors: int
    forward: Contracts
    gradient: Contracts
    parameters: tuple[int, ...] = ()
    by: int = 0
    served: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """The forward; with gradients where autograd records. Tensors first, options after."""
        covering(self.forward, arguments[self.by])
        return self.recorded(*arguments)

    def recorded(self, *arguments: Any) -> Any:
        """As a call, for tensors that the caller has checked."""
        given = [x.contiguous() if isinstance(x, Tensor) else x for x in arguments]
        tensors = given[: self.tensors]
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            if given[self.by].dtype not in self.gradient:
                raise ContractError(
                    f"no contract covers the gradient of {self.name} in {given[self.by].dtype}; "
                    "convert to float32 or bfloat16, or wrap the forward in torch.no_grad()"
                )
            return _Recorded.apply(self, *given)
        return self.run(*given)

    def run(self, *given: Any) -> Any:
        """The forward alone."""
        if self.served is not None:
            return self.served(*given)
        return choose(self.forward[given[self.by].dtype].id).run(*given)


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: RowOperator, *arguments: Any) -> Any:
        ctx.save_for_backward(*arguments[: operator.tensors])
        ctx.operator, ctx.options = operator, arguments[operator.tensors :]
        return operator.run(*arguments)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        operator, tensors = ctx.operator, ctx.saved_tensors
        chains: list[Tensor | None] = []
        for place in operator.parameters:
            trains = ctx.needs_input_grad[1 + place]  # never where the tensor is None
            chains.append(chain_of(tensors[place], operator.name) if trains else None)
        run = choose(operator.gradient[tensors[operator.by].dtype].id).run
        given = [each.contiguous() for each in grads]
        found = list(run(*given, *tensors, *ctx.options, *chains))
        for place, chain in zip(operator.parameters, chains, strict=True):
            if chain is not None:
                chain.copy_(found[place])
                found[place] = None
            elif found[place] is not None:
                found[place] = found[place].to(tensors[place].dtype)
        return None, *found, *[None] * len(ctx.options)
