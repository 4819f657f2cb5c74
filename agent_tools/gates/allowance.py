"""How far from fp64 a gradient may be: judged by stock's error, where stock's error is a sample.

In bf16 the error of one parameter's gradient is one draw: of 272 parameters of SmolLM2, one is off
by 39 % under stock kernels and by 39 % under a plan (another loss: 24 % each), most by 5 %. The
largest of so many draws says little of another largest, and as a limit for all of them it lets a
linear layer be off by what only that norm's weight ever is. So errors are pooled before they are
compared, and a parameter is held to what is usual for its like:

    a class   the gradients of one weight in all layers as one vector (`layers.*.mlp.up_proj`):
              its error over its norm at most twice stock's of that class, or of the whole gradient
              where that is more
    a weight  at most four times that level, or four times stock's error of that very weight; so is
              a class of fewer than 64 numbers, which is a single draw, too (`A_log` of a reduced
              Qwen3-Next: six seeds gave 0.35 to 2.39 times stock's, geometric mean 0.9)
    all       the mean over weights at most twice stock's

Nothing may exceed what the contracts allow. Three losses of SmolLM2 in bf16 on a CPU gave classes
of 0.58 to 1.10 and weights of 0.28 to 2.40 times stock's.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

POOLED, SINGLE = 2.0, 4.0
FEW = 64
_LAYER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Error:
    """off: norm of the error; size: norm of the exact gradient; numbers: how many it has."""

    off: float
    size: float
    numbers: int = FEW

    @property
    def relative(self) -> float:
        """Infinite where there is no gradient."""
        return self.off / max(self.size, 1e-300)


def errors_of(ours: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, Error]:
    """Per parameter."""
    return {
        name: Error(
            float((ours[name].double() - grad).norm()) if name in ours else math.inf,
            float(grad.norm()),
            grad.numel(),
        )
        for name, grad in exact.items()
    }


def pooled(errors: Iterable[Error]) -> float:
    """Relative error of all these as one vector."""
    listed = list(errors)
    return Error(
        math.hypot(*(e.off for e in listed)), math.hypot(*(e.size for e in listed))
    ).relative


def mean(errors: Mapping[str, Error]) -> float:
    """Of the relative errors."""
    return math.fsum(each.relative for each in errors.values()) / max(1, len(errors))


def classes_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Names without the layer's number, and whose they are."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_LAYER.sub(".*", name), []).append(name)
    return found


def too_far(
    errors: Mapping[str, Error], stock: Mapping[str, Error], bound: float
) -> tuple[list[str], float]:
    """The parameters that break a rule of the module, and the worst class's error over stock's."""
    whole, beyond, worst = pooled(stock.values()), list[str](), 0.0
    for names in classes_of(errors).values():
        own = pooled(errors[name] for name in names)
        level = max(whole, pooled(stock[name] for name in names))
        worst = max(worst, own / max(level, 1e-300))
        few = sum(errors[name].numbers for name in names) < FEW
        every = not own <= min(bound, (SINGLE if few else POOLED) * level)
        beyond += [
            name
            for name in names
            if every
            or not errors[name].relative <= min(bound, SINGLE * max(level, stock[name].relative))
        ]
    everywhere = mean(errors) > POOLED * mean(stock)
    return (list(errors) if everywhere else beyond), worst
