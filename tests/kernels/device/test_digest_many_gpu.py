"""Digests of many tensors in one launch: the definition's values; elements that are no number."""

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.gpu.digest_many import digest_many
from zeromismatch.model_recipes.state import Digests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_many_tensors_have_the_digests_that_each_has_on_a_cpu(dtype: torch.dtype) -> None:
    shapes = [(1,), (3, 5), (576, 1536), (49152, 64), (1024 * 16,), (1024 * 16 + 1,), (7, 1, 2)]
    tensors = {
        str(shape): torch.randint(0, 200, shape, device="cuda").to(dtype) for shape in shapes
    }
    tensors["off"] = tensors["(49152, 64)"][1:].view(-1)[1:]  # begins at no multiple of 16 bytes
    found = Digests(tensors).read()
    assert found == {name: bits.digest_tensor(each.cpu()) for name, each in tensors.items()}


def test_elements_that_are_no_number_are_counted_in_the_same_pass() -> None:
    x = [torch.ones(5000, dtype=dtype, device="cuda") for dtype in (torch.bfloat16, torch.float32)]
    x[0][4999], x[0][17], x[1][1024] = float("nan"), float("inf"), -float("inf")
    assert digest_many(x, torch.device("cuda", 0)).read()[1] == [2, 1]
