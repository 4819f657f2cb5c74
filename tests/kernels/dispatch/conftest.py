"""A contract of its own for each test, and an empty certificate folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from zeromismatch.kernels import bits, contract, dispatch
from zeromismatch.kernels.contract import Contract, Implementation
from zeromismatch.kernels.reference.gated import silu

Offer = Callable[..., Implementation]


@pytest.fixture
def certificate_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dispatch, "_CHOSEN", {})
    monkeypatch.setattr(dispatch, "_ADMITTED", {})
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # the candidates here are torch code; on a busy machine its threads wait
    yield tmp_path / "zero-mismatch" / "certificates"
    torch.set_num_threads(threads)


@pytest.fixture
def toy(certificate_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Contract:
    """SiLU under another id; it uses the cases of operator ``activation``."""
    monkeypatch.setattr(contract, "_CONTRACTS", dict(contract._CONTRACTS))
    monkeypatch.setattr(contract, "_IMPLEMENTATIONS", dict(contract._IMPLEMENTATIONS))
    return contract.register_contract(
        Contract(
            id="toy.silu.float32.cpu.v1",
            op="activation",
            dtype="float32",
            device="cpu",
            formula="x / (1 + exp(-x))",
            order="none",
            rounding="fp32",
            functions="exp.cpu.v1",
            reference="zeromismatch.kernels.reference.gated:silu",
            gradient_rtol=0.0,
        )
    )


@pytest.fixture
def offer(toy: Contract) -> Offer:
    def register(
        name: str,
        run: Callable[[torch.Tensor], torch.Tensor] = silu,
        missing: Callable[[], str | None] = lambda: None,
    ) -> Implementation:
        return contract.register_implementation(
            Implementation(contract=toy.id, name=name, run=run, missing=missing)
        )

    return register


@pytest.fixture
def one_bit_off() -> Callable[[torch.Tensor], torch.Tensor]:
    """SiLU with the lowest bit of one element flipped, in one row of a hundred."""

    def run(x: torch.Tensor) -> torch.Tensor:
        y = silu(x)
        if y.shape[0] >= 100:
            bits.int_view(y)[99, y.shape[1] // 2] ^= 1
        return y

    return run
