"""The gradient of :mod:`.recurrence` over whole requests, from the states at chunk boundaries.

Chunks of a request are walked backwards with dS' [K, V], the gradient of the state at a chunk's end
(none after the last). Per value head, with a, b, e, w, S and the chains of the forward repeated:

    du_j  = one FMA chain: sum_d (e_last,j k_j)_d dS'_d, then for i descending to j: a_ij do_i, and
            b_ij dr_i where i > j;  dr_i = -(beta_i du_i),  dv_i = beta_i du_i,
            dbeta_i = du_i . (v_i - r_i);  ssd: dv_i = du_i
    da_ij = do_i . u_j (j <= i),  db_ij = dr_i . u_j (j < i),  x_i = do_i S^T,  y_i = dr_i S^T,
    z_j   = dS' u_j
    dq_i  = chain from w_i x_i: (da_ij e_ij) k_j, j ascending
    dk_i  = chain from w_i y_i: (db_ij e_ij) k_j, j ascending; then for i' ascending from i:
            (da_i'i e_i'i) q_i', and (db_i'i e_i'i) k_i' where i' > i; last e_last,i z_i
    dS    = w_last dS', then for i ascending: (w_i q_i) do_i, (w_i k_i) dr_i
    dD_ij = da_ij a_ij + db_ij b_ij (fma, j < i), to which the last row adds e_last,j (k_j . z_j);
    dD_i,-1 = w_i (q_i . x_i + k_i . y_i), the last row adds w_last (sum_d S_d . dS'_d)
    dg_m  = sum over i ascending from m of (sum over j ascending from -1 to m - 1 of dD_ij)

KDA keeps the channels apart: e_ij k_j in place of the pair (e_ij, k_j), t_ij = fma(da_ij, q_i,
db_ij k_i), dk_j += e_ij t_ij, dD_ij = (e_ij k_j) t_ij, and no sums over d. Dots have 16 lanes and
the tree. Value heads of one key head are added ascending. Whole requests only, so pages play no
part, and no request's gradient reads another's rows.

Frozen. Legend: as in :mod:`.recurrence`.
"""

import torch
from torch import Tensor

from .fma import fma32
from .recurrence import Rows, chunks
from .rmsnorm import dot_lanes

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def recurrence_grad(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    u: Tensor,
    ends: Tensor,
    query_start: Tensor,
    size: int,
) -> Gradients:
    """``(dq, dk, dv, dg, dbeta)`` like q, k, v, g, beta; u and ends as the forward gave them."""
    group = v.shape[1] // k.shape[1]
    wide_q, wide_k = (each.repeat_interleave(group, dim=1) for each in (q, k))
    dq, dk, dv, dg = (torch.zeros_like(each) for each in (wide_q, wide_k, v, g))
    dbeta = None if beta is None else torch.zeros_like(beta)
    length = query_start.diff()
    table = torch.zeros(length.numel(), 0, dtype=torch.int32)
    parts = list(chunks(query_start, length, table, size))
    full, place = 0, []
    for each in parts:
        place.append(full)
        full += each.total == size
    d_end: Tensor | None = None
    for each, end in zip(reversed(parts), reversed(place), strict=True):
        rows = each.rows
        if rows.stop == int(query_start[each.request + 1]):
            d_end = None
        state = ends[end - 1] if each.index else None
        chunk = _Chunk(wide_q[rows], wide_k[rows], g[rows], state, d_end)
        update = None if beta is None else beta[rows]
        dv[rows], d_update = chunk.values(d_o[rows], v[rows], update, u[rows])
        if dbeta is not None and d_update is not None:
            dbeta[rows] = d_update
        dq[rows], dk[rows] = chunk.keys()
        dg[rows] = chunk.gates()
        d_end = chunk.start_state()
    return _by_key_head(dq, group), _by_key_head(dk, group), dv, dg, dbeta


def _by_key_head(x: Tensor, group: int) -> Tensor:
    parts = x.unflatten(1, (-1, group))
    total = parts[:, :, 0]
    for h in range(1, group):
        total = total + parts[:, :, h]
    return total.contiguous()


class _Chunk:
    """One chunk of one request: n rows of q, k [n, HV, K], S and dS' [HV, K, V] or None."""

    def __init__(
        self, q: Tensor, k: Tensor, g: Tensor, state: Tensor | None, d_end: Tensor | None
    ) -> None:
        self.q, self.k, self.state, self.d_end = q, k, state, d_end
        self.rows = Rows(q, k, g)
        self.count, self.per_channel = len(q), g.dim() == 3
        self.e, self.w = self.rows.between, self.rows.start
        self.a, self.b = self.rows.weighted(q), self.rows.weighted(k)
        self.d_r: Tensor | None = None

    def values(
        self, d_o: Tensor, v: Tensor, beta: Tensor | None, u: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """``(dv, dbeta)``; keeps da, db, x, y and z for the rest."""
        self.d_o, n = d_o, self.count
        d_u = torch.zeros_like(v)
        if self.d_end is not None:
            moved = self.e[-1] * self.k if self.per_channel else self.e[-1][..., None] * self.k
            for d in range(self.k.shape[2]):
                d_u = fma32(moved[..., d, None], self.d_end[:, d], d_u)
        d_r = torch.zeros_like(v)
        for i in range(n - 1, -1, -1):
            d_u[: i + 1] = fma32(self.a[i, : i + 1, :, None], d_o[i], d_u[: i + 1])
            if beta is not None:
                d_r[i] = -(beta[i, :, None] * d_u[i])
                d_u[:i] = fma32(self.b[i, :i, :, None], d_r[i], d_u[:i])
        self.d_a = _pairs(d_o, u)
        self.x = None if self.state is None else _through(d_o, self.state)
        self.z = None if self.d_end is None else _through(u, self.d_end)
        if beta is None:
            return d_u, None
        self.d_r, self.d_b = d_r, _pairs(d_r, u)
        self.y = None if self.state is None else _through(d_r, self.state)
        r = self.rows.from_state(self.k, self.state, v.shape[2])
        for j in range(n):
            r[j + 1 :] = fma32(self.b[j + 1 :, j, :, None], u[j], r[j + 1 :])
        return beta[..., None] * d_u, dot_lanes(d_u, v - r)

    def keys(self) -> tuple[Tensor, Tensor]:
        """``(dq, dk)`` per value head."""
        start = self.w if self.per_channel else self.w[..., None]
        dq = torch.zeros_like(self.q) if self.x is None else start * self.x
        dk = torch.zeros_like(self.k)
        if self.d_r is not None and self.y is not None:
            dk = start * self.y
        self.d_between = torch.zeros_like(self.e)
        for j in range(self.count):
            dq[j:] = self._row_part(dq[j:], self.d_a, j, j)
            if self.d_r is not None:
                dk[j + 1 :] = self._row_part(dk[j + 1 :], self.d_b, j, j + 1)
        for i in range(self.count):
            dk[: i + 1] = self._column_part(dk[: i + 1], i)
        if self.z is not None:
            dk = fma32(self.e[-1] if self.per_channel else self.e[-1][..., None], self.z, dk)
        return dq, dk

    def _row_part(self, total: Tensor, weight: Tensor, j: int, first: int) -> Tensor:
        weight, e = weight[first:, j], self.e[first:, j]
        if self.per_channel:
            return fma32(weight[..., None], e * self.k[j], total)
        return fma32((weight * e)[..., None], self.k[j], total)

    def _column_part(self, total: Tensor, i: int) -> Tensor:
        """Row i's part in dk of rows 0..i, and in dD."""
        d_a, e = self.d_a[i, : i + 1], self.e[i, : i + 1]
        if self.per_channel:
            t = d_a[..., None] * self.q[i]
            if self.d_r is not None:
                lower = self.d_b[i, :i, :, None] * self.k[i]
                t[:i] = fma32(d_a[:i, :, None], self.q[i], lower)
            self.d_between[i, :i] = (e * self.k[: i + 1] * t)[:i]
            return fma32(e, t, total)
        total = fma32((d_a * e)[..., None], self.q[i], total)
        d_between = d_a * self.a[i, : i + 1]
        if self.d_r is not None:
            d_b = self.d_b[i, :i]
            total[:i] = fma32((d_b * e[:i])[..., None], self.k[i], total[:i])
            d_between[:i] = fma32(d_a[:i], self.a[i, :i], d_b * self.b[i, :i])
        self.d_between[i, :i] = d_between[:i]
        return total

    def gates(self) -> Tensor:
        """dg [n, HV(, K)]."""
        n, d_start = self.count, torch.zeros_like(self.w)
        if self.x is not None:
            d_start = self.w * self._with_keys()
        if self.z is not None:
            last = self.e[-1] * _dot(self.k, self.z, self.per_channel)
            self.d_between[-1, : n - 1] = self.d_between[-1, : n - 1] + last[: n - 1]
            if self.state is not None and self.d_end is not None:
                inner = dot_lanes(self.state, self.d_end)
                if not self.per_channel:
                    inner = _ascending(inner)
                d_start[-1] = d_start[-1] + self.w[-1] * inner
        dg = torch.zeros_like(self.w)
        for i in range(n):
            total = d_start[i]
            for m in range(i + 1):
                dg[m] = dg[m] + total
                total = total + self.d_between[i, m]
        return dg

    def _with_keys(self) -> Tensor:
        assert self.x is not None
        if self.d_r is None or self.y is None:
            return _dot(self.q, self.x, self.per_channel)
        if self.per_channel:
            return fma32(self.q, self.x, self.k * self.y)
        return dot_lanes(self.q, self.x) + dot_lanes(self.k, self.y)

    def start_state(self) -> Tensor | None:
        """dS, or None where the chunk read no state."""
        if self.state is None:
            return None
        start = self.w if self.per_channel else self.w[..., None]
        total = torch.zeros_like(self.state)
        if self.d_end is not None:
            total = (start[-1][..., None]) * self.d_end
        q, k = start * self.q, start * self.k
        for i in range(self.count):
            total = fma32(q[i][..., None], self.d_o[i][:, None], total)
            if self.d_r is not None:
                total = fma32(k[i][..., None], self.d_r[i][:, None], total)
        return total


def _pairs(left: Tensor, u: Tensor) -> Tensor:
    """``left_i . u_j`` over values, [n, n, HV]."""
    n = len(left)
    return dot_lanes(left[:, None].expand(n, *left.shape), u[None].expand(n, *u.shape))


def _through(left: Tensor, state: Tensor) -> Tensor:
    """``left_i S^T`` over values, [n, HV, K]."""
    shape = (len(left), *state.shape)
    return dot_lanes(left[:, :, None].expand(shape), state.expand(shape))


def _dot(left: Tensor, right: Tensor, per_channel: bool) -> Tensor:
    return left * right if per_channel else dot_lanes(left, right)


def _ascending(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[..., 0])
    for d in range(x.shape[-1]):
        total = total + x[..., d]
    return total
