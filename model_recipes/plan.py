"""Plans: which contract serves each operator site.

    Plan(name="aligned-float32-cpu",
         rules={"linear": "linear.chain.float32.cpu.v1", "add": "pointwise.ieee.v1", ...})

A rule maps an operator class to a contract id, or to ``stock``: what the framework would run. An
override does the same for one site by name, and wins. ``stock`` covers every site and is
uncertified; ``aligned`` is what the registry offers for a dtype and device. There is no default
contract: a class without a rule is an error that names the site. Plans are data; :mod:`.apply` puts
one onto a module.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict, Field

from ..kernels.errors import RecipeError, UncoveredSiteError
from .bindings import OP_CLASSES, aligned_contract, check_contract, device_kind, dtype_name
from .candidate import parse_candidate
from .extension import FOLDER, is_draft, load_extension, op_classes, own_contracts
from .own_kernels import is_registered, is_served, serve_own_kernel
from .sites import Site

if TYPE_CHECKING:
    from .schema import ModelIdentity, Recipe, RecipeKernel

STOCK = "stock"


class Plan(BaseModel):
    """Operator class -> contract id or ``stock``, with overrides by site name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    """For people; two plans with equal rules are equal plans whatever their names."""
    rules: dict[str, str]
    """Operator class (see :class:`.sites.Site`) -> contract id or ``stock``."""
    overrides: dict[str, str] = Field(default_factory=dict)
    """Site name (``model.layers.0.mlp#gated``) -> contract id or ``stock``."""

    def choice(self, site: Site) -> str:
        """Contract id or ``stock`` for a site; raises when the plan says nothing about it."""
        chosen = self.overrides.get(site.name, self.rules.get(site.op_class))
        if chosen is None:
            raise UncoveredSiteError(
                f"plan {self.name} has no contract for {site.name} ({site.op_class}); add a rule "
                "for "
                f"{site.op_class}, or use `--plan stock` to see what differs"
            )
        return chosen

    @property
    def digest(self) -> str:
        """Digest of rules and overrides."""
        text = json.dumps([self.rules, self.overrides], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def is_stock(self) -> bool:
        """Whether every site runs what the framework would run."""
        return {*self.rules.values(), *self.overrides.values()} <= {STOCK}


def stock_plan() -> Plan:
    """What the framework would run, everywhere."""
    return Plan(name=STOCK, rules=dict.fromkeys((*OP_CLASSES, *op_classes()), STOCK))


def aligned_plan(
    dtype: torch.dtype | str, device: torch.device | str, sites: Iterable[Site] = ()
) -> Plan:
    """What the registry offers for a dtype and device; raises where a site's class has nothing."""
    sites = tuple(sites)
    classes = (*OP_CLASSES, *op_classes())
    offered = {op_class: aligned_contract(op_class, dtype, device) for op_class in classes}
    kind = f"{dtype_name(dtype)}-{device_kind(device)}"
    bare = sorted({site.op_class for site in sites if offered.get(site.op_class) is None})
    if bare:
        first = next(site.name for site in sites if site.op_class == bare[0])
        raise UncoveredSiteError(
            f"no kernel contract for {', '.join(bare)} at {kind} (first site: {first}); "
            "`zm kernels list` shows what there is"
        )
    rules = {op_class: contract for op_class, contract in offered.items() if contract is not None}
    return Plan(name=f"aligned-{kind}", rules=rules)


def load_own_kernels(spec: object, *, judging: bool = False) -> None:
    """Load the kernels that a draft or recipe folder brings: before a model's sites are looked for.

    Those for contracts of this package are offered to certified dispatch (:mod:`.own_kernels`),
    others become operators of their own (:mod:`.extension`), once a person has ticked them; judging
    a recipe does not wait for that. Anything that is no path of a draft or recipe is left alone.
    """
    from .schema import load_recipe
    from .ticks import require_ticks

    if not isinstance(spec, str | Path) or spec in (STOCK, "aligned") or not Path(spec).exists():
        return
    folder = Path(spec)
    if is_draft(folder):
        for own in draft_kernels(folder):
            _load_kernel(folder, own)
        return
    place = folder if folder.is_dir() else folder.parent
    recipe = load_recipe(folder)
    if not judging:
        require_ticks(recipe, place)
    for own in recipe.kernels:
        _load_kernel(place, own)


def _load_kernel(folder: Path, own: "RecipeKernel") -> None:
    if is_registered(own.contract):
        serve_own_kernel(folder, own)
    else:
        load_extension(folder / own.path)


def draft_kernels(folder: Path) -> "tuple[RecipeKernel, ...]":
    """A draft's kernels as a recipe would name them, in the order of their names.

    RecipeError for a file that says neither what it brings (``CONTRACT``, ``MODULES``) nor which
    contract it is for (``SERVES``).
    """
    from .schema import RecipeKernel, file_digest

    found: list[RecipeKernel] = []
    for path in sorted((folder / FOLDER).glob("*.py")):
        source = parse_candidate(path, path.read_bytes())
        contract = source.serves or (source.declared or {}).get("id")
        if not isinstance(contract, str) or (source.serves and not is_registered(contract)):
            raise RecipeError(
                f"{path.name} says in neither CONTRACT and MODULES nor SERVES what it computes, or "
                "names no registered contract; `zm kernels list` shows them"
            )
        found.append(
            RecipeKernel(contract=contract, path=f"{FOLDER}/{path.name}", digest=file_digest(path))
        )
    return tuple(found)


def plan_from(
    spec: "str | Path | Plan | Recipe",
    sites: Iterable[Site],
    dtype: torch.dtype | str,
    device: torch.device | str,
    identity: "ModelIdentity | None" = None,
) -> Plan:
    """The plan that ``spec`` names, checked against the sites.

    spec: ``stock``, ``aligned``, a recipe folder or file, a recipe, or a plan. identity: the model
    that a recipe must belong to.

    Raises RecipeError (unreadable, another model, dtype or device, kernels of its own, an override
    for no site, an unknown contract) and UncoveredSiteError (a site without a rule).
    """
    from .schema import Recipe, check_identity, load_recipe

    sites = tuple(sites)
    if isinstance(spec, str) and spec == STOCK:
        return stock_plan()
    if isinstance(spec, str) and spec == "aligned":
        return aligned_plan(dtype, device, sites)
    if isinstance(spec, str | Path):
        if not Path(spec).exists():
            raise RecipeError(
                f"plan {str(spec)!r} is neither stock, aligned nor a recipe; check the path"
            )
        load_own_kernels(spec)
        if is_draft(Path(spec)):
            return aligned_plan(dtype, device, sites)
        spec = load_recipe(spec)
    if isinstance(spec, Recipe):
        if identity is not None:
            check_identity(spec, identity)
        missing = [
            own.contract for own in spec.kernels
            if own.contract not in own_contracts() and not is_served(own)
        ]  # fmt: skip
        if missing:
            raise RecipeError(
                f"recipe {spec.name} brings its own kernels, and the one for {missing[0]} is not "
                "loaded; give the recipe's folder instead of its content"
            )
        wanted, have = (spec.dtype, spec.device), (dtype_name(dtype), device_kind(device))
        if wanted != have:
            raise RecipeError(
                f"recipe {spec.name} is for {' on '.join(wanted)}, this run is "
                f"{' on '.join(have)}; "
                "choose --dtype and --device to match, or align again"
            )
        spec = spec.plan
    check_plan(spec, sites, dtype, device)
    return spec


def check_plan(
    plan: Plan, sites: Iterable[Site], dtype: torch.dtype | str, device: torch.device | str
) -> None:
    """Every rule names a contract that serves its class here, every override an existing site."""
    sites = tuple(sites)
    unknown = sorted(set(plan.rules) - {*OP_CLASSES, *op_classes()})
    if unknown:
        raise RecipeError(
            f"plan {plan.name} has a rule for {unknown[0]!r}, which is no operator class; "
            f"use one of {', '.join(OP_CLASSES)}"
        )
    names = {site.name for site in sites}
    stray = sorted(set(plan.overrides) - names)
    if stray and names:
        raise RecipeError(
            f"plan {plan.name} overrides {stray[0]!r}, which is no site of this model; "
            "`zm inspect MODEL` lists the sites"
        )
    for op_class, contract in plan.rules.items():
        if contract != STOCK:
            check_contract(contract, op_class, dtype, device)
    for site in sites:
        choice = plan.choice(site)
        if choice != STOCK:
            check_contract(choice, site.op_class, dtype, device)
