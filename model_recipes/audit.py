"""The coverage audit: run the instrumented model once and account for every torch function.

Each function that runs outside a site must be data movement or one exact IEEE operation per element
(the tables of :mod:`.watch`); anything else computes a number that no contract covers, and is named
with its module path. The probe also finds the inline adds and products and gives all sites in
execution order.

    UncoveredSiteError: no contract covers model.layers.0.mlp: torch.softmax; run `zm inspect MODEL`
    ...

Attention itself is a site, so the probe's context need not compute any: it returns zeros.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.errors import UncoveredSiteError
from .recurrent import WholeRequests
from .sites import Site
from .watch import Uncovered

PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Audit:
    """Sites in execution order, and what ran outside them."""

    executed: tuple[Site, ...]
    uncovered: tuple[Uncovered, ...]

    def check(self) -> None:
        """Raise UncoveredSiteError naming every uncovered function."""
        if not self.uncovered:
            return
        functions: dict[str, list[str]] = {}
        for entry in self.uncovered:
            seen = functions.setdefault(entry.path or "(top level)", [])
            if entry.function not in seen:
                seen.append(entry.function)
        listed = "; ".join(f"{path}: {', '.join(names)}" for path, names in functions.items())
        raise UncoveredSiteError(
            f"no contract covers {listed}. Run `zm inspect MODEL` for all sites; an operator that "
            "is "
            "missing there needs a kernel file in a draft's kernels/, with the draft as --plan "
            "(`zm playbook day-0`, step 5)"
        )


@dataclass(frozen=True, slots=True)
class ProbeContext(WholeRequests):
    """A context whose attention computes nothing: the audit looks at everything else."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> Tensor:
        """Zeros of the output's shape."""
        return q.new_zeros(*q.shape[:2], v.shape[-1])


def probe_inputs(module: nn.Module, mode: str) -> dict[str, Any]:
    """Keyword arguments of one small forward: two sequences (context: packed into one row)."""
    device = next(module.parameters()).device
    ids = torch.arange(2 * PROBE_TOKENS, device=device)
    if mode == "context":
        positions = torch.arange(PROBE_TOKENS, device=device).repeat(2)[None]
        packed = {"input_ids": ids[None], "position_ids": positions}
        starts = torch.arange(3, dtype=torch.int32, device=device) * PROBE_TOKENS
        return packed | {"use_cache": False, "batch": ProbeContext(starts)}
    return {"input_ids": ids.reshape(2, PROBE_TOKENS), "use_cache": False}
