"""A person's tick for a contract that this package does not know.

    # model_recipes/org/model/ticks.yaml, beside recipe.yaml
    - {contract: tilt.fixed.float32.cpu.v1, digest: 5b..., by: Ada}

A recipe may bring a kernel whose bits nobody here has defined: an operator of its own, or other
bits for a known one. Its formula, order and rounding are then a person's to accept. Until the tick
is there, for this very file, the recipe is a proposal: drafts can be gated and localized, ``zm
recipe verify`` repeats its claims, and nothing else uses it. ``zm recipe tick DIR ID`` writes the
tick; no tool of an agent does, and no patch may touch the file.
"""

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..kernels.errors import DiskError, RecipeError, UsageError
from ..kernels.files import replace_whole
from .own_kernels import is_registered
from .schema import Recipe, RecipeKernel, load_recipe

FILE = "ticks.yaml"


class Tick(BaseModel):
    """One accepted contract, for one content of its kernel file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    contract: str
    digest: str
    """BLAKE2b-128 of the kernel file that was read."""
    by: str = Field(default="a person", max_length=200)


_TICKS = TypeAdapter(tuple[Tick, ...])


def read_ticks(folder: Path) -> tuple[Tick, ...]:
    """The ticks of a recipe's folder; RecipeError where the file cannot be understood."""
    file = folder / FILE
    if not file.is_file():
        return ()
    try:
        return _TICKS.validate_python(yaml.safe_load(file.read_text()) or ())
    except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file} holds no ticks; restore it or tick again") from error


def unticked(recipe: Recipe, folder: Path) -> tuple[RecipeKernel, ...]:
    """The recipe's kernels whose contracts wait for a person."""
    given = {(tick.contract, tick.digest) for tick in read_ticks(folder)}
    return tuple(
        own for own in recipe.kernels
        if not is_registered(own.contract) and (own.contract, own.digest) not in given
    )  # fmt: skip


def require_ticks(recipe: Recipe, folder: Path) -> None:
    """RecipeError for the first contract that waits for a person."""
    waiting = unticked(recipe, folder)
    if waiting:
        own = waiting[0]
        raise RecipeError(
            f"contract {own.contract} of recipe {recipe.name} is new and waits for a person's "
            f"tick: read {folder / own.path} (formula, order, rounding), then `zm recipe tick "
            f"{folder} {own.contract}`"
        )


def tick(folder: Path, contract: str, *, by: str = "a person") -> Tick:
    """Accept a contract of a recipe for the file as it is now."""
    recipe = load_recipe(folder)
    waiting = {own.contract: own for own in unticked(recipe, folder)}
    if contract not in waiting:
        names = ", ".join(waiting) or "none"
        raise UsageError(f"{contract} does not wait for a tick in {folder}; waiting: {names}")
    made = Tick(contract=contract, digest=waiting[contract].digest, by=by)
    write_ticks(folder, (*read_ticks(folder), made))
    return made


def write_ticks(folder: Path, ticks: tuple[Tick, ...]) -> Path:
    """Write the file whole."""
    text = yaml.safe_dump([each.model_dump() for each in ticks], sort_keys=False, width=200)
    try:
        return replace_whole(folder / FILE, text)
    except OSError as error:
        raise DiskError(f"cannot write {folder / FILE}: {error}; make it writable") from error
