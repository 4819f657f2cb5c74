"""``zm inspect``: every operator site of a model, its class, and which contract serves it here.

    SiteRow(site="model.layers.0.mlp.up_proj", op_class="linear",
            contract="linear.chain.float32.cpu.v1", has_kernel=True, note="")

What the audit finds outside every site is listed too, with class ``uncovered``: that is what keeps
a plan from being applied.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .apply import Instrument
from .bindings import aligned_contract
from .models import LoadedModel
from .operators import ACTIVATIONS
from .plan import stock_plan
from .recognise import recognise
from .rotary_table import why_uncovered

UNCOVERED = "uncovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """One line of ``zm inspect``. note: why there is no kernel, where there is none."""

    site: str
    op_class: str
    contract: str | None
    has_kernel: bool
    note: str = ""


def inspect_model(
    loaded: LoadedModel,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> list[SiteRow]:
    """Sites of a loaded model for a dtype and device (its own by default)."""
    dtype, device = dtype or loaded.dtype, device or loaded.device
    instrument = Instrument(loaded.module, stock_plan(), "context")
    instrument.remove()
    special = _without_kernel(loaded.module)
    rows: list[SiteRow] = []
    for site in instrument.sites:
        contract = aligned_contract(site.op_class, dtype, device)
        note = "" if contract else f"no kernel contract for {site.op_class} here"
        if site.name in special:
            contract, note = None, special[site.name]
        rows.append(
            SiteRow(
                site=site.name, op_class=site.op_class, contract=contract,
                has_kernel=contract is not None, note=note,
            )
        )  # fmt: skip
    seen: set[tuple[str, str]] = set()
    for entry in instrument.audit.uncovered:
        if (entry.path, entry.function) not in seen:
            seen.add((entry.path, entry.function))
            rows.append(
                SiteRow(
                    site=entry.path or "(top level)", op_class=UNCOVERED, contract=None,
                    has_kernel=False, note=f"{entry.function} is outside every site",
                )
            )  # fmt: skip
    return rows


def _without_kernel(module: nn.Module) -> dict[str, str]:
    """Sites whose class has a contract that does not cover this variant, and why."""
    reasons: dict[str, str] = {}
    for operator in recognise(module):
        activation = operator.facts.get("activation", "silu")
        if operator.kind == "gated" and activation not in ACTIVATIONS:
            reasons[f"{operator.path}#gated"] = f"no kernel contract for {activation} here"
        elif operator.kind == "activation" and activation not in ACTIVATIONS:
            reasons[operator.path] = f"no kernel contract for {activation} here"
        elif operator.kind == "rotary_table" and (reason := why_uncovered(operator.module)):
            reasons[operator.path] = reason
    return reasons
