"""``zm kernels list``, ``certify``, ``bench``: contracts, who may serve them here, how fast."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .answer import Answer, command, table
from .progress import bar

if TYPE_CHECKING:
    from ...kernels.certificates import Certificate

DESCRIBED = (
    "id", "op", "dtype", "device", "formula", "order", "rounding", "functions", "reference",
)  # fmt: skip
kernels = typer.Typer(help="Kernel contracts and their certificates.")


def register(app: typer.Typer) -> None:
    """Add these commands to ``zm``."""
    kernels.command("list")(list_contracts)
    kernels.command()(certify)
    kernels.command()(bench)
    app.add_typer(kernels, name="kernels")


@command
def list_contracts(json: options.Json = False) -> Answer:
    """List every contract, who serves it, and which certificates hold on this machine."""
    from ...kernels import certify as certification
    from ...kernels import contract as contracts
    from ...kernels import dispatch

    certification.load_operators()
    held = {
        (found.contract, found.implementation): found
        for found in dispatch.certificates()
        if not found.key
    }
    document: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for contract in contracts.contracts():
        states: dict[str, str] = {}
        for implementation in contracts.implementations(contract.id):
            missing = implementation.missing()
            found = held.get((contract.id, implementation.name))
            states[implementation.name] = f"cannot run: {missing}" if missing else standing(found)
        rows += [[contract.id, names, state] for state, names in grouped(states)]
        described = {name: getattr(contract, name) for name in DESCRIBED}
        document.append({**described, "implementations": states})
    note = "Uncertified implementations are proved at first use, or now by `zm kernels certify`."
    text = [table(["contract", "implementations", "on this machine"], rows), note]
    return Answer(document={"contracts": document}, text=text)


def grouped(states: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(state, names of the implementations in it), in order of first appearance."""
    for state in dict.fromkeys(states.values()):
        yield state, ", ".join(name for name, own in states.items() if own == state)
    if not states:
        yield "none is registered: the definition itself serves", "reference"


def standing(certificate: "Certificate | None") -> str:
    """What a certificate says about its implementation, in a few words."""
    if certificate is None:
        return "uncertified"
    if not certificate.admitted:
        return f"refused: {certificate.reason}"
    return "certified (quick)" if certificate.quick else "certified (full)"


@command
def certify(
    contracts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONTRACT]...", help="Default: all that run here."),
    ] = None,
    quick: options.Quick = False,
    seed: options.Seed = 0,
    jobs: Annotated[int, typer.Option(help="Processes side by side.", min=1)] = 1,
    json: options.Json = False,
) -> Answer:
    """Prove implementations bit-equal to their contract's reference, and store the certificates."""
    from ...kernels.certify import certify as prove
    from ...kernels.certify import wanted

    left_out = wanted(contracts or None)[1]
    with bar("certifying") as progress:
        found = prove(
            contracts or None,
            quick=quick,
            seed=seed,
            jobs=jobs,
            progress=lambda what, done, total: progress(done, total, what),
        )
    candidates = [entry for entry in found if entry.role == "candidate"]
    refused = [entry for entry in candidates if not entry.admitted]
    rows = [
        [
            entry.contract,
            entry.implementation + (" (red control)" if entry.role != "candidate" else ""),
            "admitted" if entry.admitted else "refused",
            f"{entry.elements:,}",
            f"{entry.differing:,}",
            entry.reason or "",
        ]
        for entry in found
    ]
    columns = ["contract", "implementation", "verdict", "elements", "differ", "why"]
    summary = f"{len(candidates) - len(refused)} admitted, {len(refused)} refused."
    apart = [f"Left out: {name}: {why}." for name, why in left_out.items()]
    document = {"certificates": found, "admitted": len(candidates) - len(refused)}
    return Answer(
        document={**document, "refused": len(refused), "left_out": left_out},
        text=[table(columns, rows), summary, *apart],
        exit_code=1 if refused else 0,
    )


@command
def bench(
    quick: options.Quick = False,
    device: options.Device = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Markdown file to write.", metavar="FILE")
    ] = None,
    json: options.Json = False,
) -> Answer:
    """Measure every operator beside stock torch: medians of one run, ratio above 1 is faster."""
    from ...kernels.bench import bench as measure
    from ...kernels.bench import markdown
    from ..report import write_whole

    with bar("measuring") as progress:
        rows = measure(
            device, quick, progress=lambda what, done, total: progress(done, total, what)
        )
    cells = [
        [
            row.op,
            row.dtype,
            row.shape,
            f"{row.ours_us:,.1f}",
            f"{row.stock_us:,.1f}",
            f"{row.ratio:.2f}",
            "" if row.floor is None else f"{row.floor:.1f}{'' if row.reached else ' missed'}",
        ]
        for row in rows
    ]
    columns = ["operator", "dtype", "shape", "ours, µs", "stock, µs", "ratio", "floor"]
    missed = sum(row.reached is False for row in rows)
    text: list[object] = [table(columns, cells), f"{missed} rows are below their floor."]
    if out is not None:
        text.append(f"Written: {write_whole(out, markdown(rows))}")
    document = {"rows": [row.to_dict() for row in rows], "below_floor": missed}
    return Answer(document=document, text=text)
