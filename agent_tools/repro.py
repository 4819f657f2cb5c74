"""Repro: from a divergence to one small file that shows it, with exact inputs.

    repro = write_repro(Path("repro"), left, right, divergence)     # live: two runners
    repro = repro_of(Path("divergence.json"), Path("repro"))        # from a file

The culprit's call is captured on both sides, written as two lines of Python, and shrunk
(``reduction/``) while it still differs at that operator. The folder then holds:

    repro.py               imports torch and, where a contract is involved, zeromismatch.kernels
    inputs.safetensors     exact bits
    repro.json             claim, digests, first coordinate, environment, command, status

A side that does not repeat itself is another diagnosis and is said so. What is no operator's fault
(wrong state, wrong logprobs) cannot be shown by an operator alone: that raises, and ``--whole``
writes a file that runs both engines instead (``reduction/whole.py``). Command:
``zm repro DIVERGENCE``.
"""

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from ..kernels.errors import DiskError, InconclusiveError, UsageError
from ..model_recipes.models import LoadedModel, load_model
from ..trainer.engines.base import Request
from .doctor import versions
from .graft import first_bits
from .records import BitDifference, Culprit, Divergence, Record
from .reduction.capture import capture
from .reduction.case import Case, SideCall, row_digest
from .reduction.origin import environment, revision
from .reduction.shrink import shrink
from .reduction.whole import WholeRepro, write_whole_repro
from .report import write_whole
from .sides import Runner, Side
from .trace_store import load_trace

TEMPLATES = Path(__file__).parent / "templates"
MAX_BYTES = 5_000_000
FILES = ("repro.py", "inputs.safetensors", "repro.json")
Progress = Callable[[str], None]


class ReproSide(Record):
    """One side of the file: which row of which call, and the bits it gave here."""

    name: str
    side: str
    contract: str | None
    rows: int
    row: int
    start: int
    stop: int
    digest: str


class Repro(Record):
    """What ``repro.json`` holds and ``zm repro`` answers."""

    schema_version: Literal[1] = 1
    kind: Literal["repro"] = "repro"
    claim: str
    """One line."""
    site: str
    op_class: str
    cause: str
    left: ReproSide
    right: ReproSide
    first: BitDifference | None
    status: Literal["minimal", "budget", "none"]
    reduced: tuple[str, ...]
    """What was taken away, in order."""
    tried: int
    bytes: int
    pure_torch: bool
    fault: str | None = None
    versions: dict[str, str]
    device: str
    environment: dict[str, str]
    revision: str | None
    command: str
    seconds: float


def write_repro(
    folder: Path,
    left: Runner,
    right: Runner,
    found: Divergence,
    *,
    site: str | None = None,
    seconds: float = 60.0,
    fault: str | None = None,
    command: str = "zm repro",
    progress: Progress = lambda stage: None,
) -> Repro:
    """Capture, shrink and write one culprit. site: which; default is the first in execution order.

    fault: a catalogued fault that is planted now, so that the file plants it too.
    """
    began = time.monotonic()
    culprit = _culprit(found, site)
    progress(f"capturing {culprit.site}")
    case = capture(left, right, culprit, fault=fault)
    if culprit.cause.name == "nondeterminism" or not case.repeats():
        raise InconclusiveError(
            f"{culprit.site} does not repeat itself on equal inputs: that is nondeterminism, which "
            "no fixed repro can show; run it again with one thread, or look for atomics"
        )
    if not case.differs():
        raise InconclusiveError(
            f"{culprit.site} alone gives equal bits on the inputs it was shown: what it read "
            f"beside them differs ({culprit.cause.name}); `zm repro --whole` writes a file that "
            "runs the engines"
        )
    progress("shrinking")
    case, status, tried = shrink(case, seconds - (time.monotonic() - began))
    if case.nbytes > MAX_BYTES:
        raise InconclusiveError(
            f"the smallest inputs found take {case.nbytes:,} bytes, over {MAX_BYTES:,}; "
            "give more --seconds"
        )
    sides = {"left": found.left.side, "right": found.right.side}
    record = _record(case, culprit, found, sides, status, tried, fault, command, began)
    _write(folder, case, record)
    return record


def repro_of(
    path: Path,
    folder: Path,
    *,
    site: str | None = None,
    whole: bool = False,
    seconds: float = 60.0,
    seed: int = 0,
    prompts: Path | None = None,
    plan: str | None = None,
    progress: Progress = lambda stage: None,
) -> Repro | WholeRepro:
    """The same from a divergence on disk: a JSON file, or a folder with traces beside it.

    plan: the recipe that it was found with. A --whole repro then runs that recipe as it is by then,
    so that a mended recipe turns it green.
    """
    found, requests = read_divergence(path)
    progress(f"loading {found.model}")
    model = load_model(found.model, dtype=found.dtype, seed=seed)  # pyright: ignore
    if requests is None:
        requests = _made_again(found, model, seed, prompts, path)
    words = ["zm", "repro", str(path), "--out", str(folder)] + (["--site", site] if site else [])
    words += ["--plan", plan] if plan else []
    sides = Side.parse(found.left.side), Side.parse(found.right.side)
    plans = [plan or _plan(side.plan) for side in (found.left, found.right)]
    if whole:
        return write_whole_repro(
            folder, *sides, model, requests, plan=plans[0], seed=seed, seconds=seconds,
            command=shlex.join([*words, "--whole"]), progress=progress,
        )  # fmt: skip
    runners = [
        Runner(side=side, model=model, requests=requests, plan=chosen)
        for side, chosen in zip(sides, plans, strict=True)
    ]
    return write_repro(
        folder, runners[0], runners[1], found, site=site, seconds=seconds,
        command=shlex.join(words), progress=progress,
    )  # fmt: skip


def _made_again(
    found: Divergence, model: LoadedModel, seed: int, prompts: Path | None, path: Path
) -> tuple[Request, ...]:
    """The requests of ``zm localize`` with the same seed and prompts, whole or --quick."""
    from .commands.measure import QUICK_REPLY, REPLY, requests_for

    for quick, reply in ((False, REPLY), (True, QUICK_REPLY)):
        requests = requests_for(model, prompts=prompts, seed=seed, quick=quick, max_reply=reply)
        tokens = sum(len(request.tokens) for request in requests)
        if (len(requests), tokens) == (found.anchor.requests, found.anchor.tokens):
            return requests
    raise UsageError(
        f"{path} is about {found.anchor.requests} requests with {found.anchor.tokens} tokens, "
        "which cannot be made again from here; give its --seed and --prompts, or localize "
        "with --out DIR and give that folder"
    )


def read_divergence(path: Path) -> tuple[Divergence, tuple[Request, ...] | None]:
    """A divergence, and its requests where its traces were kept."""
    file = path / "divergence.json" if path.is_dir() else path
    try:
        found = Divergence.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {file}: {error}; write one with `zm localize ... --json > FILE`"
        ) from error
    except ValidationError as error:
        raise UsageError(
            f"{file} holds no divergence ({error.error_count()} faults, first "
            f"{error.errors()[0]['msg']}); write one with `zm localize ... --json > FILE`"
        ) from error
    trace = found.left.trace
    folder = path / "left" if path.is_dir() else Path(trace) if trace else None
    return found, load_trace(folder).requests if folder is not None and folder.is_dir() else None


def _plan(name: str) -> str:
    return "stock" if name == "stock" else "aligned" if name.startswith("aligned") else name


def _culprit(found: Divergence, site: str | None) -> Culprit:
    if found.status != "DIVERGENT" or not found.culprits:
        raise InconclusiveError(
            f"the divergence is {found.status} and names no operator ({found.reason}); there is "
            "nothing to reproduce at an operator"
        )
    for culprit in found.culprits:
        if site in (None, culprit.site):
            return culprit
    named = ", ".join(culprit.site for culprit in found.culprits[:5])
    raise UsageError(f"{site!r} is no culprit of this divergence; choose one of {named}")


def _record(
    case: Case, culprit: Culprit, found: Divergence, names: dict[str, str], status: Any,
    tried: int, fault: str | None, command: str, began: float,
) -> Repro:  # fmt: skip
    outputs: dict[str, Tensor] = dict(zip(("left", "right"), case.outputs(), strict=True))
    calls: dict[str, SideCall] = {"left": case.left, "right": case.right}
    attends = case.op_class == "attention"
    sides = {
        name: ReproSide(
            name=name, side=names[name], contract=call.contract, rows=0 if attends else call.rows,
            row=case.position - call.start if attends else call.row, start=call.start,
            stop=call.stop, digest=row_digest(outputs[name]),
        )
        for name, call in calls.items()
    }  # fmt: skip
    rows = {
        name: f"{call.stop - call.start} of {call.stop} rows" if attends else f"{call.rows} rows"
        for name, call in calls.items()
    }
    whose = {name: call.contract or "stock torch" for name, call in calls.items()}
    claim = (
        f"{culprit.op_class} gives other bits for one row: {whose['left']}, {rows['left']}, "
        f"against {whose['right']}, {rows['right']} ({culprit.cause.name})"
    )
    same = outputs["left"].dtype == outputs["right"].dtype
    return Repro(
        claim=claim, site=culprit.site, op_class=culprit.op_class, cause=culprit.cause.name,
        left=sides["left"], right=sides["right"],
        first=first_bits(outputs["left"][0], outputs["right"][0]) if same else None,
        status=status,
        reduced=(f"model {found.model}: every operator but {culprit.site}", *case.reduced),
        tried=tried, bytes=case.nbytes,
        pure_torch=case.left.contract is None and case.right.contract is None and fault is None,
        fault=fault, versions=dict(versions()), device="cpu",
        environment=environment(case.flags),
        revision=revision(), command=command, seconds=time.monotonic() - began,
    )  # fmt: skip


def _write(folder: Path, case: Case, record: Repro) -> None:
    tensors = {f"shared.{name}": tensor for name, tensor in case.tensors.items()}
    for name, call in (("left", case.left), ("right", case.right)):
        for key, tensor in (call.neighbours or {}).items():
            tensors[f"{name}.{key}"] = tensor
    whole = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(whole, folder / "inputs.safetensors")
    except OSError as error:
        raise DiskError(
            f"cannot write {folder}: {error}; free some space or choose another --out"
        ) from error
    write_whole(folder / "repro.py", _source(case, record))
    write_whole(folder / "repro.json", record.model_dump_json(indent=2) + "\n")


def _source(case: Case, record: Repro) -> str:
    programs = case.left.program, case.right.program
    imports = [each.imports for each in programs if each.imports]
    defining = [each for each in programs if each.definitions]
    if record.fault is not None:
        imports.append("from zeromismatch.agent_tools.faults import planted_kernel")
    rows = [n for n, axes in case.layout.items() if axes[0] == "rows" and n in case.tensors]
    render = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, autoescape=False,
        keep_trailing_newline=True,
    ).get_template  # fmt: skip
    return render("repro.py.j2").render(
        claim=record.claim, command=record.command, file="repro.py", pure=record.pure_torch,
        imports=list(dict.fromkeys(imports)), settings=repr(dict(case.settings)),
        definitions=list(dict.fromkeys(each.definitions.strip("\n") for each in defining)),
        row_inputs=repr(rows), fault=repr(record.fault) if record.fault else "",
        left_contract=repr(case.left.contract),
        threads=case.flags.threads, onednn=case.flags.onednn,
        left_line=programs[0].line, right_line=programs[1].line,
        left_about=record.left.contract or "stock torch",
        right_about=record.right.contract or "stock torch",
    )  # fmt: skip
