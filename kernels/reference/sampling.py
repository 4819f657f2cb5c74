"""The definition of ``sampling.gumbel.v1``: Gumbel-max with noise from an integer hash.

For row t with seed s, position p and temperature T (``mix`` and ``golden`` as in ``digest.v1``,
unsigned 64-bit, wrapping):

    key       = mix(golden * (p + 1) + mix(s ^ SEED_NOISE))
    h[v]      = mix(golden * (v + 1) + key)                      v: token id
    u[v]      = 1 + (h[v] >> 12) * 2**-52  -  (1 - 2**-53)       fp64, exact, inside (0, 1)
    score[v]  = fp64(fp32(logit[v] / T)) - log(-log(u[v]))
    token     = the lowest v with the largest score

T = 0 is greedy: score[v] = logit[v]. The division is the same fp32 division as in the logprob
contract, so the reported distribution is the sampled one. ``log`` is "log.fp64.v1": fdlibm's
polynomial, each step one IEEE operation and none fused, so that C++, torch on any device and a
Triton kernel agree. The noise depends on seed, position and token id and on nothing else: not on
batch, row or engine.

A row that cannot be sampled gives a negative reason: -1 NaN, -2 +inf, -3 nothing above -inf,
-4 logit / T overflows. Frozen: a change of any step is a new contract version.
"""

import torch
from torch import Tensor

from .digest import GOLDEN, mix, shift_right, signed

SEED_NOISE = 0x2545F4914F6CDD1D
NAN, POSITIVE_INFINITY, NOTHING, OVERFLOW = -1, -2, -3, -4
_MANTISSA = 0x000FFFFFFFFFFFFF
_ONE = 0x3FF0000000000000


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal fp64 numbers ("log.fp64.v1")."""
    bits = x.view(torch.int64)
    mantissa = bits & _MANTISSA
    above = (mantissa + 0x00095F619980C434) >> 52
    k = ((bits >> 52) - 1023 + above).to(torch.float64)
    m = (mantissa | (_ONE - (above << 52))).view(torch.float64)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (0.3999999999940941908 + w * (0.2222219843214978396 + w * 0.1531383769920937332))
    inner = 0.1818357216161805012 + w * 0.1479819860511658591
    odd = z * (0.6666666666666735130 + w * (0.2857142874366239149 + w * inner))
    half = (0.5 * f) * f
    low = s * (half + (odd + even)) + k * 1.90821492927058770002e-10
    return k * 6.93147180369123816490e-01 - ((half - low) - f)


def noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise fp64 [T, vocabulary] for int64 [T] seeds and positions."""
    key = mix((positions + 1) * signed(GOLDEN) + mix(seeds ^ SEED_NOISE))
    token = torch.arange(vocabulary, device=seeds.device)
    h = mix((token + 1) * signed(GOLDEN) + key[:, None])
    u = (shift_right(h, 12) | _ONE).view(torch.float64) - (1.0 - 2.0**-53)
    return -log(-log(u))


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor) -> Tensor:
    """Token ids int64 [T] (or negative reasons) from fp32 logits [T, V]; see the module's text."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    ids = torch.arange(vocabulary, device=logits.device)
    for row in range(rows):
        one, greedy = logits[row], bool(temperature[row] == 0)
        if greedy:
            score = one.to(torch.float64)
        else:
            gumbel = noise(seeds[row : row + 1], positions[row : row + 1], vocabulary)[0]
            score = (one / temperature[row]).to(torch.float64) + gumbel
        top = score.max()
        if bool(torch.isnan(one).any()):
            out[row] = NAN
        elif bool((one == float("inf")).any()):
            out[row] = POSITIVE_INFINITY
        elif bool(top == float("-inf")):
            out[row] = NOTHING
        elif bool(top == float("inf")):
            out[row] = OVERFLOW
        else:
            out[row] = torch.where(score == top, ids, vocabulary).min()
    return out
