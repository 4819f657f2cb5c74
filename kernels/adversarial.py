"""Data on which a changed order or a moved rounding shows.

On normally distributed numbers, sums in another order often round to the same value, and most wrong
kernels pass. These generators make such luck unlikely: pairs that cancel (+2^k and -2^k, far apart
along the reduced axis) with tiny addends between them, exponents spread over many binades, rows of
very different scale, exact zeros of both signs. Everything is drawn from a seed, so a failure
repeats.

    x = adversarial.rows(40, 576, seed=7)             # fp32 [40, 576]
    w = adversarial.rows(24, 576, seed=8, scale=0.1)

Data is finite and moderate enough that no product chain overflows fp32.
"""

import torch
from torch import Tensor

KINDS = ("cancelling", "wide", "unequal", "plain")


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cancelling(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Pairs +2^k, -2^k at random distant columns; small numbers everywhere else."""
    x = torch.randn(rows, width, generator=generator) * 2.0**-6
    pairs = width // 4
    if pairs:
        columns = torch.rand(rows, width, generator=generator).argsort(dim=1)[:, : 2 * pairs]
        power = torch.randint(0, 13, (rows, pairs), generator=generator)
        mantissa = 1.0 + torch.rand(rows, pairs, generator=generator)
        large = mantissa * torch.exp2(power.to(torch.float32))
        x.scatter_(1, columns, torch.cat((large, -large), dim=1))
    return x


def wide(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Exponents spread over 24 binades, both signs, a few exact zeros of both signs."""
    power = torch.randint(-14, 11, (rows, width), generator=generator).to(torch.float32)
    sign = torch.randint(0, 2, (rows, width), generator=generator) * 2.0 - 1.0
    x = sign * (1.0 + torch.rand(rows, width, generator=generator)) * torch.exp2(power)
    zero = torch.rand(rows, width, generator=generator) < 0.02
    return torch.where(zero, sign * 0.0, x)


def unequal(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Normal numbers, every row at a scale of its own between 2^-10 and 2^10."""
    power = torch.randint(-10, 11, (rows, 1), generator=generator).to(torch.float32)
    return torch.randn(rows, width, generator=generator) * torch.exp2(power)


def plain(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Normal numbers: what a trained model's activations mostly look like."""
    return torch.randn(rows, width, generator=generator)


_MAKERS = {"cancelling": cancelling, "wide": wide, "unequal": unequal, "plain": plain}


def rows(
    num_rows: int,
    width: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    scale: float = 1.0,
    kind: str | None = None,
) -> Tensor:
    """[num_rows, width] of one kind, or of all kinds in turn by row; drawn on the CPU."""
    generator = _generator(seed)
    if kind is not None:
        x = _MAKERS[kind](num_rows, width, generator)
    else:
        share = -(-num_rows // len(KINDS))
        parts = torch.stack([_MAKERS[name](share, width, generator) for name in KINDS], dim=1)
        x = parts.reshape(-1, width)[:num_rows]
    return (x * scale).to(dtype).to(device)


def integers(shape: tuple[int, ...], high: int, *, seed: int, device: str = "cpu") -> Tensor:
    """int64 in [0, high), with both ends present where there is room."""
    x = torch.randint(0, high, shape, generator=_generator(seed))
    flat = x.view(-1)
    if flat.numel() > 1:
        flat[0], flat[-1] = high - 1, 0
    return x.to(device)


def misaligned(x: Tensor) -> Tensor:
    """The same values in memory that starts one element off: no vector load in it is aligned."""
    store = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    view = store[1:].view(x.shape)
    return view.copy_(x)
