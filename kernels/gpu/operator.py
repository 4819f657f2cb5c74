"""An operator of ``torch.library``, called without its wrapper where nobody needs one.

    @gpu_operator("zeromismatch::linear")
    def linear_op(x: Tensor, weight: Tensor) -> Tensor: ...
    @linear_op.register_fake
    ...
    linear_op.register_autograd(_grad, setup_context=_keep)

torch.compile, export, fake and subclassed tensors, dispatch modes and function transforms see the
registered operator. Plain eager code on plain tensors runs the same body straight away, under an
``autograd.Function`` of the same two rules: the wrapper of a custom operator takes the host longer
than most of our kernels take the GPU (``benchmarks/vllm.md``). The bits are the body's either way.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


class GpuOperator:
    """See the module. ``library`` is the registered operator. ``writes``: names of arguments that
    it writes; no others are."""

    def __init__(self, name: str, body: Callable[..., Any], writes: tuple[str, ...]) -> None:
        self.body = body
        self.library = torch.library.custom_op(name, body, mutates_args=writes)
        self.register_fake = self.library.register_fake
        self._recorded: type[torch.autograd.Function] | None = None

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """As ``torch.library``'s: the gradients, and what the forward keeps for them."""
        self.library.register_autograd(backward, setup_context=setup_context)
        body = self.body

        def forward(ctx: Any, *arguments: Any) -> Any:  # a separate setup_context costs 80 us
            output = body(*arguments)
            setup_context(ctx, arguments, output)
            return output

        rules = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._recorded = type(body.__name__, (torch.autograd.Function,), rules)

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or _watched():
            return self.library(*arguments)
        records = False
        for given in arguments:
            if isinstance(given, Tensor):
                if type(given) not in _PLAIN:
                    return self.library(*arguments)
                records = records or given.requires_grad
        if not (records and torch.is_grad_enabled()):
            return self.body(*arguments)
        if self._recorded is None:  # the library's error names the operator without a gradient
            return self.library(*arguments)
        return self._recorded.apply(*arguments)


def gpu_operator(
    name: str, *, writes: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], GpuOperator]:
    """Register ``namespace::name``; the decorated function becomes a :class:`GpuOperator`."""
    return lambda body: GpuOperator(name, body, writes)


def _watched() -> bool:
    """Whether a mode or a function transform is to see operators rather than kernels."""
    c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    return bool(
        c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or c._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cuda")
    )
