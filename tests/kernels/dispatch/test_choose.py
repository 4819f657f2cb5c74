"""Only an implementation that proved its bits on this machine serves; the fastest of those."""

import statistics
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from zeromismatch.kernels import bits, certificates, certify, dispatch
from zeromismatch.kernels.contract import Contract, Implementation
from zeromismatch.kernels.errors import ContractError, NotCertifiedError
from zeromismatch.kernels.reference.gated import silu
from zeromismatch.kernels.trial import Case, Trial

Offer = Callable[..., Implementation]
Run = Callable[[torch.Tensor], torch.Tensor]


def refused(toy: Contract) -> str:
    """Choose, expect the reference to serve, and return the first word of the first warning."""
    with pytest.warns(RuntimeWarning) as caught:
        assert dispatch.choose(toy.id).name == "reference"
    assert f"may not serve {toy.id}" in str(caught[0].message)
    return str(caught[0].message).split()[0]


def test_first_use_proves_and_stores(toy: Contract, offer: Offer, certificate_folder: Path) -> None:
    good = offer("good")
    assert dispatch.choose(toy.id) is good
    (path,) = certificate_folder.glob("*.json")
    certificate = certificates.read(path)
    assert isinstance(certificate, certificates.Certificate)
    assert certificate.admitted
    assert certificate.elements > 30_000
    assert certificate.differing == 0
    assert not list(certificate_folder.glob(".*.tmp"))


def test_a_stored_certificate_saves_the_sweep(
    toy: Contract, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = offer("good")
    dispatch.choose(toy.id)
    dispatch.forget()
    monkeypatch.setattr(certify, "prove", None)
    assert dispatch.choose(toy.id) is good


def test_one_bit_in_one_row_of_a_hundred_is_refused_and_named(
    toy: Contract, offer: Offer, one_bit_off: Run
) -> None:
    offer("bad", one_bit_off)
    good = offer("good")
    with pytest.warns(
        RuntimeWarning, match=r"bad may not serve toy\.silu.* rows 130.* at \[99, "
    ) as caught:
        assert dispatch.choose(toy.id) is good
    assert len(caught) == 1
    refusal = next(each for each in dispatch.certificates() if each.implementation == "bad")
    assert not refusal.admitted
    assert refusal.differing == 1
    assert "1 ulp" in str(refusal.first_difference)


def test_the_reference_serves_when_nothing_else_may(
    toy: Contract, offer: Offer, one_bit_off: Run
) -> None:
    offer("bad", one_bit_off)
    offer("elsewhere", missing=lambda: "it needs a GPU")
    with pytest.warns(RuntimeWarning) as caught:
        chosen = dispatch.choose(toy.id)
    assert chosen.name == "reference"
    last = str(caught[-1].message)
    assert "bad: refused" in last
    assert "elsewhere: it needs a GPU" in last
    x = torch.randn(5, 7)
    assert bits.equal(chosen.run(x), silu(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.choose(toy.id) is chosen  # said once


def test_what_the_reference_cannot_serve_is_refused_instead(
    toy: Contract, offer: Offer, one_bit_off: Run
) -> None:
    offer("bad", one_bit_off)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(NotCertifiedError, match=r"none of bad gave .* `zm kernels certify toy"),
    ):
        dispatch.first_admitted(toy.id, "bad")
    offer("good")
    dispatch.forget()
    with pytest.warns(RuntimeWarning, match="bad may not serve"):
        assert dispatch.first_admitted(toy.id, "bad", "good") == "good"


def test_a_choice_taken_over_is_admitted_and_no_other(toy: Contract, offer: Offer) -> None:
    offer("good")
    offer("fine")
    dispatch.adopt(toy.id, "good")
    assert dispatch.first_admitted(toy.id, "fine", "good") == "good"


@pytest.mark.parametrize(
    "fault", ["raises", "wrong dtype", "two outputs", "changes its input", "unwritten"]
)
def test_other_faults_are_refused(toy: Contract, offer: Offer, fault: str) -> None:
    def run(x: torch.Tensor) -> object:
        y = silu(x)
        if fault == "raises":
            raise RuntimeError("illegal memory access")
        if fault == "wrong dtype":
            return y.double()
        if fault == "two outputs":
            return y, y
        if fault == "changes its input":
            x.add_(1.0)
        if fault == "unwritten":
            out = torch.empty_like(y)
            out[:-1] = y[:-1]
            return out
        return y

    offer("faulty", run)
    assert refused(toy) == "faulty"


@pytest.mark.parametrize("dependence", ["row count", "row order", "neighbour", "alignment"])
def test_dependence_on_anything_but_the_row_is_refused(
    toy: Contract, offer: Offer, dependence: str
) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = silu(x)
        triggered = {
            "row count": x.shape[0] == 1,
            "row order": x.shape[0] > 1 and bool(x[0].abs().max() < x[-1].abs().max()),
            "neighbour": bool(x[1:2].isnan().any()),
            "alignment": x.data_ptr() % 16 != 0 and x.shape[0] > 100,
        }[dependence]
        if triggered:
            bits.int_view(y)[0, 0] ^= 1
        return y

    offer("dependent", run)
    assert refused(toy) == "dependent"


def test_the_fastest_admitted_serves(toy: Contract, offer: Offer) -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            y = silu(x)
        return y

    offer("slow", slow)
    fast = offer("fast")
    assert dispatch.choose(toy.id) is fast


def test_registration_breaks_ties(
    toy: Contract, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {"slow": 200, "first": 109, "second": 100}

    def measured(trial: Trial, case: Case) -> None:
        trial.speed_ns = speeds[trial.implementation.name]

    monkeypatch.setattr(Trial, "measure", measured)
    offered = [offer(name) for name in speeds]
    assert dispatch.choose(toy.id) is offered[1]


def test_each_key_is_proved_on_its_own(
    toy: Contract, offer: Offer, certificate_folder: Path
) -> None:
    offer("good")
    dispatch.choose(toy.id)
    dispatch.choose(toy.id, (64, 128))
    keys = {each.key for each in dispatch.certificates()}
    assert keys == {(), (64, 128)}


def test_nothing_is_proved_inside_a_graph_capture(
    toy: Contract, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = offer("good")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotCertifiedError, match="before capturing"):
        dispatch.choose(toy.id)
    monkeypatch.undo()
    dispatch._CHOSEN[(toy.id, ())] = good
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert dispatch.choose(toy.id) is good


def test_unknown_contracts_and_operators_without_cases_are_refused(
    toy: Contract, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ContractError, match="unknown contract"):
        dispatch.choose("linear.chain.float32.cpu.v0")
    offer("good")
    certify.cases_of(toy, quick=True, seed=0)
    monkeypatch.setattr(certify, "_CASES", {})
    with pytest.raises(ContractError, match="no cases are registered"):
        dispatch.choose(toy.id)


def test_an_unwritable_folder_is_said_and_survived(
    toy: Contract, offer: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    good = offer("good")
    with pytest.warns(RuntimeWarning, match="cannot store a certificate"):
        assert dispatch.choose(toy.id) is good


def test_threads_that_ask_at_once_prove_once(
    toy: Contract, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, calls, prove = offer("good"), [], certify.prove

    def counted(*arguments: object, **options: object) -> object:
        calls.append(1)
        return prove(*arguments, **options)

    monkeypatch.setattr(certify, "prove", counted)
    chosen = []
    threads = [
        threading.Thread(target=lambda: chosen.append(dispatch.choose(toy.id))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen == [good] * 4
    assert len(calls) == 1


def test_modes_of_the_caller_do_not_reach_the_sweep(toy: Contract, offer: Offer) -> None:
    class Audit(TorchFunctionMode):
        def __torch_function__(self, function: object, *_: object) -> object:
            raise AssertionError(f"{function} is not an operator of the model")

    good = offer("good")
    with torch.device("meta"), Audit():
        assert dispatch.choose(toy.id) is good


def test_choosing_again_is_a_lookup(toy: Contract, offer: Offer) -> None:
    offer("good")
    dispatch.choose(toy.id)
    times = []
    for _ in range(50):
        started = time.perf_counter_ns()
        for _ in range(100):
            dispatch.choose(toy.id)
        times.append((time.perf_counter_ns() - started) / 100)
    assert statistics.median(times) < 5_000  # nanoseconds; about 100 in practice
