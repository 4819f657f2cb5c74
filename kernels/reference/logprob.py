"""The definition of ``logprob.lanes16.float32.cpu.v1`` and of its gradient, in plain torch.

    z = logit / T        m = max z        s = sum exp(z - m)        lp = (z_target - m) - log s

All in fp32 with IEEE division, always performed. The sum runs in 16 lanes: column v goes to lane v
% 16, columns ascending; lanes beyond the vocabulary add nothing; then the tree of
:func:`.exp.sum_lanes`. Terms with z - m below -87.33654 are exactly zero. A NaN logit makes its row
NaN. ``log32`` is the logarithm's definition (``log.series.v1``): the artanh series in fp64, every
operation rounded, nothing fused, one final rounding to fp32.

Gradient, from the saved m and log s:  d_logit = (grad * (onehot - exp((z - m) - log s))) / T.

Frozen: what the fast kernels must equal bit for bit. Legend: T rows, V vocabulary.
"""

import torch
from torch import Tensor

from .exp import LANES, exp32, sum_lanes
from .linear import linear

EXP_FLOOR = -87.33654
_LN2 = 0.69314718055994530942
_SQRT_HALF = 0.70710678118654752440
_HIGHEST_POWER = 23


def exp_or_zero(x: Tensor) -> Tensor:
    """exp32, but exactly 0 below the smallest argument that it reduces."""
    floor = torch.tensor(EXP_FLOOR, dtype=torch.float32, device=x.device)
    return torch.where(x < floor, 0.0, exp32(x))


def log32(s: Tensor) -> Tensor:
    """log of fp32 numbers of at least 1; NaN and infinity pass through."""
    fraction, exponent = torch.frexp(s.double())
    small = fraction < _SQRT_HALF
    fraction = torch.where(small, fraction * 2.0, fraction)
    exponent = exponent.double() - small.double()
    r = (fraction - 1.0) / (fraction + 1.0)
    q = r * r
    p = torch.full_like(q, 1.0 / _HIGHEST_POWER)
    for power in range(_HIGHEST_POWER - 2, 0, -2):
        p = p * q + 1.0 / power
    series = (exponent * _LN2 + (2.0 * r) * p).float()
    return torch.where(torch.isfinite(s), series, s)


def logprob(
    logits_TV: Tensor, targets_T: Tensor, temperature_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(lp, row maximum, log of the row sum), each fp32 [T]."""
    rows, vocabulary = logits_TV.shape
    z = logits_TV / temperature_T[:, None]
    row_max = z.amax(dim=1) + 0.0  # one zero, not two
    lanes = torch.zeros(rows, LANES, dtype=torch.float32, device=z.device)
    for v in range(0, vocabulary, LANES):
        terms = exp_or_zero(z[:, v : v + LANES] - row_max[:, None])
        width = terms.shape[1]
        lanes[:, :width] = lanes[:, :width] + terms
    log_sum = log32(sum_lanes(lanes))
    chosen = z.gather(1, targets_T[:, None])[:, 0]
    return (chosen - row_max) - log_sum, torch.where(log_sum.isnan(), log_sum, row_max), log_sum


def grad_logits(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature_T: Tensor,
    row_max_T: Tensor,
    log_sum_T: Tensor,
    grad_T: Tensor,
    out_TV: Tensor | None = None,
) -> Tensor:
    """d_logits fp32 [T, V] from the saved row maximum and log-sum, into ``out`` if given."""
    z = logits_TV / temperature_T[:, None]
    p = exp_or_zero((z - row_max_T[:, None]) - log_sum_T[:, None])
    onehot = torch.zeros_like(z).scatter_(1, targets_T[:, None], 1.0)
    d_logits = (grad_T[:, None] * (onehot - p)) / temperature_T[:, None]
    return d_logits if out_TV is None else out_TV.copy_(d_logits)


def lm_head(h_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """fp32 logits [T, V]: ``lm_head.chain.*.cpu.v1``, the chain of ``linear`` not rounded."""
    return linear(h_TH, weight_VH, bias_V, torch.float32)
