"""Keys and values that a listener put in the place of a step's own, in transformers' cache.

Later steps have to read them, too. Where attention computes from the cache's own tensors they are
written there. Kimi-Linear's cache holds latents and every step expands all of them anew: what was
put in is then kept here, for as long as the cache lives, and laid over the next step's rows.
"""

import weakref
from typing import Any, cast

import torch
from torch import Tensor

from .tap import from_head_rows

Pair = tuple[Tensor, Tensor]


class GraftedRows:
    """Of one attention layer. Tensors are ``[B, heads, positions, D]``, grafts ``[B * S, ...]``."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[object, Pair] = weakref.WeakKeyDictionary()

    def over(
        self, cache: object | None, layer: int, pair: Pair, tokens: int, grafted: Pair | None
    ) -> Pair:
        """Key and value with what was put in, earlier or now (``grafted``: the newest tokens)."""
        kept = None if cache is None else self._kept.get(cache)
        if grafted is None and kept is None:
            return pair
        key = pair[0]
        seen = key.shape[2] - tokens
        if kept is not None and kept[0].shape[2] >= seen:
            pair = _joined(kept, seen, (pair[0][:, :, seen:], pair[1][:, :, seen:]))
        if grafted is not None:
            new = cast(Pair, tuple(from_head_rows(each, key.shape[0]) for each in grafted))
            if cache is not None and _owned(cache, layer, key):
                for whole, part in zip(pair, new, strict=True):
                    whole[:, :, seen:] = part
                return pair
            pair = _joined(pair, seen, new)
        if cache is not None:
            self._kept[cache] = pair
        return pair


def _joined(before: Pair, seen: int, after: Pair) -> Pair:
    """``before`` up to position ``seen``, then ``after``."""
    joined = (
        torch.cat([old[:, :, :seen], new], dim=2) for old, new in zip(before, after, strict=True)
    )
    return cast(Pair, tuple(joined))


def _owned(cache: object, layer: int, key: Tensor) -> bool:
    """Whether these keys lie in the cache itself, so that writing into them lasts."""
    layers = getattr(cache, "layers", ())
    own: Any = getattr(layers[layer], "keys", None) if layer < len(layers) else None
    if not isinstance(own, Tensor):
        return False
    return own.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
