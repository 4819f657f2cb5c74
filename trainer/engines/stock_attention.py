"""Attention as the framework runs it, per request: what the stock plan means for our engines.

Scaled dot product attention over the same keys that the contract kernel would read, called as
transformers calls it (grouped heads without a mask, repeated heads with one; the eager formula
where there is a softcap or a sink). Uncertified: its bits depend on the number of query rows.
Packed requests of one length go through it together, as a batch: a call for each would cost a
trainer more than all else.
"""

from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# B requests, T query rows, S keys, H query heads, K key heads, D head size


def packed_stock_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, query_start: Tensor, **options: Any
) -> Tensor:
    """[T, H, D]: each of the packed requests by itself; differentiable.

    query_start: int32 [requests + 1], where each begins. options: of :func:`stock_attention`.
    """
    starts: defaultdict[int, list[int]] = defaultdict(list)  # by length
    for start, stop in pairwise(query_start.tolist()):
        starts[stop - start].append(start)
    rows: list[Tensor] = []
    parts: list[Tensor] = []
    for length, firsts in starts.items():
        at = torch.tensor(firsts)[:, None] + torch.arange(length)
        rows.append(at.flatten())
        where = rows[-1].to(q_THD.device)
        of_each = (
            x.index_select(0, where).view(len(firsts), length, *x.shape[1:])
            for x in (q_THD, k_TKD, v_TKD)
        )
        parts.append(_attend(*of_each, **options).flatten(0, 1))
    back = torch.cat(rows).argsort().to(q_THD.device)
    return torch.cat(parts).index_select(0, back)


def stock_attention(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[T, H, D]: the last T of S positions attend causally; ``window`` counts the row's own key."""
    q_BTHD, k_BSKD, v_BSKD = (x.unsqueeze(0) for x in (q_THD, k_SKD, v_SKD))
    options: dict[str, Any] = {
        "scale": scale, "window": window, "softcap": softcap, "sinks": sinks
    }  # fmt: skip
    return _attend(q_BTHD, k_BSKD, v_BSKD, **options).squeeze(0)


def _attend(
    q_BTHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BSKD, v_BSKD))
    rows, keys = q.shape[2], k.shape[2]
    seen = _visible(rows, keys, window, q.device)
    if softcap is not None or sinks is not None:
        out = _eager(q, k, v, seen, scale=scale, softcap=softcap, sinks=sinks)
    elif seen is None:
        out = F.scaled_dot_product_attention(
            q, k, v, scale=scale, is_causal=rows > 1, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        k, v = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return out.transpose(1, 2)


def _visible(rows: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool [rows, keys]; None where plain causality over equal ends needs no mask."""
    windowed = window is not None and keys > window
    if not windowed and rows in (1, keys):
        return None
    query = torch.arange(keys - rows, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    seen = key <= query
    return seen & (key > query - window) if window is not None else seen


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    heads, rows, keys = q.shape[1], q.shape[2], k.shape[2]
    scores = q @ _repeat(k, heads).transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if seen is None:
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.reshape(1, heads, 1, 1).expand(len(q), heads, rows, 1).to(scores.dtype)
        scores = torch.cat([scores, column], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return weights[..., :keys] @ _repeat(v, heads)
