"""A workbench for one model: what an agent may look at, try and write while it aligns it.

    bench = Workbench("code:models/heron", Path("runs/heron"))
    bench.server()      # an MCP server with its tools
    bench.judge()       # whether the draft is admitted: the only word that counts

The agent writes kernel files into ``draft/kernels`` and nothing else; each is read against the
static rules of ``zm verify`` before it is kept. The model's own code and its README are shown as
data. Verdicts and gates that the agent asks for are for its information. What counts is the patch:
the draft as it lies on the disk, admitted by ``zm patch`` (:mod:`.admission`), whose verifier and
gates run in processes of their own.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...kernels.errors import UsageError
from ...kernels.files import replace_whole
from .admission import Admission
from .loop import Judgement

if TYPE_CHECKING:
    from mcp.server import MCPServer

    from ...model_recipes.models import LoadedModel
    from ...model_recipes.plan import Plan
    from ..gates import GateReport
    from ..gates.bench import Size

GATES = ("C1", "C3", "C4", "C5", "C6")
"""What a patch is held to: operators, batch, phase, trainer and accuracy, gradient."""
SHOWN_FILES = ("README.md", "config.json")
NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
MAX_KERNELS = 16
PAGE = 12_000


@dataclass
class Workbench:
    """See the module. size: smaller gates for the agent; gates: which the patch is held to."""

    spec: str
    folder: Path
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    gates: Sequence[str] = GATES
    size: "Size | None" = None
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        self.admission = Admission(self)

    @property
    def draft(self) -> Path:
        """The folder with the agent's kernels."""
        return self.folder / "draft"

    @property
    def plan(self) -> str:
        """``aligned``, or the draft once it holds a kernel."""
        return str(self.draft) if any((self.draft / "kernels").glob("*.py")) else "aligned"

    def digest(self) -> str:
        """Of the draft's kernels: what a judgement is about."""
        total = hashlib.blake2b(digest_size=16)
        for path in sorted((self.draft / "kernels").glob("*.py")):
            total.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
        return total.hexdigest()

    def absolute_spec(self) -> str:
        """The model's name for programs that run in another folder."""
        prefix = "code:" if self.spec.startswith("code:") else ""
        place = Path(self.spec.removeprefix(prefix))
        return f"{prefix}{place.resolve()}" if place.is_dir() else self.spec

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
        from ...kernels.entry_points import contract_for, entries_of
        from ...model_recipes.candidate import OWN_ENTRIES, check, parse_candidate

        if not NAME.fullmatch(name):
            raise UsageError(
                f"{name[:60]!r} is no kernel name; use lower case letters, digits and _"
            )
        source = parse_candidate(Path(f"{name}.py"), code.encode())
        entries = OWN_ENTRIES
        if source.serves is not None:
            contract, _ = contract_for(source.serves)
            entries = {name: each.parameters for name, each in entries_of(contract).items()}
        broken = check(source, entries)
        if broken:
            raise UsageError(
                "refused, nothing was written\n"
                + "\n".join(f"rule broken: {each.rule}: {each.detail}" for each in broken[:10])
            )
        kept = list((self.draft / "kernels").glob("*.py"))
        if len(kept) >= MAX_KERNELS and not (self.draft / "kernels" / f"{name}.py").exists():
            raise UsageError(f"{MAX_KERNELS} kernels are kept; remove one first")
        replace_whole(self.draft / "kernels" / f"{name}.py", code)
        return f"kept draft/{name}.py; call verify, then gates, then admit"

    def remove_kernel(self, name: str) -> str:
        """Remove a kernel of the draft."""
        path = self.draft / "kernels" / f"{name}.py"
        if not NAME.fullmatch(name) or not path.is_file():
            raise UsageError(
                f"there is no kernel {name[:60]!r}; there are {', '.join(self.files())}"
            )
        path.unlink()
        return f"removed draft/{name}.py"

    def verify(self, name: str) -> str:
        """What ``zm verify`` says about a kernel of the draft."""
        from ...model_recipes.plan import draft_kernels
        from ..commands.answer import plain_text
        from ..commands.verify import verification_text
        from ..verify import verify_kernel

        held = {Path(own.path).stem: own for own in draft_kernels(self.draft)}
        if name not in held:
            raise UsageError(f"there is no kernel {name[:60]!r}; there are {', '.join(held)}")
        own = held[name]
        found = verify_kernel(
            self.draft / own.path, own.contract, model=self.absolute_spec(), quick=True
        )
        return plain_text(verification_text(found))

    def admit(self) -> str:
        """Have the draft admitted as a patch; what became of it."""
        found = self.judge()
        if found.passed:
            return f"ADMITTED: {found.reason}"
        if found.waits:
            return f"WAITS for a person, and nothing else is missing: {found.waits}"
        rule = f"rule broken: {found.rule}\n" if found.rule else ""
        return f"NOT ADMITTED: {found.reason}\n{rule}"

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
        """The gates here, quick, for information."""
        from ..gates import run_gates

        self._load_draft()
        return run_gates(
            self.model, self.plan, only=list(self.gates), quick=True, seed=self.seed, size=self.size
        )

    def resolved_plan(self) -> "Plan":
        """The plan of the draft as it lies on the disk; UncoveredSiteError: what is missing."""
        from ...model_recipes.apply import find_sites
        from ...model_recipes.plan import plan_from

        self._load_draft()
        sites = find_sites(self.model.module)
        return plan_from(self.plan, sites, self.model.dtype, self.model.device)

    def _load_draft(self) -> None:
        from ...model_recipes import extension
        from ...model_recipes.plan import load_own_kernels

        extension.forget()
        load_own_kernels(self.plan)

    # -- the judge -------------------------------------------------------------------------------

    def judge(self) -> Judgement:
        """Whether the draft, as it lies on the disk, is admitted as a patch."""
        return self.admission.judge()

    # -- the server ------------------------------------------------------------------------------

    def server(self) -> "MCPServer[Any]":
        """The tools as an MCP server."""
        from .workbench_server import serve_workbench

        return serve_workbench(self)
