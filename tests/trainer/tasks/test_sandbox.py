"""Code in the sandbox can compute, and nothing else; without the filter nothing runs."""

import time
from pathlib import Path

import pytest

from zeromismatch.kernels.errors import BudgetError, CapabilityError
from zeromismatch.trainer.tasks import sandbox as module
from zeromismatch.trainer.tasks.sandbox import Sandbox


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(seconds=60.0)  # only what must hit the limit sets a shorter one


def test_it_computes(sandbox: Sandbox):
    ran = sandbox.run("import math\nfrom fractions import Fraction\nprint(math.gcd(84, 36))")
    assert (ran.output, ran.end) == ("12\n", "finished")


def test_an_exception_is_output_without_our_own_frames(sandbox: Sandbox):
    ran = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert ran.end == "failed"
    assert "ZeroDivisionError: division by zero" in ran.output
    assert 'File "<code>", line 2' in ran.output
    assert "sandbox_child" not in ran.output


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket()",
        "import os; os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.kill(1, 0)",
        "import os; os.listdir('/')",
        "import os; os.mkdir('/dev/shm/sandbox')",
        "open('/etc/hostname')",
        "open('/dev/shm/sandbox', 'w')",
    ],
)
def test_the_rest_of_the_machine_is_out_of_reach(code: str):
    """With the modules there, it is the filter that refuses: EPERM from the system call."""
    ran = Sandbox(seconds=60.0, preloaded=("socket", "os")).run(code)
    assert ran.end == "failed"
    assert "PermissionError: [Errno 1] Operation not permitted" in ran.output


def test_the_refused_calls_work_outside_the_sandbox(tmp_path: Path):
    """The control: what the test above refuses is possible here."""
    import os
    import socket

    with socket.socket() as made:
        assert made.fileno() >= 0
    (tmp_path / "file").write_text("here")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(99)"])
def test_wall_time_is_bounded(code: str):
    began = time.monotonic()
    assert Sandbox(seconds=0.3).run(code).end == "timeout"
    assert time.monotonic() - began < module.START_SECONDS


def test_closing_the_output_does_not_hide_it():
    import_time = "import os, time; os.close(1); os.close(2); time.sleep(99)"
    assert Sandbox(seconds=0.3, preloaded=("time",)).run(import_time).end == "timeout"


def test_memory_and_output_are_bounded(sandbox: Sandbox):
    assert "MemoryError" in sandbox.run("x = bytearray(1 << 31)").output
    ran = sandbox.run("while True: print('x' * 1000)")
    assert ran.end == "output"
    assert len(ran.output) == sandbox.characters
    assert "too much output" in ran.told()


def test_code_longer_than_a_pipe_arrives_whole(sandbox: Sandbox):
    code = "x = 0\n" + "x += 1\n" * 20_000 + "print(x)"
    assert sandbox.run(code).output == "20000\n"


def test_without_the_filter_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """On a machine for which there is no list of system calls."""
    text = module.CHILD.read_text().replace('"x86_64"', '"other"').replace('"aarch64"', '"more"')
    child = tmp_path / "child.py"
    child.write_text(text)
    monkeypatch.setattr(module, "CHILD", child)
    with pytest.raises(CapabilityError, match="could not confine itself"):
        Sandbox().run("print('ran')")


def test_a_sandbox_that_does_not_start_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    child = tmp_path / "child.py"
    child.write_text("while True: pass")
    monkeypatch.setattr(module, "CHILD", child)
    monkeypatch.setattr(module, "START_SECONDS", 0.2)
    with pytest.raises(BudgetError, match="did not start"):
        Sandbox().run("print('ran')")
