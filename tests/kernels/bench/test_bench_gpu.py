"""The GPU's table: every row names a contract, and on a GPU both sides compute the same thing."""

import pytest
import torch

from zeromismatch.kernels.bench import bench
from zeromismatch.kernels.bench_works_gpu import works_gpu
from zeromismatch.kernels.contract import get_contract
from zeromismatch.kernels.errors import CapabilityError


def test_every_row_names_a_contract_of_its_operator() -> None:
    rows = list(works_gpu())
    assert {row.op for row in rows} >= {"linear", "attention", "rmsnorm", "gated", "logprob"}
    for row in rows:
        assert row.contract is not None
        assert get_contract(row.contract).op == row.op


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(CapabilityError, match="no GPU benchmark"):
        bench("cuda", quick=True)


@pytest.mark.gpu
def test_both_sides_compute_the_same_thing() -> None:
    for row in works_gpu():
        ours, stock = row.prepare()
        mine, true = ours(), stock()
        mine = mine[0] if isinstance(mine, tuple) else mine
        assert isinstance(mine, torch.Tensor)
        assert isinstance(true, torch.Tensor)
        if row.op == "attention":
            true = true[0].transpose(0, 1)
        error = (mine.double() - true.double().reshape(mine.shape)).norm()
        assert error <= 2e-2 * true.double().norm(), row
