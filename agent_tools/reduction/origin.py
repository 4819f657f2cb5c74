"""Where a repro was made: what may decide its bits beside what the file holds.

    environment(Flags.now())    ->  {"cpu": "AVX2", "machine": "x86_64", "threads": "1", ...}
    revision()                  ->  "10e7fc3..." or None outside a repository
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from .case import Flags

SWITCHES = ("OMP_NUM_THREADS", "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")


def environment(flags: Flags) -> dict[str, str]:
    """Switches that are set, the processor, and the process' own flags."""
    return {name: os.environ[name] for name in SWITCHES if name in os.environ} | {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": str(flags.threads),
        "onednn": str(flags.onednn).lower(),
    }


def revision() -> str | None:
    """The commit of this code, where it lies in a repository."""
    git = shutil.which("git")
    if git is None:
        return None
    found = subprocess.run(
        [git, "rev-parse", "HEAD"], cwd=Path(__file__).resolve().parent, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    return found.stdout.strip() or None
