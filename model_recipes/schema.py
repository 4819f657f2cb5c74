"""Recipes: a plan for one model, with the evidence that it works and what it does not cover.

A recipe is data in a folder (``recipe.yaml``), written by the tools and reviewed by a person:

    name: smollm2-135m-float32-cpu
    model: {spec: smollm2-135m, model_type: llama, config_digest: 5b..., weights_root: 91...}
    plan: {name: aligned-float32-cpu, rules: {linear: linear.chain.float32.cpu.v1, ...}}
    evidence:
    - {claim: every schedule on paged equals packed, verdict: pass, compared_tokens: 768, ...}

Unknown keys, contradictions and a changed kernel file are refused when it is loaded. Nothing here
runs a model: :mod:`.apply` does, and ``zm recipe show`` prints one.
"""

import hashlib
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..kernels.errors import DiskError, RecipeError
from ..kernels.files import replace_whole
from .plan import Plan

FILE = "recipe.yaml"
SCHEMA_VERSION = 1


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelIdentity(_Record):
    """Which model, as digests. The spec is for people; the digests decide."""

    spec: str
    """What to type: a folder, hub id, ``smollm2-135m`` or ``tiny:llama``."""
    model_type: str
    """transformers' own name of the architecture."""
    config_digest: str
    """:func:`.state.config_digest`."""
    weights_root: str
    """:func:`.state.weights_root` at the recipe's dtype."""


class Evidence(_Record):
    """One claim, how it was tested, and what came out."""

    claim: str
    """One sentence."""
    command: str
    """What repeats it."""
    verdict: Literal["pass", "fail", "inconclusive", "not-attributable", "not-applicable"]
    """``pass`` needs compared tokens and no differing one."""
    compared_tokens: int = Field(ge=0)
    """How many tokens were compared; zero is never equality."""
    differing_tokens: int = Field(ge=0)
    """How many of them differ in at least one bit."""
    digest: str
    """Digest of the result that the command must reproduce."""
    environment_digest: str
    """Digest of the environment it was produced in."""
    seconds: float = Field(ge=0)
    """How long it took."""

    @model_validator(mode="after")
    def _is_consistent(self) -> "Evidence":
        if self.verdict == "pass" and (self.compared_tokens == 0 or self.differing_tokens > 0):
            raise ValueError("verdict pass needs at least one compared token and no differing one")
        if self.differing_tokens > self.compared_tokens:
            raise ValueError("more tokens differ than were compared")
        return self


class RecipeKernel(_Record):
    """A kernel file that belongs to the recipe; loading the recipe checks its digest."""

    contract: str
    """Contract id that it serves."""
    path: str
    """Relative to the recipe's folder, inside it."""
    digest: str
    """BLAKE2b-128 of the file."""


class Recipe(_Record):
    """Everything needed to run a model aligned, and to doubt it."""

    schema_version: Literal[1] = SCHEMA_VERSION
    """Version of this layout."""
    name: str = Field(min_length=1)
    """For people and folder names."""
    model: ModelIdentity
    """Which model it belongs to."""
    plan: Plan
    """Which contract serves each operator."""
    dtype: Literal["float32", "bfloat16"]
    """Dtype of weights and activations."""
    device: str
    """``cpu``, or an architecture such as ``sm90``."""
    engines: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Engine name -> settings it must run with."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of what computed the evidence."""
    evidence: tuple[Evidence, ...] = ()
    """What was shown."""
    cost: dict[str, float] = Field(default_factory=dict)
    """Measured cost, for example tokens per second beside the stock plan's."""
    not_covered: tuple[str, ...] = ()
    """What this recipe does not claim."""
    precision: tuple[str, ...] = ()
    """Decisions about precision that a reviewer should see."""
    kernels: tuple[RecipeKernel, ...] = ()
    """Kernel files in the recipe's folder."""


def file_digest(path: Path) -> str:
    """BLAKE2b-128 of a file, in hex."""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _recipe_file(path: str | Path) -> Path:
    path = Path(path).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise RecipeError(f"{file} does not exist; give a recipe folder or its {FILE}")
    return file


def load_recipe(path: str | Path) -> Recipe:
    """Read and check a recipe folder or file, including the digests of its kernel files."""
    file = _recipe_file(path)
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file} is not YAML: {error}; restore it or align again") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{file} holds no recipe; restore it or align again")
    version = content.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise RecipeError(
            f"{file} has schema_version {version}, this zm reads {SCHEMA_VERSION}; use the zm "
            "that wrote it"
        )
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
            for fault in error.errors()[:3]
        )
        raise RecipeError(
            f"{file} is no valid recipe ({faults}); correct it or align again"
        ) from error
    for kernel in recipe.kernels:
        _check_kernel(kernel, file.parent)
    return recipe


def _check_kernel(kernel: RecipeKernel, folder: Path) -> None:
    pure = PurePosixPath(kernel.path)
    file = folder / pure
    if pure.is_absolute() or not file.resolve().is_relative_to(folder.resolve()):
        raise RecipeError(
            f"kernel {kernel.path} lies outside {folder}; move it into the recipe's folder"
        )
    if not file.is_file():
        raise RecipeError(f"kernel {file} is missing; restore it or align again")
    found = file_digest(file)
    if found != kernel.digest:
        raise RecipeError(
            f"kernel {file} has digest {found}, the recipe certifies {kernel.digest}; restore the "
            "file, or align again with the new one"
        )


def save_recipe(recipe: Recipe, folder: str | Path) -> Path:
    """Write ``recipe.yaml`` into ``folder`` (made if needed) in one step; returns the file."""
    folder = Path(folder).expanduser()
    text = yaml.safe_dump(
        recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100
    )
    try:
        return replace_whole(folder / FILE, text)
    except OSError as error:
        raise DiskError(
            f"cannot write {folder / FILE}: {error}; free some space or choose another folder"
        ) from error


def check_identity(recipe: Recipe, identity: ModelIdentity) -> None:
    """Raise RecipeError naming both models unless the recipe belongs to this one."""
    own = recipe.model
    for what, ours, theirs in (
        ("architectures", own.model_type, identity.model_type),
        ("configs", own.config_digest, identity.config_digest),
        ("weights", own.weights_root, identity.weights_root),
    ):
        if ours != theirs:
            raise RecipeError(
                f"recipe {recipe.name} is for {own.spec} ({own.model_type}), not for "
                f"{identity.spec} "
                f"({identity.model_type}): the {what} differ ({ours} against {theirs}); "
                "align this model to get a recipe of its own"
            )
