"""A fault's repro as a process of its own: what it says, and what it costs.

    write_repro_of("B02", model, folder)   # "operator", or "engines" where no operator shows it
    run_alone(folder)                      # Alone(exit_code=1, seconds=2.9, cpu_seconds=2.7, ...)

A fault of a kernel is cut down to one call of one operator. What a call alone does not show (state,
a publication, a certificate, a kernel that does not repeat itself) runs the engines on few tokens.
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

from ...kernels.errors import InconclusiveError
from ...model_recipes.models import LoadedModel
from ..localize import Options, localize
from ..records import Record
from ..reduction.whole import write_whole_repro
from ..repro import write_repro
from ..sides import Runner, Side
from .catalogue import Fault, fault_named, plant
from .checking import fault_requests
from .kernels import KERNELS

MAX_SECONDS, MAX_BYTES = 10.0, 5_000_000
"""What a repro of any planted fault may take."""
SHRINKING = 10.0

Kind = Literal["operator", "engines"]


class Alone(Record):
    """One repro, run once. ``cpu_seconds`` hardly depends on who else uses the machine."""

    exit_code: int
    seconds: float
    cpu_seconds: float
    bytes: int
    said: str

    @property
    def within(self) -> bool:
        """A mismatch, quickly, in little space."""
        return self.exit_code == 1 and self.seconds < MAX_SECONDS and self.bytes < MAX_BYTES


def write_repro_of(name: str, model: LoadedModel, folder: Path) -> Kind:
    """Write the smallest repro of a planted fault."""
    fault = fault_named(name)
    if name in KERNELS:
        try:
            _write_operator(fault, model, folder)
        except InconclusiveError:
            pass  # nothing that one call shows
        else:
            return "operator"
    sides = Side.parse(fault.sides[0]), Side.parse(fault.sides[1])
    write_whole_repro(folder, *sides, model, fault_requests(model), fault=name, seconds=SHRINKING)
    return "engines"


def _write_operator(fault: Fault, model: LoadedModel, folder: Path) -> None:
    sides = Side.parse(fault.sides[0]), Side.parse(fault.sides[1])
    requests, options = fault_requests(model), Options(self_test=False)
    with plant(fault.id, model):
        left, right = (
            Runner(side=side, model=model, requests=requests, plan="aligned") for side in sides
        )
        found = localize(*sides, model, requests, plan="aligned", options=options)
        write_repro(folder, left, right, found, fault=fault.id, seconds=SHRINKING)


def run_alone(folder: Path) -> Alone:
    """Run a repro's file in a process of its own, with one thread."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "repro.py"], cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Alone(
        exit_code=done.returncode,
        seconds=seconds,
        cpu_seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        bytes=size_of(folder),
        said=(done.stdout or done.stderr).strip(),
    )


def size_of(folder: Path) -> int:
    """Bytes of a repro's files."""
    return sum(file.stat().st_size for file in folder.iterdir())
