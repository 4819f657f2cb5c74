"""Rotary tables from fp64: one row per position, the same bits in every batch.

Stock tables come from an fp32 product and a vectorised cosine. Ours are rows of one table: inverse
frequencies and angles in fp64, cosine and sine rounded once (contract ``rotary_table``), grown by
powers of two and indexed by position, so that a row depends on its position only.

The rope type must be one whose inverse frequencies are written down here; the module's own fp32
buffer proves that they are the right ones.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..kernels.errors import ContractError, UncoveredSiteError
from .bindings import kernel

_FIRST_ROWS = 256


def inverse_frequencies(module: nn.Module, layer_type: str | None = None) -> Tensor | None:
    """fp64 inverse frequencies ``[D / 2]`` of a rotary module; None for other rope types."""
    config = cast(Any, module).config
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    kind = parameters["rope_type"]
    own = cast(Tensor, getattr(module, f"{layer_type}_inv_freq" if layer_type else "inv_freq"))
    width = 2 * own.numel()
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    frequencies = 1.0 / (float(parameters["rope_theta"]) ** exponents)
    if kind == "linear":
        frequencies = frequencies / float(parameters["factor"])
    known = kind in ("default", "linear")
    close = known and torch.allclose(frequencies, own.double().cpu(), rtol=1e-5, atol=0.0)
    return frequencies if close else None


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
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows of the table for ``position_ids`` (any shape)."""
        longest = int(position_ids.max()) + 1 if position_ids.numel() else 1
        tables = self._tables.get(layer_type)
        if tables is None or tables[0].shape[0] < longest or tables[0].device != x.device:
            tables = self._build(longest, layer_type, x.device)
        return tables[0][position_ids], tables[1][position_ids]

    def _build(
        self, longest: int, layer_type: str | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        limit = int(cast(Any, self.module).config.max_position_embeddings)
        if longest > limit:
            raise ContractError(
                f"{self.name}: position {longest - 1} is past the model's length {limit}; shorten "
                "the request"
            )
        size = _FIRST_ROWS
        while size < longest:
            size *= 2
        suffix = f"{layer_type}_" if layer_type else ""
        scaling = float(getattr(self.module, f"{suffix}attention_scaling"))
        frequencies = inverse_frequencies(self.module, layer_type)
        table = kernel("rotary_table").rotary_table
        cos, sin = table(frequencies, torch.arange(size), scaling)
        self._tables[layer_type] = (cos.to(device), sin.to(device))
        return self._tables[layer_type]
