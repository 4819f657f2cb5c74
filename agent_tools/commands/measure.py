"""``zm localize`` and ``zm align``: compare two sides, and make them agree."""

import itertools
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .answer import Answer, command, table
from .progress import stages

if TYPE_CHECKING:
    from ...model_recipes.models import LoadedModel
    from ...trainer.engines.base import Request
    from ..align import AlignResult
    from ..records import Divergence

Side = Annotated[
    str,
    typer.Option(
        metavar="SIDE",
        help="ENGINE[+SETTING...][:SCHEDULE], for instance paged:chunk:7 or transformers:decode.",
        show_default=False,
    ),
]
Rollout = Annotated[
    str, typer.Option(metavar="ENGINE", help="The engine that samples: paged, vllm.")
]
REQUESTS, REPLY = 16, 48
QUICK_REQUESTS, QUICK_REPLY = 4, 12


def register(app: typer.Typer) -> None:
    """Add ``localize`` to ``zm``; ``align`` is added by agent.py, which knows agents as well."""
    app.command()(localize)


@command
def localize(
    model: options.Model,
    left: Side,
    right: Side,
    plan: options.Plan = "stock",
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    prompts: options.Prompts = None,
    out: options.Out = None,
    seed: options.Seed = 0,
    quick: options.Quick = False,
    json: options.Json = False,
) -> Answer:
    """Compare two sides and name every operator that gives other bits on equal inputs.

    Exit 0 equal, 1 divergent, 3 misaligned or inconclusive. With --out: traces, the verdict as
    JSON, and the HTML page.
    """
    from ...model_recipes.models import load_model
    from ..localize import Options
    from ..localize import localize as compare
    from ..sides import Side as ParsedSide

    sides = ParsedSide.parse(left), ParsedSide.parse(right)
    with stages() as progress:
        progress(f"loading {model}")
        loaded = load_model(model, dtype=dtype, device=device, seed=seed)
        reply = QUICK_REPLY if quick else REPLY
        requests = requests_for(loaded, prompts=prompts, seed=seed, quick=quick, max_reply=reply)
        chosen = Options(out=out, progress=progress)
        found = compare(*sides, loaded, requests, plan=plan, options=chosen)
        words = ["--left", left, "--right", right, "--plan", plan, "--dtype", dtype]
        words += ["--device", device, "--seed", str(seed), *(["--quick"] if quick else [])]
        words += ["--prompts", str(prompts)] if prompts else []
        again = shlex.join(["zm", "localize", model, *words])
        page = None if out is None else _write_page(found, again, out)
    text = divergence_text(found)
    if page is not None:
        text.append(f"Report: {page}")
    return Answer(document=found, text=text, exit_code=found.exit_code)


@command
def align(
    model: options.Model,
    rollout: Rollout = "paged",
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    prompts: options.Prompts = None,
    out: options.Out = None,
    seed: options.Seed = 0,
    quick: options.Quick = False,
    json: options.Json = False,
) -> Answer:
    """Do the whole job: find what differs, fix it, prove it, write recipe and report.

    Exit 0 aligned, 1 stuck or disproved, 3 inconclusive. Everything goes into one new folder, by
    default under runs/.
    """
    from ...kernels.errors import UsageError
    from ...model_recipes.models import load_model
    from ...trainer.engines.vllm.compat import require as require_vllm
    from ..align import Options
    from ..align import align as do_all
    from ..proof import OTHERS

    if rollout not in OTHERS:
        raise UsageError(f"no rollout engine is called {rollout!r}; use {' or '.join(OTHERS)}")
    if rollout == "vllm":
        require_vllm()
    folder = out or new_folder(f"align-{model}")
    words = ["zm", "align", model, "--rollout", rollout, "--dtype", dtype, "--device", device]
    words += ["--seed", str(seed), *(["--quick"] if quick else [])]
    words += ["--prompts", str(prompts)] if prompts else []
    with stages() as progress:
        progress(f"loading {model}")
        loaded = load_model(model, dtype=dtype, device=device, seed=seed)
        requests = requests_for(loaded, prompts=prompts, seed=seed, quick=quick)
        chosen = Options(
            out=folder, command=shlex.join(words), rollout=rollout, dtype=dtype, device=device,
            seed=seed, progress=progress,
        )  # fmt: skip
        found = do_all(loaded, requests, chosen)
    return Answer(document=found, text=align_text(found), exit_code=found.exit_code)


def new_folder(name: str) -> Path:
    """``runs/<name>-<n>`` with the lowest number that is free."""
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", name)
    return next(
        folder for n in itertools.count(1) if not (folder := Path("runs") / f"{plain}-{n}").exists()
    )


def align_text(found: "AlignResult") -> list[object]:
    """What happened, step by step, for a person."""
    text = divergence_text(found.baseline)
    steps = [
        [f"{step.left} against {step.right}", step.status, step.action] for step in found.steps
    ]
    text.append(table(["autopilot compared", "verdict", "then"], steps))
    claims = [
        [claim.name, claim.status, f"{claim.compared:,}", f"{claim.differing:,}", claim.control]
        for claim in found.claims
    ]
    text.append(table(["claim", "result", "compared", "differ", "red control"], claims))
    text.append(f"{found.status}: {found.reason}")
    text.append(f"Report: {found.report}")
    if found.recipe is not None:
        text.append(f"Recipe: {found.recipe}")
    return [*text, f"{found.seconds:.1f} s"]


def requests_for(
    model: "LoadedModel",
    *,
    prompts: Path | None,
    seed: int,
    quick: bool,
    max_reply: int = REPLY,
) -> tuple["Request", ...]:
    """The built-in prompts or the user's; with ``--quick`` only a few of them."""
    from ..scenarios import default_requests

    count = QUICK_REQUESTS if quick else REQUESTS
    found = default_requests(model, count=count, max_reply=max_reply, seed=seed, prompts=prompts)
    return found[:count] if quick else found


def _write_page(found: "Divergence", again: str, out: Path) -> Path:
    from ..doctor import devices, versions
    from ..heat import stored_heat_map
    from ..report import Command, from_divergence, write_report, write_whole

    write_whole(out / "divergence.json", found.model_dump_json(indent=2) + "\n")
    heat = stored_heat_map(out) if found.status in ("EQUAL", "DIVERGENT") else None
    command = Command(label="The same comparison", command=again)
    environment = dict(versions()) | {"devices": "; ".join(devices())}
    return write_report(out / "report.html", from_divergence(found, (command,), heat, environment))


def divergence_text(found: "Divergence") -> list[object]:
    """A verdict for a person: the word, the reason, the culprits by class and cause, the proof."""
    text: list[object] = [f"{found.status}: {found.reason}"]
    if found.groups:
        rows = [
            [entry.op_class, entry.cause, str(entry.count), f"{entry.affected:,} of "
             f"{entry.compared:,}", entry.sites[0]]
            for entry in found.groups
        ]  # fmt: skip
        text.append(table(["class", "cause", "sites", "rows that differ", "first site"], rows))
    if found.first_divergence is not None:
        at = found.first_divergence.at
        text.append(
            f"First in execution order: {found.first_divergence.site}, request {at.request}, "
            f"position {at.position}"
        )
    if found.logprobs is not None:
        text.append(
            f"Logprobs: {found.logprobs.compared:,} compared, {found.logprobs.differing:,} differ, "
            f"largest difference {found.logprobs.max_abs:.3g}, k3 {found.logprobs.k3:.3g}"
        )
    if found.confirmation is not None:
        proof = "confirmed" if found.confirmation.confirmed else "NOT confirmed"
        text.append(
            f"With only the culprits replaced: {proof}, {found.confirmation.differing:,} of "
            f"{found.confirmation.compared:,} other rows differ"
        )
    if found.self_test is not None:
        passed = "passed" if found.self_test.passed else "FAILED"
        text.append(f"Self-test {passed}: {found.self_test.activation}; {found.self_test.weight}")
    return [*text, *found.notes, f"{found.seconds:.1f} s"]
