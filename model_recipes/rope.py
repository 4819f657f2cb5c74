"""Inverse frequencies of rotary embedding in fp64, for the scalings that transformers knows.

    default    base ** (-2 i / R)
    linear     divided by factor: positions pressed together
    llama3     low frequencies divided by factor, high ones kept, interpolated in between
    yarn       the same over columns; cos and sin are scaled too (the module says by how much)
    dynamic    default while every sequence fits the model's length, refused beyond

Each formula is transformers' own (``modeling_rope_utils.py``) with fp64 in the place of fp32; the
module's fp32 buffer must then agree, so that a changed formula is noticed and not followed.

Dynamic NTK beyond the model's length has no table: transformers takes one base for a whole batch,
from its longest sequence, and leaves cached keys rotated by an older one. A token's value then
depends on its neighbours and on tokens after it; no schedule-independent number exists.

Legend: R rotated columns, i = 0 .. R / 2 - 1.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Parameters = Mapping[str, Any]


def frequencies(parameters: Parameters, width: int) -> Tensor | None:
    """fp64 ``[R / 2]`` for a config's rope parameters; None for an unknown type."""
    scaled = _SCALED.get(parameters["rope_type"])
    return None if scaled is None else scaled(parameters, width)


def grows_with_length(parameters: Parameters) -> bool:
    """Whether tables change once a sequence is longer than the model's length."""
    return parameters["rope_type"] == "dynamic"


def _default(parameters: Parameters, width: int) -> Tensor:
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    return 1.0 / (float(parameters["rope_theta"]) ** exponents)


def _linear(parameters: Parameters, width: int) -> Tensor:
    return _default(parameters, width) / float(parameters["factor"])


def _llama3(parameters: Parameters, width: int) -> Tensor:
    plain = _default(parameters, width)
    factor, low, high = (
        float(parameters[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    length = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / plain
    smooth = ((length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - smooth) * plain / factor + smooth * plain


def _yarn(parameters: Parameters, width: int) -> Tensor | None:
    if parameters["factor"] is None:
        return None
    base, factor = float(parameters["rope_theta"]), float(parameters["factor"])
    length = float(parameters["original_max_position_embeddings"])

    def column(rotations: float) -> float:
        """Where a frequency turns this often over the original length."""
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = column(parameters.get("beta_fast") or 32)
    high = column(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0.0
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0.0, 1.0)
    plain = _default(parameters, width)
    return plain / factor * ramp + plain * (1.0 - ramp)


_SCALED: dict[str, Callable[[Parameters, int], Tensor | None]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _default,
}
