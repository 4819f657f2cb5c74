"""Recurrences on the CPU: contracts and implementations, forward, gradient and stepwise."""

from typing import Any

import torch
from torch import Tensor

from ..contract import Contract
from ..cpu.load import core
from ..cpu.register import register_core

_FORMULAS = {
    "ssd": "o_i = exp(D_i,-1) q_i S + sum_(j<=i) exp(D_ij) (q_i . k_j) v_j",
    "gated_delta": "u_i = beta_i (v_i - exp(D_i,-1) k_i S - sum_(j<i) exp(D_ij) (k_i . k_j) u_j); "
    "o_i as ssd with u for v",
    "kda": "gated_delta with a decay per key channel inside the dot products",
}
_FIELDS: dict[str, Any] = {
    "storages": ("float32",),
    "rounding": "fp32 throughout",
    "functions": "fma, exp.cpu.v1, exactly 0 below its range",
    "gradient_rtol": 1e-5,
}


def _recurrence(
    variant: str,
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
    """See the reference."""
    chunk, key, (heads, value) = k_pages.shape[1], k.shape[1:], v.shape[1:]
    starts, full = query_start.tolist(), 0
    for b, positions in enumerate(length.tolist()):
        full += positions // chunk - (positions - starts[b + 1] + starts[b]) // chunk
    o, u = torch.empty_like(v), torch.empty_like(v)
    ends = torch.empty(full, heads, key[1], value)
    core(variant).call(
        "recurrence", q, k, v, g, beta, k_pages, u_pages, g_pages, end_pages, query_start, length,
        table, o, u, ends, *table.shape, chunk, key[0], heads, key[1], value, g.dim() == 3,
        torch.get_num_threads(),
    )  # fmt: skip
    return o, u, ends


def _stepwise(
    variant: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    start: Tensor,
    query_start: Tensor,
) -> tuple[Tensor, Tensor]:
    o, end = torch.empty_like(v), torch.empty_like(start)
    core(variant).call(
        "recurrence_stepwise", q, k, v, g, beta, start, query_start, o, end, len(start), k.shape[1],
        *start.shape[1:], g.dim() == 3, torch.get_num_threads(),
    )  # fmt: skip
    return o, end


def _gradient(
    variant: str,
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    u: Tensor,
    ends: Tensor,
    query_start: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """See the reference."""
    dq, dk, dv, dg = (torch.empty_like(each) for each in (q, k, v, g))
    dbeta = None if beta is None else torch.empty_like(beta)
    core(variant).call(
        "recurrence_grad", d_o, q, k, v, g, beta, u, ends, query_start, dq, dk, dv, dg, dbeta,
        query_start.numel() - 1, chunk, k.shape[1], v.shape[1], k.shape[2], v.shape[2],
        g.dim() == 3, torch.get_num_threads(),
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta


def _register(kind: str) -> tuple[Contract, Contract, Contract]:
    forward = register_core(
        _recurrence,
        name=f"recurrence.{kind}",
        op="recurrence",
        formula=f"{_FORMULAS[kind]}; a full chunk: S' = exp(D_last,-1) S + sum_j exp(D_last,j) "
        "k_j u_j",
        order="log decays added from row i backwards; dots in 16 lanes, then lanes16.tree.v1; "
        "one FMA chain per element: d ascending, then j ascending; folds j ascending",
        reference="zeromismatch.kernels.reference.recurrence:recurrence",
        **_FIELDS,
    )
    gradient = register_core(
        _gradient,
        name=f"recurrence_grad.{kind}",
        op="recurrence_grad",
        formula=f"the gradient of recurrence.{kind} over whole requests, from boundary states",
        order="chunks descending; rows, columns and heads as the reference writes them",
        reference="zeromismatch.kernels.reference.recurrence_grad:recurrence_grad",
        **_FIELDS,
    )
    stepwise = register_core(
        _stepwise,
        name=f"recurrence_stepwise.{kind}",
        op="recurrence_stepwise",
        formula="S = exp(g) S; u = beta (v - k S), ssd: v; S = S + k u; o = q S, token by token",
        order="sums over d ascending, one FMA chain each",
        reference="zeromismatch.kernels.reference.recurrence:stepwise",
        **_FIELDS,
    )
    return forward[torch.float32], gradient[torch.float32], stepwise[torch.float32]


CONTRACTS: dict[str, Contract] = {}
GRADIENTS: dict[str, Contract] = {}
STEPWISE: dict[str, Contract] = {}
for _kind in _FORMULAS:
    CONTRACTS[_kind], GRADIENTS[_kind], STEPWISE[_kind] = _register(_kind)
