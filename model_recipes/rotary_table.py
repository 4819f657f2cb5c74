"""Rotary tables from fp64: one row per position, the same bits in every batch.

Stock tables come from an fp32 product and a vectorised cosine. Ours are rows of one table: inverse
frequencies and angles in fp64, cosine and sine rounded once (contract ``rotary_table``), grown by
powers of two and indexed by position, so that a row depends on its position only.

The rope type must be one whose inverse frequencies are written down in :mod:`.rope`; the module's
own fp32 buffer proves that they are the right ones. A table has the width of the module's own:
every frequency twice, or once where the model's rotation takes half tables (gpt_oss).
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..kernels.errors import ContractError, UncoveredSiteError
from .bindings import kernel
from .rope import frequencies, grows_with_length

_FIRST_ROWS = 256


def inverse_frequencies(module: nn.Module, layer_type: str | None = None) -> Tensor | None:
    """fp64 inverse frequencies ``[D / 2]`` of a rotary module; None for other rope types."""
    config = cast(Any, module).config
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    own = cast(Tensor, getattr(module, f"{layer_type}_inv_freq" if layer_type else "inv_freq"))
    found = frequencies(parameters, 2 * own.numel())
    if found is None or not torch.allclose(found, own.double().cpu(), rtol=1e-5, atol=0.0):
        return None
    return found


def why_uncovered(module: nn.Module) -> str | None:
    """Why a rotary module has no table here; None when it has."""
    layer_types = getattr(module, "layer_types", None) or (None,)
    for layer_type in layer_types:
        if inverse_frequencies(module, layer_type) is None:
            parameters = cast(Any, module).config.rope_parameters
            kind = (parameters[layer_type] if layer_type else parameters)["rope_type"]
            return f"rope_type {kind!r} has frequencies that no rotary contract covers here"
    return None


class RotaryTable:
    """``(x, position_ids) -> (cos, sin)`` fp32, for one transformers rotary module."""

    def __init__(self, module: nn.Module, name: str) -> None:
        reason = why_uncovered(module)
        if reason is not None:
            raise UncoveredSiteError(
                f"{name}: {reason}; override this site with stock, or use `--plan stock`"
            )
        self.module = module
        self.name = name
        self._halves = _has_half_tables(module)
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows of the table for ``position_ids`` (any shape).

        A graph's capture cannot ask how long they are: it takes the table as it is, so whoever
        captures calls this once before, with the last position that a replay may have.
        """
        tables = self._tables.get(layer_type)
        if tables is not None and x.is_cuda and torch.cuda.is_current_stream_capturing():
            return tables[0][position_ids], tables[1][position_ids]
        longest = int(position_ids.max()) + 1 if position_ids.numel() else 1
        if tables is None or tables[0].shape[0] < longest or tables[0].device != x.device:
            tables = self._build(longest, layer_type, x.device)
        return tables[0][position_ids], tables[1][position_ids]

    def _build(
        self, longest: int, layer_type: str | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        limit = int(cast(Any, self.module).config.max_position_embeddings)
        if longest > limit:
            raise ContractError(
                f"{self.name}: position {longest - 1} is past the model's length {limit}"
                f"{_why_no_longer(self.module, layer_type)}; shorten the request"
            )
        size = _FIRST_ROWS
        while size < longest:
            size *= 2
        suffix = f"{layer_type}_" if layer_type else ""
        scaling = float(getattr(self.module, f"{suffix}attention_scaling"))
        found = inverse_frequencies(self.module, layer_type)
        table = kernel("rotary_table").rotary_table
        cos, sin = table(found, torch.arange(size), scaling)
        if self._halves:
            cos, sin = cos.chunk(2, dim=1)[0], sin.chunk(2, dim=1)[0]
        self._tables[layer_type] = (cos.to(device), sin.to(device))
        return self._tables[layer_type]


def _has_half_tables(module: nn.Module) -> bool:
    """Whether the module's own cos has each frequency once; found out by running it."""
    layer_types = getattr(module, "layer_types", None) or (None,)
    name = f"{layer_types[0]}_inv_freq" if layer_types[0] else "inv_freq"
    own = cast(Tensor, getattr(module, name))
    arguments = () if layer_types[0] is None else (layer_types[0],)
    position = torch.zeros(1, 1, dtype=torch.int64, device=own.device)
    cos, _ = module(torch.zeros(1, device=own.device), position, *arguments)
    return cos.shape[-1] == own.numel()


def _why_no_longer(module: nn.Module, layer_type: str | None) -> str:
    parameters = cast(Any, module).config.rope_parameters
    if not grows_with_length(parameters[layer_type] if layer_type else parameters):
        return ""
    return (
        ", where dynamic scaling takes one base from the longest sequence of the batch, so that a "
        "token's value would depend on its neighbours and on what comes later"
    )
