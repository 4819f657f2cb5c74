"""How an agent's draft is admitted: as a patch, by ``zm patch``, and in no other way.

    admission = Admission(bench)
    report = admission.admit()        # a PatchReport: admitted, waiting for a person, or refused

Each run has a git repository of its own. Its first commit is a recipe that leaves every operator as
the framework runs it; beside it lie a repro and a gate report of that state. A draft becomes a
recipe (proved once more: rollout = trainer, error against fp64), the recipe a diff, and the diff a
patch: its kernels go through the whole verification (the quick one is for drafts), the repro must
turn from mismatch to equal, and no green gate may turn red. What is admitted is one commit on a
branch of that repository; ``zm recipe pr`` brings it to the user's.
"""

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...kernels.errors import InconclusiveError, ZeroMismatchError
from ...kernels.files import replace_whole
from .loop import Judgement

if TYPE_CHECKING:
    from ...model_recipes.models import LoadedModel
    from ...model_recipes.schema import Recipe
    from ..gates import GateReport
    from ..patch import PatchReport
    from ..patch.repository import Repository
    from .workbench import Workbench

PROBES = (("paged:decode", "paged:alone"), ("paged:mixed", "packed:packed"))
REPRO_SECONDS = 10.0
GREEN = ("pass", "not-applicable")
Progress = Callable[[str], None]


@dataclass(slots=True)
class Admission:
    """Admission for one workbench."""

    bench: "Workbench"
    progress: Progress = lambda stage: None
    judged: dict[str, Judgement] = field(default_factory=dict[str, Judgement])

    @property
    def repository(self) -> Path:
        """The run's own git repository."""
        return self.bench.folder / "repository"

    @property
    def baseline(self) -> Path:
        """Repro and gate report of the state before any patch."""
        return self.bench.folder / "baseline"

    def judge(self) -> Judgement:
        """The word that counts: whether the draft, as it lies on the disk, is admitted."""
        digest = self.bench.digest()
        if digest not in self.judged:
            try:
                self.judged[digest] = judgement(self.admit(), self.last_gates())
            except ZeroMismatchError as error:
                return Judgement(passed=False, reason=str(error)[:1500])
        return self.judged[digest]

    def admit(self) -> "PatchReport":
        """Make the draft a recipe and the recipe a patch, and try to have it admitted."""
        from ..patch import apply_patch, propose_patch
        from ..patch.repository import Repository

        folder, place = self.write_recipe()
        repo = self.prepare()
        proposed = self.bench.folder / "proposed"
        shutil.rmtree(proposed, ignore_errors=True)
        shutil.copytree(folder, proposed / place)
        diff = Repository(self.repository).diff_to("HEAD", proposed)
        run = self.run_folder(new=True)
        report = propose_patch(repo.root, diff, run=run, purpose=f"Align {self.bench.spec}")
        if report.status != "proposed":
            return report
        repro = self.baseline / "repro" / "repro.py"
        return apply_patch(
            run, repro=repro if repro.is_file() else None, gates=self.baseline / "gates.json",
            progress=self.progress,
        )  # fmt: skip

    def run_folder(self, *, new: bool = False) -> Path:
        """The newest patch of this run, or a new one."""
        patches = self.bench.folder / "patches"
        count = len(list(patches.glob("*"))) if patches.is_dir() else 0
        return patches / str(count + 1 if new or count == 0 else count)

    def tick_command(self) -> str:
        """The command by which a person ticks what waits, and has the patch admitted."""
        from ...model_recipes.schema import load_recipe
        from ...model_recipes.ticks import unticked

        folder = self.bench.folder / "recipe"
        waiting = [own.contract for own in unticked(load_recipe(folder), folder)]
        words = ["zm", "patch", "apply", str(self.run_folder())]
        words += ["--gates", str(self.baseline / "gates.json")]
        words += ["--repro", str(self.baseline / "repro" / "repro.py")]
        again = shlex.join([*words, *(f"--reviewed={each}" for each in waiting)])
        return f"read {folder / 'kernels'}, then: {again}"

    def last_gates(self) -> "GateReport | None":
        """The gates of the last patch, as they came out on the patched tree."""
        from ..gates import read_gates
        from ..patch.trial import AFTER

        file = self.run_folder() / "out" / AFTER / "gates.json"
        return read_gates(file) if file.is_file() else None

    # -- the draft as a recipe -------------------------------------------------------------------

    def write_recipe(self) -> tuple[Path, Path]:
        """(``recipe/`` of the run's folder, made of the draft; its place in a repository)."""
        from ...model_recipes.models import load_model
        from ...model_recipes.plan import draft_kernels
        from ...model_recipes.schema import save_recipe
        from ..align import only_prompt
        from ..proof import prove
        from ..recipe import write_recipe
        from ..recipe_pr.pr import place_of
        from ..scenarios import default_requests
        from .autopilot import Step

        bench = self.bench
        self.progress("proving the draft")
        model, plan = bench.model, bench.resolved_plan()
        requests = default_requests(model, seed=bench.seed)
        pristine = load_model(bench.spec, dtype=bench.dtype, seed=bench.seed)
        proof = prove(model, plan, [only_prompt(each) for each in requests], pristine=pristine)
        step = Step(
            left="agent", right="-", plan=plan.name, status="EQUAL",
            found="An agent wrote this recipe.", groups=(),
            action="see the transcript and the patches of the run",
        )  # fmt: skip
        folder = bench.folder / "recipe"
        shutil.rmtree(folder, ignore_errors=True)
        words = ["zm", "align", bench.spec, "--dtype", bench.dtype, "--seed", str(bench.seed)]
        recipe = write_recipe(folder, model, plan, proof, [step], command=shlex.join(words))
        kernels = draft_kernels(bench.draft) if bench.plan != "aligned" else ()
        for own in kernels:
            replace_whole(folder / own.path, (bench.draft / own.path).read_text())
        save_recipe(recipe.model_copy(update={"kernels": kernels}), folder)
        return folder, place_of(recipe)

    # -- the state before ------------------------------------------------------------------------

    def prepare(self) -> "Repository":
        """The run's repository with its first commit, repro and gates; made once."""
        from ..patch.repository import Repository, initialised
        from ..recipe_pr.pr import place_of

        if (self.baseline / "gates.json").is_file():
            return Repository(self.repository)
        from ...model_recipes import extension
        from ...model_recipes.models import load_model
        from ...model_recipes.schema import save_recipe

        self.progress("repro and gates of the state before")
        extension.forget()
        shutil.rmtree(self.repository, ignore_errors=True)
        bench = self.bench
        model = load_model(bench.absolute_spec(), dtype=bench.dtype, seed=bench.seed)
        recipe = self._stock_recipe(model)
        place = place_of(recipe)
        save_recipe(recipe, self.repository / place)
        repo = initialised(self.repository, "The model as the framework runs it")
        self._repro(model, place)
        report = self._gates(model, place)
        replace_whole(self.baseline / "gates.json", report.model_dump_json(indent=2) + "\n")
        return repo

    def _stock_recipe(self, model: "LoadedModel") -> "Recipe":
        from ...model_recipes.bindings import device_kind
        from ...model_recipes.plan import stock_plan
        from ...model_recipes.schema import Recipe

        return Recipe(
            name="as-the-framework-runs-it", model=model.identity, plan=stock_plan(),
            dtype=self.bench.dtype,
            device=device_kind(model.device), not_covered=("Everything: nothing is aligned.",),
        )  # fmt: skip

    def _repro(self, model: "LoadedModel", place: Path) -> None:
        from ...model_recipes.plan import stock_plan
        from ..align import shorten
        from ..reduction.whole import write_whole_repro
        from ..scenarios import default_requests
        from ..sides import Side

        drawn = default_requests(model, count=4, max_reply=12, seed=self.bench.seed)
        requests = shorten(drawn, 3, 8)
        for left, right in PROBES:
            try:
                write_whole_repro(
                    self.baseline / "repro", Side.parse(left), Side.parse(right), model, requests,
                    plan=stock_plan(), place=str(place), seed=self.bench.seed,
                    seconds=REPRO_SECONDS, progress=self.progress,
                )  # fmt: skip
            except InconclusiveError:
                continue  # these two sides are equal as they are
            return

    def _gates(self, model: "LoadedModel", place: Path) -> "GateReport":
        """The gates of the stock plan, as a report that follows the recipe in the repository."""
        from ...model_recipes.plan import stock_plan
        from ..gates import run_gates
        from ..gates.base import seal

        report = run_gates(
            model, stock_plan(), only=list(self.bench.gates), quick=True, seed=self.bench.seed,
            progress=self.progress,
        )  # fmt: skip
        asked = report.request.model_copy(update={"recipe": str(place)})
        return seal(report.model_copy(update={"request": asked}))


def judgement(report: "PatchReport", gates: "GateReport | None") -> Judgement:
    """A patch's report as the word that a driver gets."""
    rows = gates.gates if gates is not None else ()
    fine = sum(gate.result in GREEN for gate in rows)
    green = bool(rows) and fine == len(rows)
    if report.status in ("admitted", "waiting") and not green:
        red = next((f"{g.id} is {g.result}: {g.reason}" for g in rows if g.result not in GREEN), "")
        return Judgement(passed=False, reason=f"the gates are not green; {red}", of=len(rows))
    waits = report.checks[-1].detail if report.status == "waiting" else None
    rule = report.refusals[0].rule if report.refusals else None
    if rule == "verify":
        broken = report.refusals[0].detail.partition("breaks rule ")[2]
        rule = broken.partition(":")[0].partition(" ")[0] or rule
    return Judgement(
        passed=report.status == "admitted", waits=waits, reason=report.reason[:1500], rule=rule,
        green=fine, of=len(rows),
    )  # fmt: skip


