"""Which kernels a patch brings, and which contract each says it serves.

    kernels_of(tree, ["model_recipes/org/model/kernels/norm.py"])     # [("model_recipes/...", id)]

A recipe names its kernels with contract and digest; a kernel that no recipe names, or whose digest
is another, is refused rather than guessed at. An operator's own files are judged by the certifying
sweep instead, for all contracts of that operator.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from ...kernels.contract import contracts, implementations
from ...kernels.errors import RecipeError
from ...model_recipes.schema import load_recipe
from .records import Refusal


def kernels_of(
    tree: Path, paths: Sequence[str], given: Sequence[tuple[str, str]] = ()
) -> tuple[list[tuple[str, str]], list[Refusal]]:
    """(file, contract) of every recipe kernel among ``paths``; what is wrong with the others."""
    found: list[tuple[str, str]] = list(given)
    refusals: list[Refusal] = []
    named = {path for path, _ in given}
    for path in paths:
        pure = PurePosixPath(path)
        if path in named or len(pure.parts) != 5 or pure.parts[3] != "kernels":
            continue
        if not (tree / path).exists():
            continue  # deleted
        folder = PurePosixPath(*pure.parts[:3])
        try:
            recipe = load_recipe(tree / folder)
        except RecipeError as error:
            refusals.append(Refusal(rule="kernel", detail=str(error), path=path))
            continue
        own = [entry for entry in recipe.kernels if str(folder / entry.path) == path]
        if not own:
            detail = f"{folder}/recipe.yaml does not name it with a contract"
            refusals.append(Refusal(rule="kernel", detail=detail, path=path))
        found += [(path, entry.contract) for entry in own]
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
