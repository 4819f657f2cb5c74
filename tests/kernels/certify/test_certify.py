"""The sweep: admits every implementation of the core, and sees every planted fault."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from zeromismatch.kernels import adversarial, bits, certify, dispatch
from zeromismatch.kernels import contract as contract_module
from zeromismatch.kernels.certificates import Certificate
from zeromismatch.kernels.contract import (
    Implementation,
    contracts,
    get_contract,
    implementations,
    register_contract,
    register_implementation,
)
from zeromismatch.kernels.errors import CapabilityError, InconclusiveError
from zeromismatch.kernels.trial import Case, Trial, variations

certify.load_operators()
CPU_CONTRACTS = [contract.id for contract in contracts(device="cpu")]
LINEAR = "linear.chain.float32.cpu.v1"


@pytest.fixture(autouse=True)
def own_folder_and_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dispatch, "_CHOSEN", {})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def candidate_of(contract_id: str) -> Implementation:
    return next(each for each in implementations(contract_id) if each.missing() is None)


def judged(contract_id: str, run: Callable[..., object]) -> Certificate:
    candidate = Implementation(contract=contract_id, name="planted", run=run)
    return certify.prove(get_contract(contract_id), [candidate], quick=True)[0]


@pytest.mark.parametrize("contract_id", CPU_CONTRACTS)
def test_quick_sweep_admits_the_core_and_no_flipped_bit(contract_id: str) -> None:
    contract = get_contract(contract_id)
    able = [each for each in implementations(contract_id) if each.missing() is None]
    proved = certify.prove(
        contract, able, quick=True, controls=[certify._one_bit_in_a_row(able[0])]
    )
    for certificate in proved[:-1]:
        assert certificate.admitted, certificate.reason
        assert certificate.differing == 0
        assert certificate.elements > 500
    assert not proved[-1].admitted
    assert proved[-1].differing == 1


def test_full_sweep_of_linear_refuses_stock_torch_and_stores_the_rest(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    results = certify.certify(LINEAR, progress=lambda *each: seen.append(each))
    controls = {each.implementation: each for each in results if each.role == "red-control"}
    assert set(controls) == {"one-bit-in-one-row", "stock-torch"}
    assert controls["one-bit-in-one-row"].differing == 1
    assert controls["stock-torch"].differing > 0
    candidates = [each for each in results if each.role == "candidate"]
    assert all(each.admitted and each.elements > 500_000 for each in candidates)
    assert len(seen) == len(candidates[0].cases) == 25
    assert seen[0] == (f"{LINEAR}: rows 1, 576 to 64", 0, 1)
    stored = dispatch.certificates()
    assert {each.implementation for each in stored} == {each.implementation for each in candidates}
    assert not any(each.quick for each in stored)
    assert json.loads(candidates[0].model_dump_json())["contract"] == LINEAR


def test_stock_linear_depends_on_its_row_count() -> None:
    """Why stock torch is the red control: it differs from itself, not only from the reference."""
    x, weight = adversarial.rows(64, 576, seed=1), adversarial.rows(96, 576, seed=2, scale=0.1)
    together = functional.linear(x, weight)
    alone = torch.cat([functional.linear(x[row : row + 1], weight) for row in range(64)])
    assert not bits.equal(together, alone)


@pytest.mark.parametrize("fault", ["descending", "halves", "early bias", "one rounding more"])
def test_another_order_or_rounding_of_a_product_is_refused(fault: str) -> None:
    good = candidate_of(LINEAR).run

    def run(
        x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
    ) -> Tensor:
        if fault == "descending":
            return good(x.flip(1).contiguous(), weight.flip(1).contiguous(), bias, out_dtype)
        if fault == "halves":
            half = x.shape[1] // 2
            left = good(x[:, :half].contiguous(), weight[:, :half].contiguous(), None, out_dtype)
            right = good(x[:, half:].contiguous(), weight[:, half:].contiguous(), bias, out_dtype)
            return left + right
        if fault == "early bias" and bias is not None:
            ones = torch.ones(x.shape[0], 1)
            widened = torch.cat((bias[:, None], weight), dim=1)
            return good(torch.cat((ones, x), dim=1), widened, None, out_dtype)
        y = good(x, weight, bias, out_dtype)
        return y.bfloat16().to(y.dtype) if fault == "one rounding more" else y

    assert "differs from the reference" in str(judged(LINEAR, run).reason)


def test_a_kernel_that_reads_masked_keys_is_refused() -> None:
    contract_id = "attention.pages16.float32.cpu.v1"
    good = candidate_of(contract_id).run

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> object:
        out, *others = good(q, k, v, *rest)
        block_table = rest[2]
        assert isinstance(block_table, Tensor)
        last = v[block_table[0, -1].long()].sum() * 0.0  # 0 times NaN
        return (out + last, *others)

    assert "differs from the reference" in str(judged(contract_id, run).reason)


def test_a_sweep_that_admits_a_red_control_is_inconclusive() -> None:
    contract, good = get_contract(LINEAR), candidate_of(LINEAR)
    with pytest.raises(InconclusiveError, match="sees no differing bit in core"):
        certify.prove(contract, [good], quick=True, controls=[good])

    def broken(*arguments: object) -> Tensor:
        raise RuntimeError("out of memory")

    control = Implementation(contract=LINEAR, name="broken", run=broken)
    with pytest.raises(InconclusiveError, match="sees no differing bit in broken"):
        certify.prove(contract, [good], quick=True, controls=[control])


def test_a_sweep_without_cases_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "cases_of", lambda *_, **__: iter(()))
    with pytest.raises(InconclusiveError, match="has no cases"):
        certify.prove(get_contract(LINEAR), [candidate_of(LINEAR)], quick=True)


def test_seeds_change_the_data_and_repeat_it() -> None:
    contract, good = get_contract("activation.silu.float32.cpu.v1"), candidate_of(LINEAR)
    good = candidate_of(contract.id)
    digests = [
        certify.prove(contract, [good], quick=True, seed=seed)[0].output_digest
        for seed in (3, 3, 4)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_thread_counts_are_tried_and_restored() -> None:
    seen = []

    def run(x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return x * 2

    case = Case(label="one", arguments=(torch.ones(2, 3),), rows=(0,))
    trial = Trial(implementation=Implementation(contract="-", name="-", run=run))
    trial.run_case(case, [torch.full((2, 3), 2.0)], quick=False)
    assert trial.reason is None
    assert {1, 2, 3} <= set(seen)
    assert torch.get_num_threads() == 1


def test_variations_of_a_case_keep_each_row_with_its_output() -> None:
    x, y = torch.randn(9, 4), torch.randn(9, 2)
    case = Case(label="two", arguments=(x, y, 3.0), rows=(0, 1))
    labels = []
    for variation in variations(case, [x.sum(1)], quick=True):
        labels.append(variation.label)
        got = variation.arguments[0].sum(1)
        got = got if variation.kept is None else got[variation.kept]
        assert bits.equal(got, variation.expected[0]), variation.label
        assert variation.arguments[2] == 3.0
    assert "rows shuffled" in labels
    assert "NaN in neighbouring rows" in labels


def test_adversarial_rows_show_a_changed_order() -> None:
    """Against adversarial data most outputs change with the order; against normal data fewer do."""
    weight = adversarial.rows(32, 576, seed=5, scale=0.1)

    def changed(x: Tensor) -> float:
        good = candidate_of(LINEAR).run
        forward = good(x, weight, None, None)
        backward = good(x.flip(1).contiguous(), weight.flip(1).contiguous(), None, None)
        return float((bits.int_view(forward) != bits.int_view(backward)).double().mean())

    for kind in adversarial.KINDS:
        assert changed(adversarial.rows(16, 576, seed=6, kind=kind)) > 0.8
    bf16 = adversarial.rows(16, 576, seed=6, kind="cancelling").bfloat16()
    assert bool(torch.isfinite(bf16).all())


def test_misaligned_copies_hold_the_same_bits() -> None:
    x = adversarial.rows(5, 7, seed=1)
    shifted = adversarial.misaligned(x)
    assert bits.equal(x, shifted)
    assert shifted.data_ptr() % 16 == 4
    assert shifted.is_contiguous()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_contract_of_another_machine_is_refused() -> None:
    with pytest.raises(CapabilityError, match="it is about sm90, and here is cpu"):
        certify.certify(["rmsnorm.lanes.bfloat16.sm90.v1"], quick=True)


def test_a_contract_that_nothing_here_can_run_is_left_out_with_the_reason() -> None:
    contract = dataclasses.replace(get_contract(LINEAR), id="linear.absent.float32.cpu.v1")
    register_contract(contract)
    absent = Implementation(
        contract=contract.id, name="absent", run=print, missing=lambda: "its library is not here"
    )
    register_implementation(absent)
    try:
        able, left_out = certify.wanted()
        assert left_out == {contract.id: "its library is not here"}
        assert {each.id for each in able} == set(CPU_CONTRACTS)
        with pytest.raises(CapabilityError, match=r"absent.*its library is not here"):
            certify.certify([contract.id], quick=True)
    finally:
        contract_module._CONTRACTS.pop(contract.id)
        contract_module._IMPLEMENTATIONS.pop(contract.id)


def test_processes_side_by_side_give_the_certificates_of_one() -> None:
    ids = [f"{name}.float32.cpu.v1" for name in ("activation.silu", "decay", "gated.silu")]
    told: list[tuple[str, int, int]] = []
    both = [
        certify.certify(ids, quick=True, jobs=jobs, progress=lambda *said: told.append(said))
        for jobs in (1, 2)
    ]
    seen = [
        [(each.contract, each.implementation, each.output_digest) for each in one] for one in both
    ]
    assert seen[0] == seen[1]
    assert told[-1][1:] == (len(ids), len(ids))


def test_the_first_sweep_of_a_process_has_the_stock_operator_as_a_control() -> None:
    script = (
        "from zeromismatch.kernels import certify, contract\n"
        "certify.load_operators()\n"
        f"found = contract.get_contract({LINEAR!r})\n"
        f"controls = certify._controls(found, contract.implementations({LINEAR!r}))\n"
        "print(*[each.name for each in controls])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["one-bit-in-one-row", "stock-torch"]
