"""The conditions of admission, each found out in the run's worktree.

    trial = Trial(run=run, tree=run / "worktree", progress=...)
    trial.repro(Path("repro.py"))            # exit code 0 equal, 1 mismatch, 125 unsuitable

Programs of the worktree run confined (:mod:`..verify.launch`): they read everything, write into the
run's folder alone, reach no network, and end within a stated time. What they print is kept in the
run, never executed. Recipe kernels are judged by the verifier, which lies outside the worktree.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels.contract import contracts
from ...kernels.errors import BudgetError, CapabilityError, UsageError
from ..verify.records import Verification

Progress = Callable[[str], None]
REPRO_SECONDS, LIST_SECONDS, REGRESS_SECONDS = 300, 300, 3600
FASTER = 1.05
AFTER = "gates"
"""Where in the run's ``out`` the gates' report on the patched tree lies."""
MAIN = "import sys; from zeromismatch.agent_tools.cli import run; sys.exit(run(sys.argv[1:]))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A program that ended: its exit code and where its output went."""

    code: int
    out: Path
    err: Path

    def document(self) -> dict[str, Any]:
        """The JSON document on its standard output; UsageError where there is none."""
        try:
            found = json.loads(self.out.read_text())
        except ValueError as error:
            raise UsageError(f"no JSON came out: {self.said()}; see {self.err.name}") from error
        return found if isinstance(found, dict) else {}

    def said(self) -> str:
        """The end of its error output, on one line."""
        lines = self.err.read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:])[-300:]


@dataclass(slots=True, kw_only=True)
class Trial:
    """One worktree and its programs."""

    run: Path
    tree: Path
    progress: Progress

    def prepare(self) -> None:
        """Folders to write to, the built core, and the certificates that still hold."""
        for name in ("out", "tmp", "cache"):
            (self.run / name).mkdir(exist_ok=True)
        own = Path(__file__).resolve().parents[2] / "kernels" / "cpu"
        for built in own.glob("_core*.so"):
            if (self.tree / "kernels" / "cpu").is_dir():
                shutil.copy2(built, self.tree / "kernels" / "cpu")
        from ...kernels import certificates

        held, copied = certificates.directory(), self.run / "cache" / "zero-mismatch"
        if held.is_dir() and not copied.exists():
            unfinished = shutil.ignore_patterns(".*")  # another process's, gone a moment later
            shutil.copytree(held, copied / "certificates", ignore=unfinished)

    def program(self, name: str, words: Sequence[str], *, seconds: float) -> Done:
        """Run a program of the worktree, confined; BudgetError where it does not end."""
        package = self.tree / "src"
        if not (package / "zeromismatch").is_dir():
            package = Path(__file__).absolute().parents[3]
        out, err = self.run / "out" / f"{name}.out", self.run / "out" / f"{name}.err"
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8",
            "HOME": os.environ.get("HOME", "/"), "TMPDIR": str(self.run / "tmp"),
            "XDG_CACHE_HOME": str(self.run / "cache"), "PYTHONPATH": str(package),
            "PYTHONDONTWRITEBYTECODE": "1", "OMP_WAIT_POLICY": "passive",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }  # fmt: skip
        launch = (
            "import sys; sys.path.insert(0, sys.argv.pop(1)); "
            "from zeromismatch.agent_tools.verify.launch import main; main(sys.argv[1:])"
        )
        trusted = str(Path(__file__).absolute().parents[3])
        command = [sys.executable, "-P", "-c", launch, trusted, json.dumps([str(self.run)]), "--"]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, *words], cwd=self.tree, env=environment, stdout=stdout, stderr=stderr,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired as error:
                raise BudgetError(
                    f"{name} did not end in {seconds:.0f} s; see {out.name}, then try again"
                ) from error
            finally:
                _end(process)
        if code == 126:
            raise CapabilityError(f"{name} was not run: {Done(code=code, out=out, err=err).said()}")
        return Done(code=code, out=out, err=err)

    def zm(self, name: str, *words: str, seconds: float) -> Done:
        """A ``zm`` command of the worktree's own code."""
        return self.program(name, [sys.executable, "-P", "-c", MAIN, *words], seconds=seconds)

    def repro(self, file: Path, name: str) -> int:
        """Exit code of a repro script: 0 equal, 1 mismatch, 125 unsuitable."""
        self.progress(f"{name} of the repro")
        words = [sys.executable, "-P", str(file.resolve()), "--expect-equal"]
        return self.program(name, words, seconds=REPRO_SECONDS).code

    def contracts(self, name: str) -> dict[str, dict[str, Any]]:
        """Every contract that the worktree registers, without who serves it here."""
        self.progress(f"contracts {name}")
        done = self.zm(f"contracts-{name}", "kernels", "list", "--json", seconds=LIST_SECONDS)
        if done.code != 0:
            raise UsageError(f"the patched package does not load: {done.said()}; correct it")
        listed = done.document()["contracts"]
        return {
            entry["id"]: {key: entry[key] for key in entry if key != "implementations"}
            for entry in listed
        }

    def certify(self, contract_ids: Sequence[str]) -> tuple[int, str]:
        """(exit code, what to say) of the certifying sweep over changed operators."""
        self.progress("certifying sweep")
        words = ("kernels", "certify", "--quick", *contract_ids, "--json")
        done = self.zm("certify", *words, seconds=REGRESS_SECONDS)
        refused = 0 if done.code else done.document().get("refused", 0)
        return done.code or int(bool(refused)), done.said()

    def regress(self, gates: Path) -> tuple[int, str, str]:
        """(exit code, reason, command) of ``zm regress`` in the worktree."""
        self.progress("gates again")
        after = self.run / "out" / AFTER
        shutil.rmtree(after, ignore_errors=True)
        words = ("regress", str(gates.resolve()), "--out", str(after), "--json")
        done = self.zm("regress", *words, seconds=REGRESS_SECONDS)
        command = shlex.join(["zm", "regress", str(gates)])
        try:
            document = done.document()
        except UsageError as error:
            return done.code or 70, str(error), command
        reason = document.get("reason") or document.get("error", {}).get("message", "")
        return done.code, str(reason), command


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Nothing of its session is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reference_files() -> dict[str, str]:
    """File of this package that defines a contract's bits -> that contract."""
    from ...kernels import certify

    certify.load_operators()
    found: dict[str, str] = {}
    for contract in contracts():
        module = contract.reference.partition(":")[0].removeprefix("zeromismatch.")
        found.setdefault(module.replace(".", "/") + ".py", contract.id)
    return found


def faster(report: Verification) -> bool:
    """Whether a kernel is worth admitting for its speed alone."""
    return report.status == "pass" and (report.speed.ratio or 0.0) >= FASTER
