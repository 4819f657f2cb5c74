"""What ``zm`` prints where, and what it returns: one answer on stdout, the rest on stderr."""

import errno
import json
import subprocess
import sys

import pytest

from zeromismatch.agent_tools import doctor
from zeromismatch.agent_tools.cli import run
from zeromismatch.kernels import errors

ENTRY = "from zeromismatch.agent_tools.cli import main; main()"


def failing(error: BaseException):
    def examine() -> None:
        print("a library that prints to stdout")
        raise error

    return examine


def error_classes() -> list[type[errors.ZeroMismatchError]]:
    found = [errors.ZeroMismatchError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return [cls for cls in found if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("error", error_classes(), ids=lambda cls: cls.__name__)
def test_every_error_of_ours_has_its_exit_code_and_document(
    error: type[errors.ZeroMismatchError],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(doctor, "examine", failing(error("it broke; do this next")))
    assert run(["doctor", "--json"]) == error.exit_code
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "schema_version": 1,
        "error": {
            "type": error.__name__,
            "message": "it broke; do this next",
            "exit_code": error.exit_code,
        },
    }
    assert "zm: it broke; do this next" in err
    assert "a library that prints to stdout" in err


def test_all_exit_codes_are_reachable():
    assert {cls.exit_code for cls in error_classes()} == {2, 3, 4, 5, 70}


def test_without_json_an_error_leaves_stdout_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(doctor, "examine", failing(errors.UsageError("no")))
    assert run(["doctor"]) == 2
    assert capsys.readouterr().out == ""


def test_an_unexpected_error_is_our_fault_and_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(doctor, "examine", failing(KeyError("lost")))
    assert run(["doctor", "--json"]) == 70
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["exit_code"] == 70
    assert "Traceback" in err
    assert "KeyError" in err


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "examine", failing(KeyboardInterrupt()))
    assert run(["doctor"]) == 130


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, 4), (errno.EDQUOT, 4), (errno.EIO, 70)]
)
def test_a_full_disk_is_a_missing_capability(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(doctor, "examine", failing(OSError(number, "no", "trace.bin")))
    assert run(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == code


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["doctor", "--nonsense"], ["kernels"], ["kernels", "nonsense"], ["fetch"]],
    ids=" ".join,
)
def test_unusable_arguments_are_2_with_one_document(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
):
    assert run([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["exit_code"] == 2
    assert "zm --help" in err


def test_help_goes_to_stdout_and_is_0(capsys: pytest.CaptureFixture[str]):
    for arguments in ([], ["--help"], ["kernels", "--help"], ["doctor", "--help"]):
        assert run(arguments) == 0
        assert capsys.readouterr().out.startswith("Usage: zm")


def test_doctor_is_4_when_something_required_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    missing = doctor.Check(name="torch", status="missing", detail="absent", remedy="install it")
    monkeypatch.setattr(doctor, "links_check", lambda: missing)
    assert run(["doctor", "--json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["usable"] is False
    assert run(["doctor"]) == 4
    assert "NOT usable" in capsys.readouterr().out


def test_doctor_answers_in_one_document(capsys: pytest.CaptureFixture[str]):
    run(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert {"versions", "devices", "switches", "checks", "usable"} <= set(document)


def test_text_has_no_colour_outside_a_terminal(capsys: pytest.CaptureFixture[str]):
    run(["doctor"])
    assert "\x1b" not in capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-c", ENTRY, "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait() in (0, 4)


def test_the_script_returns_the_exit_code_of_the_command():
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, "fetch", "nonsense", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["type"] == "UsageError"
