"""Which kernels a patch brings, and which contract each says it serves.

    kernels_of(tree, ["model_recipes/org/model/kernels/norm.py"])     # [Brought(path=..., ...)]

A recipe names its kernels with contract and digest; a kernel that no recipe names, or whose digest
is another, is refused rather than guessed at. An operator's own files are judged by the certifying
sweep instead, for all contracts of that operator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...kernels.contract import contracts, implementations
from ...kernels.errors import RecipeError
from ...model_recipes.schema import load_recipe
from .records import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """A kernel of the patch. model: the recipe's, which may be what defines the operator."""

    path: str
    contract: str
    model: str | None = None

    @property
    def folder(self) -> PurePosixPath:
        """The recipe's folder."""
        return PurePosixPath(self.path).parents[1]


def kernels_of(
    tree: Path, paths: Sequence[str], given: Sequence[tuple[str, str]] = ()
) -> tuple[list[Brought], list[Refusal]]:
    """Every recipe kernel among ``paths``; what is wrong with the others."""
    found: list[Brought] = []
    refusals: list[Refusal] = []
    named = dict(given)
    for path in (*named, *(each for each in paths if each not in named)):
        pure = PurePosixPath(path)
        if path not in named and (len(pure.parts) != 5 or pure.parts[3] != "kernels"):
            continue
        if not (tree / path).exists():
            continue  # deleted
        folder = PurePosixPath(*pure.parts[:3])
        try:
            recipe = load_recipe(tree / folder)
        except RecipeError as error:
            if path in named:
                found.append(Brought(path=path, contract=named[path]))
            else:
                refusals.append(Refusal(rule="kernel", detail=str(error), path=path))
            continue
        spec = recipe.model.spec
        own = [entry.contract for entry in recipe.kernels if str(folder / entry.path) == path]
        own = [named[path]] if path in named else own
        if not own:
            detail = f"{folder}/recipe.yaml does not name it with a contract"
            refusals.append(Refusal(rule="kernel", detail=detail, path=path))
        found += [Brought(path=path, contract=contract, model=spec) for contract in own]
    return found, refusals


def operators_of(paths: Sequence[str]) -> list[str]:
    """Ids of the CPU contracts whose operator's folder is among ``paths``."""
    folders = {
        PurePosixPath(path).parts[1] for path in paths
        if path.startswith("kernels/") and len(PurePosixPath(path).parts) == 3
    }  # fmt: skip
    return [entry.id for entry in contracts(device="cpu") if folders & set(_folders(entry.id))]


def _folders(contract_id: str) -> Iterator[str]:
    """The folders in ``kernels`` whose code serves a contract."""
    for each in implementations(contract_id):
        module = getattr(each.run, "func", each.run).__module__
        yield module.removeprefix("zeromismatch.kernels.").split(".")[0]
