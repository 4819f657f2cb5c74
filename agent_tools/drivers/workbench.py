"""A workbench for one model: what an agent may look at, try and write while it aligns it.

    bench = Workbench("code:models/heron", Path("runs/heron"))
    bench.server()      # an MCP server with its tools
    bench.judge()       # the gates, in a process of their own: the only word that counts

The agent writes kernel files into ``draft/kernels`` and nothing else; each is read against the
rules of ``model_recipes/extension.py`` before it is kept. The model's own code and its README are
shown as data. Gates that the agent asks for run here and are for its information; the judge runs
them again in a fresh process, on the draft as it lies on the disk.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...kernels.errors import UsageError, ZeroMismatchError
from ...kernels.files import replace_whole
from .loop import Judgement

if TYPE_CHECKING:
    from mcp.server import MCPServer

    from ...model_recipes.models import LoadedModel
    from ..gates import GateReport
    from ..gates.bench import Size

GATES = ("C1", "C3", "C4", "C5", "C6")
"""What the judge asks: operators, batch, phase, trainer and accuracy, gradient."""
JUDGE_SECONDS = 1800.0
SHOWN_FILES = ("README.md", "config.json")
NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
MAX_KERNELS = 16
PAGE = 12_000


@dataclass
class Workbench:
    """See the module. size: smaller gates, for tests; gates: which the judge asks."""

    spec: str
    folder: Path
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    gates: Sequence[str] = GATES
    size: "Size | None" = None
    last: "GateReport | None" = field(default=None, init=False)

    @property
    def draft(self) -> Path:
        """The folder with the agent's kernels."""
        return self.folder / "draft"

    @property
    def plan(self) -> str:
        """``aligned``, or the draft once it holds a kernel."""
        return str(self.draft) if any((self.draft / "kernels").glob("*.py")) else "aligned"

    @cached_property
    def model(self) -> "LoadedModel":
        """The model, loaded once."""
        from ...model_recipes.models import load_model

        return load_model(self.spec, dtype=self.dtype, seed=self.seed)

    def code_folder(self) -> Path | None:
        """Where the model's own code lies, if it brings some."""
        return Path(self.spec.removeprefix("code:")) if self.spec.startswith("code:") else None

    # -- what the tools do -----------------------------------------------------------------------

    def files(self) -> list[str]:
        """Names of files that may be read: the model's code, and the draft."""
        home = self.code_folder()
        own = [] if home is None else sorted(
            path.name for path in home.iterdir()
            if path.is_file() and (path.suffix == ".py" or path.name in SHOWN_FILES)
        )  # fmt: skip
        return own + [f"draft/{p.name}" for p in sorted((self.draft / "kernels").glob("*.py"))]

    def read(self, name: str, offset: int = 0) -> str:
        """A page of one of :meth:`files`."""
        if name not in self.files():
            raise UsageError(f"there is no file {name[:80]!r}; there are {', '.join(self.files())}")
        home = self.code_folder()
        own = name.removeprefix("draft/")
        path = self.draft / "kernels" / own if own != name else (home or Path()) / name
        text = path.read_text(encoding="utf-8")
        page = text[max(0, offset) :][:PAGE]
        rest = len(text) - max(0, offset) - len(page)
        return page + (
            f"\n[{rest:,} characters follow; offset {offset + PAGE}]" if rest > 0 else ""
        )

    def write_kernel(self, name: str, code: str) -> str:
        """Check a kernel file by its text, and keep it."""
        from ...model_recipes.extension import violations

        if not NAME.fullmatch(name):
            raise UsageError(
                f"{name[:60]!r} is no kernel name; use lower case letters, digits and _"
            )
        broken = violations(code)
        if broken:
            raise UsageError(
                "refused, nothing was written\n"
                + "\n".join(f"rule broken: {line}" for line in broken[:10])
            )
        kept = list((self.draft / "kernels").glob("*.py"))
        if len(kept) >= MAX_KERNELS and not (self.draft / "kernels" / f"{name}.py").exists():
            raise UsageError(f"{MAX_KERNELS} kernels are kept; remove one first")
        replace_whole(self.draft / "kernels" / f"{name}.py", code)
        return f"kept draft/{name}.py; call inspect, then gates"

    def remove_kernel(self, name: str) -> str:
        """Remove a kernel of the draft."""
        path = self.draft / "kernels" / f"{name}.py"
        if not NAME.fullmatch(name) or not path.is_file():
            raise UsageError(
                f"there is no kernel {name[:60]!r}; there are {', '.join(self.files())}"
            )
        path.unlink()
        return f"removed draft/{name}.py"

    def inspect(self) -> str:
        """Operator classes with their contracts, and what no contract covers."""
        from ...model_recipes.inspection import inspect_model

        self._load_draft()
        kinds: dict[tuple[str, str], list[str]] = {}
        for row in inspect_model(self.model):
            kinds.setdefault((row.op_class, row.contract or f"NONE: {row.note}"), []).append(
                row.site
            )
        lines = [f"{op}: {served} ({len(sites)} sites, first {sites[0]})"
                 for (op, served), sites in kinds.items()]  # fmt: skip
        return "\n".join(lines)

    def localize(self, left: str, right: str, plan: str) -> str:
        """Compare two sides under ``stock``, ``aligned``, or the draft."""
        from ..align import shorten
        from ..commands.answer import plain_text
        from ..commands.measure import divergence_text
        from ..localize import localize
        from ..scenarios import default_requests
        from ..sides import Side

        self._load_draft()
        if plan not in ("stock", "aligned", "draft"):
            raise UsageError(f"plan {plan[:60]!r} is not known; use stock, aligned or draft")
        requests = shorten(
            default_requests(self.model, count=4, max_reply=12, seed=self.seed), 3, 8
        )
        found = localize(
            Side.parse(left), Side.parse(right), self.model, requests,
            plan=self.plan if plan == "draft" else plan,
        )  # fmt: skip
        return plain_text(divergence_text(found))

    def run_gates(self) -> "GateReport":
        """The judge's gates here, quick, for information."""
        from ..gates import run_gates

        self._load_draft()
        self.last = run_gates(
            self.model, self.plan, only=list(self.gates), quick=True, seed=self.seed, size=self.size
        )
        return self.last

    def _load_draft(self) -> None:
        from ...model_recipes import extension

        extension.forget()
        if self.plan != "aligned":
            extension.load_drafts(self.draft)

    # -- the judge -------------------------------------------------------------------------------

    def judge(self) -> Judgement:
        """The gates in a fresh process, on what lies on the disk."""
        words = ["gate", self.spec, "--plan", self.plan, "--only", ",".join(self.gates), "--quick",
                 "--dtype", self.dtype, "--seed", str(self.seed), "--json"]  # fmt: skip
        start = "from zeromismatch.agent_tools.cli import main; main()"
        try:
            done = subprocess.run(
                [sys.executable, "-c", start, *words], capture_output=True, text=True,
                timeout=JUDGE_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Judgement(passed=False, reason=f"the gates took over {JUDGE_SECONDS:.0f} s")
        return judged(done.stdout, done.returncode)

    def judge_here(self) -> Judgement:
        """The same question in this process: for models whose kernels were reviewed, and tests."""
        try:
            report = self.run_gates()
        except ZeroMismatchError as error:
            return Judgement(passed=False, reason=str(error)[:1500])
        fine = sum(gate.result in ("pass", "not-applicable") for gate in report.gates)
        return Judgement(
            passed=report.status == "pass", reason=report.reason, green=fine, of=len(report.gates)
        )

    # -- the server ------------------------------------------------------------------------------

    def server(self) -> "MCPServer[Any]":
        """The tools as an MCP server."""
        from .workbench_server import serve_workbench

        return serve_workbench(self)


def judged(output: str, code: int) -> Judgement:
    """What the judging process said, read without trust: exit code and document must agree."""
    try:
        document: dict[str, Any] = json.loads(output)
    except ValueError:
        return Judgement(passed=False, reason=f"the gates ended with {code} and no document")
    if "error" in document:
        return Judgement(passed=False, reason=str(document["error"].get("message"))[:1500])
    gates = document.get("gates") or []
    green = bool(gates) and all(gate["result"] in ("pass", "not-applicable") for gate in gates)
    counted = all(gate["compared"] > 0 for gate in gates if gate["result"] == "pass")
    passed = code == 0 and document.get("status") == "pass" and green and counted
    fine = sum(gate["result"] in ("pass", "not-applicable") for gate in gates)
    reason = str(document.get("reason"))[:1500]
    return Judgement(passed=passed, reason=reason, green=fine, of=len(gates))
