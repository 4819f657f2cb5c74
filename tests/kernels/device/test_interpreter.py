"""The GPU kernels' logic under Triton's interpreter, in a process of its own (a switch read at
import).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).resolve().parent


def interpreted(script: str) -> list[str]:
    """Lines that a script of this folder prints under the interpreter."""
    run = subprocess.run(
        [sys.executable, str(HERE / script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[2] / "src")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()


@pytest.mark.slow
def test_kernels_compute_their_formulas_under_the_interpreter():
    assert interpreted("interpreted.py")[:3] == ["products ok", "row_operators ok", "attentions ok"]


@pytest.mark.slow
def test_experts_compute_their_formulas_under_the_interpreter():
    assert interpreted("interpreted_experts.py") == ["experts ok"]


@pytest.mark.slow
def test_recurrences_compute_their_formulas_under_the_interpreter():
    assert interpreted("interpreted_recurrent.py") == ["recurrences ok"]
