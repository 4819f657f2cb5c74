"""Run by ``test_interpreter.py`` under TRITON_INTERPRET=1: mixtures of experts.

``interpreted.py`` does the rest.
"""

import interpreted  # sets the interpreter up
import torch

from zeromismatch.kernels import bits, cases_moe
from zeromismatch.kernels.moe import gpu
from zeromismatch.kernels.moe import gpu_launch as launch
from zeromismatch.kernels.reference import moe as reference

near = interpreted.near


def routing() -> None:
    for experts, top_k, groups, kept, sigmoid in (
        (16, 4, 1, 1, False), (16, 4, 4, 2, True), (20, 3, 1, 1, False),
    ):  # fmt: skip
        z = torch.randn(11, experts)
        z[1::3] = z[1::3].round()  # ties
        bias = torch.randn(experts) * 0.1 if sigmoid else None
        chosen = launch.topk(z, bias, top_k, groups, kept, sigmoid)
        assert bits.equal(chosen, reference.topk(z, bias, top_k, groups, kept, sigmoid))
        options = (sigmoid, True, 1e-20 if sigmoid else 0.0, 2.5 if sigmoid else 1.0)
        near(
            launch.topk_weights(z, chosen, *options),
            reference.topk_weights(z, chosen, *options),
            1e-5,
        )
        for odd in (float("nan"), float("inf"), -float("inf")):
            ill = z.clone()
            ill[4, 2] = odd
            picked = launch.topk(ill, bias, top_k, groups, kept, sigmoid)
            assert int(picked.min()) >= 0
            assert int(picked.max()) < experts
            weights = launch.topk_weights(ill, picked, sigmoid, False, 0.0, 1.0)
            assert torch.isnan(weights).all(1).nonzero().flatten().tolist() == [4]
        d = torch.randn(11, top_k)
        near(
            launch.topk_weights_grad(d, z, chosen, *options),
            reference.topk_weights_grad(d, z, chosen, *options),
            1e-5,
        )


def products() -> None:
    for tokens, experts, top_k, inputs, outputs in ((11, 16, 4, 40, 24), (1, 32, 4, 33, 20)):
        chosen = cases_moe.chosen(tokens, experts, top_k, 3)
        weight, g = torch.randn(experts, outputs, inputs), torch.randn(tokens, top_k, outputs)
        for x in (torch.randn(tokens, inputs), torch.randn(tokens, top_k, inputs)):
            near(
                gpu.grouped_linear(x, chosen, weight),
                reference.grouped_linear(x, chosen, weight),
                1e-6,
            )
            start = torch.randn_like(weight)
            total = start.clone()
            for mine, true in zip(
                gpu.grouped_linear_grad(g, x, chosen, weight, total, total),
                reference.grouped_linear_grad(g, x, chosen, weight, start),
                strict=True,
            ):
                near(mine, true, 1e-6)
        y, weights = torch.randn(tokens, top_k, 33), torch.randn(tokens, top_k)
        up = torch.randn(tokens, 33)
        near(gpu.combine(y, weights), reference.combine(y, weights), 1e-6)
        for mine, true in zip(
            launch.combine_grad(up, y, weights), reference.combine_grad(up, y, weights), strict=True
        ):
            near(mine, true, 1e-6)


routing()
products()
print("experts ok")
