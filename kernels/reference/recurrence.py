"""The definition of the recurrent layers' state arithmetic: ssd (Mamba-2), gated delta rule, KDA.

A request is cut into chunks of C rows from its position 0. Row i of a chunk reads the state S
[K, V] at the chunk's start and rows 0..i of the chunk, in this order, all fp32, per value head:

    D_ij = (((0 + g_i) + g_(i-1)) + ...) + g_(j+1)      log decay from row j to i; j = -1: from S
    e_ij = exp(D_ij), w_i = exp(D_i,-1)                 exp.cpu.v1, exactly 0 below its range
    a_ij = e_ij (q_i . k_j),  b_ij = e_ij (k_i . k_j)   dots in 16 lanes, then the tree
           KDA (g per channel): q_i . (e_ij k_j)        each product e k rounded
    r_i  = one FMA chain: sum_d (w_i k_i)_d S_d, d ascending from 0, then sum_(j<i) b_ij u_j
    u_i  = beta_i (v_i - r_i)                           ssd: u_i = v_i
    o_i  = one FMA chain: sum_d (w_i q_i)_d S_d, d ascending from 0, then sum_(j<=i) a_ij u_j
    S'   = w_last S, then one FMA each: + (e_last,j k_j) u_j, j ascending; once a chunk is full

Chunk 0 has no state: its chains begin with the sum over rows. Nothing depends on where a forward
pass begins or ends: earlier rows of the chunk come from pages (k, u and g as they were), later rows
do not enter. Value head h reads key head h // (HV // HK). ``stepwise`` is the other class: the
state after every token.

Frozen: what the fast kernels must equal bit for bit.

Legend: T rows, B requests, P pages, C rows per chunk, HK and HV key and value heads, K and V their
sizes, n rows of the chunk so far, m of them from earlier steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .fma import fma32
from .logprob import exp_or_zero
from .rmsnorm import dot_lanes


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk's rows of one request: which are new, and where they lie.

    rows: new rows of the call; page: where older ones lie; before: how many; index: which chunk.
    """

    request: int
    index: int
    page: int
    before: int
    rows: slice

    @property
    def total(self) -> int:
        """Rows of the chunk after the call."""
        return self.before + self.rows.stop - self.rows.start


def chunks(
    query_start: Tensor, length: Tensor, table: Tensor, size: int
) -> Iterator[Chunk]:
    """The chunks with new rows, by request, ascending."""
    for b in range(length.numel()):
        row, stop = int(query_start[b]), int(query_start[b + 1])
        position = int(length[b]) - (stop - row)
        while row < stop:
            index, before = divmod(position, size)
            count = min(size - before, stop - row)
            page = int(table[b, index]) if table.shape[1] > index else -1
            yield Chunk(b, index, page, before, slice(row, row + count))
            row, position = row + count, position + count


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    k_pages: Tensor,
    u_pages: Tensor,
    g_pages: Tensor,
    end_pages: Tensor,
    query_start: Tensor,
    length: Tensor,
    table: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(o, u [T, HV, V], ends [F, HV, K, V])`` of fp32 rows over pages of earlier ones.

    q, k [T, HK, K]; v [T, HV, V]; g [T, HV], or [T, HV, K] per channel; beta [T, HV], None for ssd.
    Pages: k [P, C, HK, K], u [P, C, HV, V], g [P, C, ...], end states [P, HV, K, V]. int32
    query_start [B + 1], length [B] after this call, table [B, widest]. ends: of the chunks that
    became full, by request, ascending. Pages are read only.
    """
    o, u, ends = torch.zeros_like(v), torch.zeros_like(v), []
    heads = range(v.shape[1])
    owner = torch.tensor([h // (v.shape[1] // k.shape[1]) for h in heads])
    state: Tensor | None = None
    for each in chunks(query_start, length, table, k_pages.shape[1]):
        rows, old = each.rows, slice(0, each.before)
        if each.index == 0:
            state = None
        elif rows.start == int(query_start[each.request]):
            state = end_pages[int(table[each.request, each.index - 1])]
        keys, gates = k[rows], g[rows]
        u_old = v[:0]
        if each.before:
            keys = torch.cat((k_pages[each.page, old], keys))
            gates = torch.cat((g_pages[each.page, old], gates))
            u_old = u_pages[each.page, old]
        chunk = Rows(q[rows][:, owner], keys[:, owner], gates)
        update = None if beta is None else beta[rows]
        o[rows], u_all = chunk.outputs(v[rows], update, u_old, state)
        u[rows] = u_all[each.before :]
        if each.total == k_pages.shape[1]:
            state = chunk.end(u_all, state)
            ends.append(state)
    shape = (0, v.shape[1], k.shape[2], v.shape[2])
    return o, u, torch.stack(ends) if ends else v.new_zeros(shape)


class Rows:
    """New rows q [n - m, HV, K] of a chunk with keys k [n, HV, K] and log decays g [n, HV(, K)]."""

    def __init__(self, q: Tensor, k: Tensor, g: Tensor) -> None:
        self.q, self.k, self.first = q, k, len(k) - len(q)
        between, start = decays(g)
        self.between, self.start = exp_or_zero(between), exp_or_zero(start)
        self.per_channel = g.dim() == 3

    def weighted(self, left: Tensor) -> Tensor:
        """``left_i . k_j`` with its decay, [rows, n, HV]; left is the new rows' q or k."""
        decay, left = self.between[self.first :], left[:, None]
        if self.per_channel:
            moved = decay * self.k
            return dot_lanes(left.expand_as(moved), moved)
        wide = (len(left), *self.k.shape)
        return decay * dot_lanes(left.expand(wide), self.k.expand(wide))

    def from_state(self, left: Tensor, state: Tensor | None, width: int) -> Tensor:
        """The part of a chain that reads the state, [rows, HV, V]."""
        total = torch.zeros(*left.shape[:2], width)
        if state is None:
            return total
        start = self.start[self.first :]
        moved = left * (start if self.per_channel else start[..., None])
        for d in range(left.shape[2]):
            total = fma32(moved[..., d, None], state[:, d], total)
        return total

    def outputs(
        self, v: Tensor, beta: Tensor | None, u_old: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``(o [rows, HV, V], u [n, HV, V])``."""
        first, width = self.first, v.shape[2]
        o, a = self.from_state(self.q, state, width), self.weighted(self.q)
        u = torch.cat((u_old, v))
        if beta is not None:
            self.substitute(u, v, beta, state)
        for j in range(len(u)):
            later = max(0, j - first)
            o[later:] = fma32(a[later:, j, :, None], u[j], o[later:])
        return o, u

    def substitute(self, u: Tensor, v: Tensor, beta: Tensor, state: Tensor | None) -> None:
        """Forward substitution: the new rows of u, in place."""
        first, new = self.first, self.k[self.first :]
        r, b = self.from_state(new, state, v.shape[2]), self.weighted(new)
        for j in range(len(u)):
            if j >= first:
                u[j] = beta[j - first, :, None] * (v[j - first] - r[j - first])
            later = max(0, j + 1 - first)
            r[later:] = fma32(b[later:, j, :, None], u[j], r[later:])

    def end(self, u: Tensor, state: Tensor | None) -> Tensor:
        """The state after the chunk's last row."""
        left, moved = self.between[-1], self.start[-1]
        keys = self.k * (left if self.per_channel else left[..., None])
        shape = (*self.k.shape[1:], u.shape[2])
        total = torch.zeros(shape)
        if state is not None:
            total = (moved[..., None] if self.per_channel else moved[:, None, None]) * state
        for j in range(len(u)):
            total = fma32(keys[j][..., None], u[j][:, None], total)
        return total


def decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """``D [n, n, ...]`` (0 where j >= i) and ``D_i,-1 [n, ...]`` of log decays g [n, ...]."""
    n = len(g)
    column, columns = torch.zeros_like(g), []
    index = torch.arange(n).view(n, *[1] * (g.dim() - 1))
    for j in range(n - 1, -2, -1):
        column = torch.where(index > j, column + (g[j + 1] if j + 1 < n else 0.0), 0.0)
        columns.append(column)
    start = columns.pop()
    return torch.stack(columns[::-1], dim=1), start


def stepwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    start: Tensor,
    query_start: Tensor,
) -> tuple[Tensor, Tensor]:
    """``(o [T, HV, V], end [B, HV, K, V])`` from states ``start``: the state after every token.

        S = exp(g) S;  u = beta (v - sum_d k_d S_d) or v;  S = fma(k, u, S);  o = sum_d q_d S_d

    Sums are FMA chains over d, ascending from 0.
    """
    group = v.shape[1] // k.shape[1]
    q, k = (each.repeat_interleave(group, dim=1) for each in (q, k))
    o, end = torch.zeros_like(v), start.clone()
    for b in range(len(start)):
        state = start[b]
        for t in range(int(query_start[b]), int(query_start[b + 1])):
            decay = exp_or_zero(g[t])
            state = (decay[..., None] if g.dim() == 3 else decay[:, None, None]) * state
            u = v[t]
            if beta is not None:
                u = beta[t, :, None] * (u - _read(k[t], state))
            state = fma32(k[t][..., None], u[:, None], state)
            o[t] = _read(q[t], state)
        end[b] = state
    return o, end


def _read(left: Tensor, state: Tensor) -> Tensor:
    total = torch.zeros_like(state[:, 0])
    for d in range(left.shape[1]):
        total = fma32(left[:, d, None], state[:, d], total)
    return total
