"""Stored certificates: which hold, and why the others do not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zeromismatch.kernels import certificates, certify, dispatch
from zeromismatch.kernels.contract import Contract, Implementation
from zeromismatch.kernels.errors import DiskError

Offer = Callable[..., Implementation]
Run = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def stored(toy: Contract, offer: Offer, certificate_folder: Path) -> Path:
    offer("good")
    dispatch.choose(toy.id)
    dispatch.forget()
    (path,) = certificate_folder.glob("*.json")
    return path


def status_of(name: str) -> tuple[str, str]:
    found = next(each for each in dispatch.recheck() if each.file == name)
    return found.status, str(found.reason)


def test_a_fresh_certificate_is_valid_also_when_repeated(stored: Path) -> None:
    assert status_of(stored.name)[0] == "valid"
    assert [each.status for each in dispatch.recheck(rerun=True)] == ["valid"]
    assert [each.implementation for each in dispatch.certificates()] == ["good"]


@pytest.mark.parametrize(
    ("field", "value"), [("torch", "9.9"), ("processor", "another"), ("features", "0000")]
)
def test_another_environment_voids_it(
    stored: Path, toy: Contract, monkeypatch: pytest.MonkeyPatch, field: str, value: str
) -> None:
    changed = certificates.environment("cpu").model_copy(update={field: value})
    monkeypatch.setattr(certificates, "environment", lambda device: changed)
    status, reason = status_of(stored.name)
    assert status == ("void" if field == "torch" else "foreign")
    assert "9.9" in reason or "another machine" in reason
    assert dispatch.certificates() == []
    dispatch.choose(toy.id)
    assert len(dispatch.certificates()) == 1  # proved again


def test_changed_code_voids_it(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "library_digest", lambda: "another build")
    assert status_of(stored.name) == ("void", "the core code changed")


def test_a_refusal_is_kept_as_such(toy: Contract, offer: Offer, one_bit_off: Run) -> None:
    offer("bad", one_bit_off)
    with pytest.warns(RuntimeWarning):
        dispatch.choose(toy.id)
    (found,) = dispatch.recheck()
    assert found.status == "refused"
    assert "differs from the reference" in str(found.reason)
    assert found.to_dict()["implementation"] == "bad"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a certificate"),
        ("{", "not a certificate"),
        ("[1, 2]", "not a certificate"),
        ('{"contract": "x"}', "not a certificate"),
        ("\udcff\udcfe", "not a certificate"),
    ],
)
def test_damaged_files_are_ignored_and_named(
    stored: Path, toy: Contract, text: str, reason: str
) -> None:
    stored.write_bytes(text.encode(errors="surrogateescape"))
    status, why = status_of(stored.name)
    assert status == "unreadable"
    assert reason in why
    assert dispatch.choose(toy.id).name == "good"
    assert status_of(stored.name)[0] == "valid"  # proved and replaced


def test_a_certificate_under_another_name_is_ignored(stored: Path) -> None:
    other = stored.with_name(stored.name.replace("good", "better"))
    other.write_bytes(stored.read_bytes())
    status, reason = status_of(other.name)
    assert status == "unreadable"
    assert "not to its file name" in reason


def test_a_newer_schema_is_ignored(stored: Path) -> None:
    stored.write_text(stored.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    assert status_of(stored.name) == ("unreadable", "has schema version 2, not 1")


def test_certificates_of_unknown_names_are_foreign(stored: Path, toy: Contract) -> None:
    certificate = certificates.read(stored)
    assert isinstance(certificate, certificates.Certificate)
    gone = certificate.model_copy(update={"implementation": "gone"})
    path = certificates.save(gone, toy)
    assert status_of(path.name) == ("foreign", "no implementation gone is registered")


def test_a_rerun_finds_an_implementation_that_turned_bad(
    stored: Path, toy: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove = certify.prove

    def proving(*arguments: object, **options: object) -> list[certificates.Certificate]:
        changed = {"output_digest": "0" * 32}
        return [each.model_copy(update=changed) for each in prove(*arguments, **options)]

    monkeypatch.setattr(certify, "prove", proving)
    (found,) = dispatch.recheck(rerun=True)
    assert (found.status, found.reason) == ("void", "the reference gives other outputs now")


def test_a_full_disk_leaves_nothing_half_written(
    stored: Path, toy: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored.read_bytes()
    certificate = certificates.read(stored)
    assert isinstance(certificate, certificates.Certificate)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(certificates.os, "replace", full)
    with pytest.raises(DiskError, match=r"No space left on device.*XDG_CACHE_HOME"):
        certificates.save(certificate.model_copy(update={"seed": 9}), toy)
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]
    assert stored.read_bytes() == before
