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


@pytest.mark.slow
def test_kernels_compute_their_formulas_under_the_interpreter():
    source = HERE.parents[2] / "src"
    run = subprocess.run(
        [sys.executable, str(HERE / "interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split("\n")[:3] == ["products ok", "row_operators ok", "attentions ok"]
