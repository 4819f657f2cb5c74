"""What can be called as a tool: one line each, pointing at the function that ``zm`` runs too.

The arguments of a tool are the parameters of that function, with the help texts of the command
line; nothing is described twice. An operation says in addition what a shell user decides by
himself: where its output goes, how long it may take, and whether it shares the machine.

    OPERATIONS["localize"].parameters()      # {"model": (Annotated[str, ...], ...), ...}

Left out on purpose: an operation that runs a command line, or reads an arbitrary file.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from ..commands.answer import Answer

PACKAGE = __name__.rpartition(".jobs.")[0]
MAX_TEXT = 4096
MAX_ENTRIES = 256
MAX_WRITTEN = 1_000_000
NOT_ASKED = "json"
"""The parameter that every command has and no tool needs."""
OUTPUTS = ("out", "junit")
"""Parameters that name what is written."""
Parameters = dict[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One tool.

    function: module below ``agent_tools`` and name. result: where the type of its document is.
    quick: it takes no slot, since it answers at once. direct: it even answers without a process of
    its own, and imports nothing heavy. folder: without ``out`` it writes to ``runs/<job>``.
    limit_seconds: after that long it is ended. withheld: parameters that only a person may set.
    outputs: parameters that name what is written. texts: parameters that are a whole file's text.

        Operation(name="doctor", title="What is here", function="commands.project:doctor",
                  result="doctor:Examination", quick=True)
    """

    name: str
    title: str
    function: str
    result: str
    quick: bool = False
    direct: bool = False
    folder: bool = False
    read_only: bool = True
    destructive: bool = False
    withheld: tuple[str, ...] = ()
    outputs: tuple[str, ...] = OUTPUTS
    texts: tuple[str, ...] = ()
    limit_seconds: float = 3600.0

    def load(self) -> Callable[..., Answer]:
        """The function, imported now, without what a command does to stdout."""
        return inspect.unwrap(_find(self.function))

    def result_type(self) -> Any:
        """The type of its document; importing it may import torch."""
        return _find(self.result)

    def description(self) -> str:
        """The docstring of the function."""
        return inspect.getdoc(self.load()) or self.title

    def parameters(self) -> Parameters:
        """Name -> (annotation with help and bounds, default or ``...``); paths are strings here."""
        found: Parameters = {}
        for name, parameter in inspect.signature(self.load(), eval_str=True).parameters.items():
            if name != NOT_ASKED and name not in self.withheld:
                given = parameter.default
                default: Any = ... if given is inspect.Parameter.empty else given
                default = str(given) if isinstance(given, Path) else default
                longest = MAX_WRITTEN if name in self.texts else MAX_TEXT
                found[name] = (_described(parameter.annotation, longest), default)
        return found

    def path_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that are paths."""
        signature = inspect.signature(self.load(), eval_str=True)
        return tuple(
            name for name, each in signature.parameters.items() if _is_path(_bare(each.annotation))
        )

    def run(self, arguments: Mapping[str, Any]) -> Answer:
        """Call the function; strings become paths where it wants paths."""
        paths = self.path_parameters()
        return self.load()(**{
            name: Path(value) if name in paths and value is not None else value
            for name, value in arguments.items()
        })  # fmt: skip


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    root = PACKAGE if not module.startswith("..") else PACKAGE.rpartition(".")[0]
    return getattr(importlib.import_module(f"{root}.{module.lstrip('.')}"), name)


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _is_path(kind: Any) -> bool:
    return kind is Path or (get_origin(kind) in (UnionType, Union) and Path in get_args(kind))


def _described(annotation: Any, longest: int) -> Any:
    """The annotation of a command's parameter as pydantic understands it."""
    kind, told = _bare(annotation), getattr(annotation, "__metadata__", (None,))[0]
    if _is_path(kind):
        kind = str if kind is Path else str | None
    about: dict[str, Any] = {"description": getattr(told, "help", None)}
    if isinstance(told, FieldInfo):
        return annotation
    if kind is int or kind is float:
        about |= {"ge": getattr(told, "min", None), "le": getattr(told, "max", None)}
    if str in (kind, *get_args(kind)):
        about["max_length"] = longest
    if any(get_origin(part) is list for part in get_args(kind)):
        about["max_length"] = MAX_ENTRIES
    return Annotated[kind, Field(**about)]


OPERATIONS = {
    entry.name: entry
    for entry in (
        Operation(
            name="doctor", title="What is here and what is missing",
            function="commands.project:doctor", result="doctor:Examination", quick=True,
        ),
        Operation(
            name="inspect", title="A model's operators and their kernels",
            function="commands.project:inspect", result="jobs.documents:Inspection", quick=True,
        ),
        Operation(
            name="fetch", title="The default model as a checkpoint in the workspace",
            function="commands.project:fetch", result="jobs.documents:Fetched", folder=True,
            limit_seconds=900.0,
        ),
        Operation(
            name="localize", title="Name the operators whose bits differ",
            function="commands.measure:localize", result="records:Divergence", folder=True,
        ),
        Operation(
            name="repro", title="Cut a divergence down to one file",
            function="commands.repro:repro", result="jobs.documents:AnyRepro", folder=True,
        ),
        Operation(
            name="gate", title="Run the gates C0 to C10",
            function="commands.gate:gate", result="gates:GateReport", folder=True,
            limit_seconds=14400.0,
        ),
        Operation(
            name="regress", title="Run an earlier report's gates again",
            function="commands.gate:regress", result="gates:Regression", folder=True,
            limit_seconds=14400.0,
        ),
        Operation(
            name="align", title="Align a model: the whole job",
            function="commands.measure:align", result="align:AlignResult", folder=True,
            limit_seconds=28800.0,
        ),
        Operation(
            name="kernels_list", title="Contracts and who serves them",
            function="commands.registry:list_contracts", result="jobs.documents:Contracts",
            quick=True,
        ),
        Operation(
            name="kernels_certify", title="Prove kernels bit-equal to their contract",
            function="commands.registry:certify", result="jobs.documents:Certified",
            read_only=False,
        ),
        Operation(
            name="kernels_bench", title="Speed of kernels beside stock torch",
            function="commands.registry:bench", result="jobs.documents:Benched",
        ),
        Operation(
            name="recipe_show", title="Read a recipe",
            function="commands.project:show", result="..model_recipes.schema:Recipe", quick=True,
        ),
        Operation(
            name="recipe_verify", title="Repeat every claim of a recipe",
            function="commands.repro:verify", result="recipe_verify:Verification",
            limit_seconds=14400.0,
        ),
        Operation(
            name="recipe_pr", title="A branch and a text for the reviewer; never pushes",
            function="commands.recipe_pr:pr", result="recipe_pr:PullRequest", folder=True,
            read_only=False, limit_seconds=300.0,
        ),
        Operation(
            name="train", title="Train on a recipe that is green here",
            function="commands.train:train", result="training:Training", folder=True,
            withheld=("config", "resume"), limit_seconds=28800.0,
        ),
        Operation(
            name="study", title="Train under every loss, side by side",
            function="commands.study:study", result="study:Study", folder=True,
            limit_seconds=28800.0,
        ),
        Operation(
            name="eval_agent", title="Score the autopilot on the day-0 tasks",
            function="commands.agent:evaluate", result="eval.bench:BenchReport", folder=True,
            withheld=("agent", "agent_model", "base_url", "max_turns", "max_tokens",
                      "max_calls", "max_minutes", "max_money", "price", "waive_money"),
            limit_seconds=14400.0,
        ),
        Operation(
            name="report", title="Draw a run's HTML page again",
            function="commands.project:report", result="jobs.documents:Drawn", quick=True,
            read_only=False,
        ),
        Operation(
            name="trace", title="Read a stored trace page by page",
            function="commands.job:trace", result="jobs.results:TracePage", quick=True,
        ),
        Operation(
            name="draft_write", title="Write a kernel or a diff below runs/drafts/",
            function="commands.draft:write", result="drafts:Draft", direct=True,
            outputs=("file",), texts=("text",), read_only=False,
        ),
        Operation(
            name="verify", title="Judge a kernel against a contract",
            function="commands.verify:verify", result="verify.records:Verification",
            withheld=("rules", "allow_missing"), limit_seconds=900.0,
        ),
        Operation(
            name="patch_propose", title="Check a change against what a patch may touch",
            function="commands.patch:propose", result="patch.records:PatchReport",
            outputs=("run",), read_only=False, limit_seconds=300.0,
        ),
        Operation(
            name="patch_apply", title="Admit a change as one commit, or undo it",
            function="commands.patch:apply", result="patch.records:PatchReport",
            outputs=("run",), withheld=("reviewed",), read_only=False, limit_seconds=14400.0,
        ),
        Operation(
            name="patch_revert", title="Remove a change's branch and worktree",
            function="commands.patch:revert", result="patch.records:PatchReport",
            outputs=("run",), read_only=False, destructive=True, limit_seconds=300.0,
        ),
        Operation(
            name="patch_draft", title="From a draft's kernels to an admitted patch, in one call",
            function="commands.patch:draft", result="patch.records:PatchReport", folder=True,
            read_only=False, limit_seconds=14400.0,
        ),
        Operation(
            name="playbook", title="What to do about a cause",
            function="commands.playbook:playbook", result="jobs.documents:Playbooks", direct=True,
        ),
        Operation(
            name="list_runs", title="What was run here",
            function="commands.job:runs", result="jobs.results:Runs", direct=True,
        ),
        Operation(
            name="job_list", title="Jobs of this workspace",
            function="commands.job:list_jobs", result="jobs.results:Jobs", direct=True,
        ),
        Operation(
            name="job_result", title="A job's result, whole or page by page",
            function="commands.job:show", result="jobs.results:Page", direct=True,
        ),
        Operation(
            name="job_cancel", title="End a job",
            function="commands.job:cancel", result="jobs.store:Job", direct=True,
            read_only=False, destructive=True,
        ),
    )
}  # fmt: skip
"""By name. ``job_start`` and ``job_status`` exist on the server only: a shell has ``&``."""
