"""One training run under faults, each followed by resuming: which weights does it end with?

    python benchmarks/training_gpu_faults.py --model FOLDER --out DIR --reference RUNS.jsonl

The run of ``training_gpu.py``, a checkpoint every five updates, is met by, one after the other:

    worker     the rollout worker is killed (SIGKILL); the run goes on by itself
    learner    the learner is killed; the run is resumed
    both       learner and worker are killed at once; the run is resumed
    memory     the learner is left three quarters of the GPU memory that a step takes beyond what
               stays; the run ends with an error and is resumed, as that says, with fewer rows in
               a micro-batch
    stopped    the worker is stopped (SIGSTOP) and never answers again; the run ends with an error
               and is resumed

What must come of it: every update has the weights of the run that met nothing (``--reference``:
its records, a ``run`` named ``--of``, or its folder), and no audited token differs. The report is
``faults.json`` of DIR, written anew after each fault; ``--seconds`` bounds all of it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("training_gpu.py")
FAULTS = ("worker", "learner", "both", "memory", "stopped")
APART = 8
"""Updates between two faults."""
POLL = 0.05


@dataclass(kw_only=True)
class Run:
    """The run, part by part. command: of every part. deadline: of all of them."""

    folder: Path
    command: list[str]
    deadline: float
    met: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    part: "subprocess.Popen[bytes] | None" = None
    parts: int = 0

    def begin(self, *more: str) -> None:
        """Start the run, or go on with it."""
        self.parts += 1
        with (self.folder.parent / f"part{self.parts}.err").open("wb") as errors:
            self.part = subprocess.Popen(
                [*self.command, *more], stdout=subprocess.DEVNULL, stderr=errors
            )

    def updates(self) -> list[dict[str, Any]]:
        """The records so far; a line that is being written is left out."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def reach(self, updates: int) -> None:
        """Wait for that many; TimeoutError past the deadline, RuntimeError if the part ended."""
        while len(self.updates()) < updates:
            self.wait_a_little()
            if self.part is not None and self.part.poll() is not None:
                raise RuntimeError(f"part {self.parts} ended by itself: {self.last_words()}")

    def end(self) -> int:
        """Wait for the part's end: its exit code."""
        assert self.part is not None
        while self.part.poll() is None:
            self.wait_a_little()
        return self.part.returncode

    def wait_a_little(self) -> None:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"out of time in part {self.parts}: {self.last_words()}")
        time.sleep(POLL)

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def last_words(self) -> str:
        """The last error of ours that the part told, else its last line."""
        text = (self.folder.parent / f"part{self.parts}.err").read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("zeromismatch.kernels.errors.")]
        return (ours or lines or [""])[-1][:600]


def main() -> None:
    """All faults in turn, then the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--of", default="", help="the reference's run, where it holds several")
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--wait", type=float, default=120.0, help="for an answer, at most")
    parser.add_argument("--faults", default=",".join(FAULTS))
    asked, rest = parser.parse_known_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    faults = asked.faults.split(",")
    total = 4 + APART * len(faults) + APART
    command = [
        sys.executable, "-W", "ignore", str(SCRIPT), "--model", asked.model, "--checkpoint", "5",
        "--out", str(asked.out / "run"), "--evaluate", "0", "--updates", str(total), "--only",
        "--wait", str(asked.wait), *rest,
    ]  # fmt: skip
    deadline = time.monotonic() + asked.seconds
    run = Run(folder=asked.out / "run", command=command, deadline=deadline)
    wanted = reference(asked.reference, asked.of)
    rows: list[str] = []
    if "memory" in faults:
        rows = ["--room-from", str(4 + APART * (faults.index("memory") + 1))]
    failed = ""
    try:
        run.begin(*rows)
        for number, fault in enumerate(faults):
            rows = meet(run, fault, 4 + APART * (number + 1), rows)
            report(asked.out, run, wanted, failed)
        code = run.end()
        run.met.append({"at the end": code, "says": run.last_words() if code else ""})
    except (TimeoutError, RuntimeError) as error:
        failed = str(error)
    finally:
        if run.part is not None and run.part.poll() is None:
            run.part.kill()
    found = report(asked.out, run, wanted, failed)
    print(json.dumps(found, indent=1))
    sys.exit(bool(failed or found["other_weights"] or found["unequal"]))


def meet(run: Run, fault: str, updates: int, rows: list[str]) -> list[str]:
    """Let the run meet a fault after so many updates and go on; what its parts are told of memory
    from then on."""
    run.reach(updates)
    began, before = time.monotonic(), len(run.updates())
    if fault == "stopped":
        os.kill(run.pid("worker"), signal.SIGSTOP)
    if fault in ("worker", "both"):
        os.kill(run.pid("worker"), signal.SIGKILL)
    if fault in ("learner", "both"):
        os.kill(run.pid("learner"), signal.SIGKILL)
    said: dict[str, Any] = {"fault": fault, "after": before}
    if fault != "worker":
        said["exit_code"] = run.end()
        said["says"] = "" if said["exit_code"] < 0 else run.last_words()
        said["ended_after_seconds"] = round(time.monotonic() - began, 1)
        if fault == "memory":
            room = (run.folder / "room.txt").read_text()
            said["room_gib"] = float(room)
            rows = ["--rows", "1024", "--room", room]
        run.begin(*rows)
        known = len(run.updates())
        run.reach(before + 1 if known <= before else known + 1)
    said["on_again_after_seconds"] = round(time.monotonic() - began, 1)
    run.met.append(said)
    return rows


def reference(file: Path, name: str) -> dict[int, str]:
    """Each update's weights in the run that met nothing."""
    text = (file / "metrics.jsonl" if file.is_dir() else file).read_text()
    records = [json.loads(line) for line in text.splitlines()]
    return {
        each["version"]: each["weights_root"]
        for each in records
        if not name or each.get("run") == name
    }


def report(folder: Path, run: Run, wanted: dict[int, str], failed: str) -> dict[str, Any]:
    """What is known by now."""
    records = run.updates()
    known = [each for each in records if each["version"] in wanted]
    found = {
        "met": run.met,
        "failed": failed,
        "updates": len(records),
        "in_order": [each["version"] for each in records] == [*range(len(records))],
        "of_the_reference": len(known),
        "other_weights": sum(each["weights_root"] != wanted[each["version"]] for each in known),
        "compared": sum(each["kernel"]["compared"] for each in records),
        "unequal": sum(each["kernel"]["unequal"] for each in records),
    }
    (folder / "faults.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
