"""Plain eager calls skip torch.library's wrapper; whoever watches operators still sees them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from zeromismatch.kernels import bits
from zeromismatch.kernels.gpu.operator import GpuOperator, gpu_operator

NAME = "zeromismatch_test::scaled"


@pytest.fixture(scope="module")
def scaled() -> GpuOperator:
    @gpu_operator(NAME)
    def scaled(x: Tensor, by: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
        return (x * factor if by is None else x * by * factor), x.new_empty(0)

    @scaled.register_fake
    def _(x: Tensor, by: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), x.new_empty(0)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, by, ctx.factor = inputs
        ctx.save_for_backward(x, by)

    def gradient(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, by = ctx.saved_tensors
        each = dy * ctx.factor
        return (
            (each if by is None else each * by),
            (each * x if ctx.needs_input_grad[1] else None),
            None,
        )

    scaled.register_autograd(gradient, setup_context=keep)
    return scaled


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def _pair(trains: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, by = (torch.randn(5, 7, generator=generator) for _ in range(2))
    return x.requires_grad_(trains), by.requires_grad_(trains)


def _events(call: Any) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events()}


def test_eager_calls_run_the_body_without_the_wrapper(scaled: GpuOperator) -> None:
    x, by = _pair()
    assert NAME in _events(lambda: scaled.library(x, by, 3.0))  # the control
    assert NAME not in _events(lambda: scaled(x, by, 3.0))
    assert bits.equal(scaled(x, by, 3.0)[0], scaled.library(x, by, 3.0)[0])


@pytest.mark.parametrize("alone", [True, False])
def test_gradients_are_those_of_the_registered_operator(scaled: GpuOperator, alone: bool) -> None:
    found = []
    for call in (scaled, scaled.library):
        x, by = _pair(trains=True)
        call(x, None if alone else by, 3.0)[0].pow(2).sum().backward()
        found.append((x.grad, by.grad))
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or bits.equal(ours, theirs)
    assert (found[0][1] is None) == alone


def test_a_mode_a_fake_and_a_subclass_see_the_operator(scaled: GpuOperator) -> None:
    x, by = _pair()
    with Seen() as seen:
        scaled(x, by, 3.0)
    assert NAME in seen.names
    with FakeTensorMode():
        assert scaled(torch.empty(5, 7), None, 3.0)[0].shape == (5, 7)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert type(scaled(fake, None, 3.0)[0]) is type(fake)  # outside the mode


def test_compiled_code_keeps_one_operator(scaled: GpuOperator) -> None:
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(lambda x, by: scaled(x, by, 3.0)[0], backend=backend, fullgraph=True)
    x, by = _pair()
    assert bits.equal(compiled(x, by), scaled(x, by, 3.0)[0])
    assert any(NAME.replace("::", ".") in target for target in targets), targets


def test_an_operator_without_a_gradient_says_so() -> None:
    @gpu_operator("zeromismatch_test::flat")
    def flat(x: Tensor) -> Tensor:
        return x * 2

    x, _ = _pair(trains=True)
    with torch.no_grad():
        assert bits.equal(flat(x), x * 2)
    with pytest.raises(RuntimeError, match=r"zeromismatch_test\.flat"):
        flat(x).sum().backward()
