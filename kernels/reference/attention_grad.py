"""The definition of ``attention_grad.pages16``: the gradient of packed causal attention, in fp32.

From the forward's maximum m and sum l (:mod:`.attention`), for a query t and a key j that it sees:

    p     = exp(s - m) / l,  s as in the forward
    dp    = one FMA chain over d, ascending, of dO * V;  delta = dO . O in 16 lanes, then the tree
    ds    = (p * (dp - delta)) * scale      with softcap: times fma(-tanh, tanh, 1) before scale
    dQ[t] = one FMA chain over the visible keys, ascending, of ds * K
    dK[j] = one FMA chain over the group's heads, ascending, and in each over the queries that see
            j, ascending, of ds * Q;        dV[j] the same of p * dO
    dsink = one FMA chain over all rows, ascending, of -(exp(sink - m) / l) * delta

Pages do not appear: each chain's order is that of positions. Frozen.
"""

import torch
from torch import Tensor

from .attention import tanh32
from .exp import exp32
from .fma import fma32
from .rmsnorm import dot_lanes


def attention_grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    peak: Tensor,
    total: Tensor,
    query_start: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``dq [T, H, D], dk, dv [T, HK, D], dsinks [H] or None``; fp32, requests back to back."""
    delta = dot_lanes(dout, out)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start, stop in query_start.long().unfold(0, 2, 1):
        rows = slice(int(start), int(stop))
        one = (dout[rows], q[rows], k[rows], v[rows], peak[rows], total[rows], delta[rows])
        dq[rows], dk[rows], dv[rows] = _request(*one, scale, window, softcap)
    if sinks is None:
        return dq, dk, dv, None
    dsinks = torch.zeros_like(sinks)
    for row in range(q.shape[0]):
        p = torch.where(sinks > -torch.inf, exp32(sinks - peak[row]) / total[row], 0.0)
        dsinks = fma32(-p, delta[row], dsinks)
    return dq, dk, dv, dsinks


def _request(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    peak: Tensor,
    total: Tensor,
    delta: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    count, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    group = heads // kv_heads
    where = torch.arange(count)
    seen = where[None] <= where[:, None]
    if window:
        seen &= where[None] > where[:, None] - window
    keys, values = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    s = _dots(q, keys) * torch.tensor(scale, dtype=torch.float32)
    slope = torch.tensor(1.0)
    if softcap:
        cap = torch.tensor(softcap, dtype=torch.float32)
        bent = tanh32(s / cap)
        s, slope = cap * bent, fma32(-bent, bent, slope)
    p = exp32(s - peak[..., None]) / total[..., None]
    ds = p * (_dots(dout, values) - delta[..., None]) * slope
    ds = ds * torch.tensor(scale, dtype=torch.float32)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for key in range(count):
        step = fma32(ds[..., key, None], keys[key], dq)
        dq = torch.where(seen[:, key, None, None], step, dq)
    for member in range(group):
        for query in range(count):
            mine = slice(member, None, group)
            visible = seen[query][:, None, None]
            weight = ds[query, mine].T[..., None]
            dk = torch.where(visible, fma32(weight, q[query, mine], dk), dk)
            weight = p[query, mine].T[..., None]
            dv = torch.where(visible, fma32(weight, dout[query, mine], dv), dv)
    return dq, dk, dv


def _dots(rows: Tensor, keys: Tensor) -> Tensor:
    """``[N, H, keys]``: one FMA chain over d for every row, head and key."""
    result = torch.zeros(rows.shape[0], rows.shape[1], keys.shape[0])
    for d in range(rows.shape[2]):
        result = fma32(rows[..., d, None], keys[None, :, :, d].transpose(1, 2), result)
    return result
