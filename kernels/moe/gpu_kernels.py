"""Triton kernels of mixtures of experts: routing, grouped products of class L, combining.

A grouped product walks a list of slots sorted by expert and padded to whole tiles: one program
computes one tile of rows of one expert, with the ascending chains of GEMM class L
(``linear/gpu_kernels.py``). Which slots share a tile is schedule.

Scores are exp2 of fp32 logits, their sum is ``row_sum`` over the padded row (zeros are exact); the
choice is K times the largest value, lowest index first. A row with a logit that is not finite gets
weights of NaN, whatever was chosen.

Legend: T tokens, E experts (W padded), K slots per token, S = T K slots, H width, NI inputs, N
outputs of an expert, G groups.
"""

import triton
import triton.language as tl

from ..gpu.tree import row_sum, tile_sum
from ..linear.gpu_kernels import chained

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(z, mask, SIGMOID: tl.constexpr, BT: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr):
    """[BT, W]; zero beyond the experts."""
    if SIGMOID:
        p = tl.math.div_rn(tl.full((BT, W), 1.0, tl.float32), 1.0 + tl.math.exp2(-z * LOG2E))
        return tl.where(mask, p, 0.0)
    top = tl.max(tl.where(mask, z, float("-inf")), 1)
    p = tl.where(mask, tl.math.exp2((z - top[:, None]) * LOG2E), 0.0)
    if W // VEC <= 32:
        total = row_sum(p, BT, W, VEC)
    else:
        N: tl.constexpr = W // (32 * VEC)
        total = tile_sum(tl.reshape(p, (BT * N, W // N)), BT, N, W // N, VEC)
    return tl.math.div_rn(p, tl.zeros((BT, W), tl.float32) + total[:, None])


@triton.jit
def _largest(v, lanes, W: tl.constexpr):
    """Value and lowest index of the largest entry of each row."""
    top = tl.max(v, 1)
    return top, tl.min(tl.where(v == top[:, None], lanes, W), 1)


@triton.jit
def topk_kernel(
    logits_ptr, bias_ptr, chosen_ptr, T, E,
    K: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, BT: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """chosen [T, K] of logits [T, E]."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    lanes = tl.arange(0, W)[None, :]
    inside = lanes < E
    mask = (rows < T)[:, None] & inside
    z = tl.load(logits_ptr + rows[:, None] * E + lanes, mask=mask, other=0.0)
    v = _scores(z, inside, SIGMOID, BT, W, VEC)
    if HAS_BIAS:
        v += tl.load(bias_ptr + lanes, mask=inside, other=0.0)
    v = tl.where(inside, v, float("-inf"))
    if KEPT < G:
        group = lanes // (E // G)
        rank = tl.full((BT, W), float("-inf"), tl.float32)  # of group g, in lane g
        for g in tl.static_range(G):
            mine = tl.where(group == g, v, float("-inf"))
            first, at = _largest(mine, lanes, W)
            second, _ = _largest(tl.where(lanes == at[:, None], float("-inf"), mine), lanes, W)
            rank = tl.where(lanes == g, (first + second)[:, None], rank)
        allowed = tl.zeros((BT, W), tl.int32)
        for _ in tl.static_range(KEPT):
            _, g = _largest(rank, lanes, W)
            allowed = tl.where(group == g[:, None], 1, allowed)
            rank = tl.where(lanes == g[:, None], float("-inf"), rank)
        v = tl.where(allowed > 0, v, float("-inf"))
    for k in tl.static_range(K):
        _, at = _largest(v, lanes, W)
        at = tl.minimum(at, E - 1)  # a row of NaN has no largest
        tl.store(chosen_ptr + rows * K + k, at.to(tl.int64), mask=rows < T)
        v = tl.where(lanes == at[:, None], float("-inf"), v)


@triton.jit
def _at(p, index, lanes):
    """The entry at ``index`` of each row, exactly."""
    return tl.sum(tl.where(lanes == index[:, None], p, 0.0), 1)


@triton.jit
def topk_weights_kernel(
    logits_ptr, chosen_ptr, weights_ptr, grad_ptr, T, E, eps, scale,
    K: tl.constexpr, SIGMOID: tl.constexpr, NORMED: tl.constexpr, BACKWARD: tl.constexpr,
    BT: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """weights [T, K]; or, BACKWARD, d_logits [T, E] (in weights_ptr) from d_weights (grad_ptr)."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    live = rows < T
    lanes = tl.arange(0, W)[None, :]
    inside = lanes < E
    z = tl.load(logits_ptr + rows[:, None] * E + lanes, mask=live[:, None] & inside, other=0.0)
    p = _scores(z, inside, SIGMOID, BT, W, VEC)
    total = tl.zeros((BT,), tl.float32)
    for k in tl.static_range(K):
        at = tl.load(chosen_ptr + rows * K + k, mask=live, other=0).to(tl.int32)
        total = total + _at(p, at, lanes)
    total = total + eps
    if not BACKWARD:
        unfit = tl.max(tl.where(inside & (tl.abs(z) < float("inf")), 0, inside.to(tl.int32)), 1)
        for k in tl.static_range(K):
            at = tl.load(chosen_ptr + rows * K + k, mask=live, other=0).to(tl.int32)
            w = _at(p, at, lanes)
            if NORMED:
                w = tl.math.div_rn(w, total)
            w = tl.where(unfit > 0, float("nan"), w * scale)
            tl.store(weights_ptr + rows * K + k, w, mask=live)
    else:
        mean = tl.zeros((BT,), tl.float32)
        inner = tl.zeros((BT,), tl.float32)
        picked = tl.zeros((BT, W), tl.float32)  # d of the chosen scores, in their lanes
        for k in tl.static_range(K):
            at = tl.load(chosen_ptr + rows * K + k, mask=live, other=0).to(tl.int32)
            dw = tl.load(grad_ptr + rows * K + k, mask=live, other=0.0)
            mean = mean + dw * tl.math.div_rn(_at(p, at, lanes), total)
        for k in tl.static_range(K):
            at = tl.load(chosen_ptr + rows * K + k, mask=live, other=0).to(tl.int32)
            d = tl.load(grad_ptr + rows * K + k, mask=live, other=0.0)
            if NORMED:
                d = tl.math.div_rn(d - mean, total)
            d = d * scale
            inner = inner + d * _at(p, at, lanes)
            picked = tl.where(lanes == at[:, None], d[:, None], picked)
        out = picked * (p * (1.0 - p)) if SIGMOID else p * (picked - inner[:, None])
        tl.store(weights_ptr + rows[:, None] * E + lanes, out, mask=live[:, None] & inside)


@triton.jit
def count_kernel(owner_ptr, count_ptr, S, BS: tl.constexpr):
    """count[e]: slots of expert e, one program each."""
    expert = tl.program_id(0)
    total = tl.zeros((BS,), tl.int32)
    for begin in range(0, S, BS):
        at = begin + tl.arange(0, BS)
        owner = tl.load(owner_ptr + at, mask=at < S, other=-1)
        total += (owner == expert).to(tl.int32)
    tl.store(count_ptr + expert, tl.sum(total, 0))


@triton.jit
def sort_kernel(
    owner_ptr, count_ptr, slots_ptr, expert_ptr, start_ptr, S, E, tiles,
    BM: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Slots by expert, in order, each expert's padded with S to whole tiles of BM.

    slots [tiles * BM], expert [tiles] (-1 past the last), start [E + 1]: where its slots begin.
    One program an expert; the last one closes the lists.
    """
    expert = tl.program_id(0)
    lanes = tl.arange(0, BE)
    counts = tl.load(count_ptr + lanes, mask=lanes < E, other=0)
    before = tl.sum(tl.where(lanes < expert, (counts + BM - 1) // BM, 0), 0)
    tl.store(start_ptr + expert, before * BM)
    if expert == E:
        for tile in range(before, tiles):
            tl.store(expert_ptr + tile, -1)
        return
    mine = tl.sum(tl.where(lanes == expert, counts, 0), 0)
    own_tiles = (mine + BM - 1) // BM
    for tile in range(before, before + own_tiles):
        tl.store(expert_ptr + tile, expert)
    place = before * BM
    for begin in range(0, S, BS):
        at = begin + tl.arange(0, BS)
        hit = tl.load(owner_ptr + at, mask=at < S, other=-1) == expert
        rank = tl.cumsum(hit.to(tl.int32), 0)
        tl.store(slots_ptr + place + rank - 1, at, mask=hit)
        place += tl.max(rank, 0)
    rest = place + tl.arange(0, BM)
    tl.store(slots_ptr + rest, tl.zeros((BM,), tl.int32) + S, mask=rest < (before + own_tiles) * BM)


@triton.jit
def grouped_kernel(
    x_ptr, w_ptr, out_ptr, slots_ptr, expert_ptr, S, N, NI,
    stride_we, stride_wn, stride_wi, PER_ROW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SINGLE: tl.constexpr, EVEN_I: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """out[slot, n] = sum_i x[slot // PER_ROW, i] W[expert of the tile, n, i].

    slots [tiles * BM]: sorted by expert, S where padded; expert [tiles]: -1 past the end.
    SINGLE: expert [S] of every slot, each a tile of its own.
    """
    num_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    per_group = GROUP * num_n
    num_m = tl.num_programs(0) // num_n
    first_m = (pid // per_group) * GROUP
    size_m = min(num_m - first_m, GROUP)
    tile_m = first_m + (pid % per_group) % size_m
    tile_n = (pid % per_group) // size_m
    expert = tl.load(expert_ptr + tile_m)
    if expert < 0:
        return
    if SINGLE:
        slots = tl.where(tl.arange(0, BM) == 0, tile_m, S).to(tl.int64)
    else:
        slots = tl.load(slots_ptr + tile_m * BM + tl.arange(0, BM)).to(tl.int64)
    live = slots < S
    cols = tile_n * BN + tl.arange(0, BN)
    lanes = tl.arange(0, BK)
    a_ptrs = x_ptr + (slots // PER_ROW)[:, None] * NI + lanes[None, :]
    b_ptrs = (
        w_ptr
        + expert.to(tl.int64) * stride_we
        + cols[None, :].to(tl.int64) * stride_wn
        + lanes[:, None].to(tl.int64) * stride_wi
    )
    fits = cols < N
    acc = tl.zeros((BM, BN), tl.float32)
    part = acc
    num_i = tl.cdiv(NI, BK)
    for i in range(num_i):
        left = lanes < NI - i * BK
        if EVEN_I:
            a = tl.load(a_ptrs, mask=live[:, None], other=0.0)
            b = tl.load(b_ptrs, mask=fits[None, :], other=0.0)
        else:
            a = tl.load(a_ptrs, mask=live[:, None] & left[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=left[:, None] & fits[None, :], other=0.0)
        part = tl.dot(a, b, part, input_precision="ieee")
        if SHORT:
            acc, part = chained(acc, part, i, num_i, BK, SHORT)
        a_ptrs += BK
        b_ptrs += BK * stride_wi
    if not SHORT:
        acc = part
    c_ptrs = out_ptr + slots[:, None] * N + cols[None, :]
    tl.store(c_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & fits[None, :])


@triton.jit
def grouped_weight_kernel(
    grad_ptr, x_ptr, out_ptr, order_ptr, start_ptr, count_ptr, N, NI, PER_ROW: tl.constexpr,
    ACCUMULATE: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr, BS: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """dW[e] (+)= sum over the slots order[start[e] : start[e] + count[e]] of dY^T X, ascending."""
    expert = tl.program_id(1)
    num_i = tl.cdiv(NI, BI)
    n = (tl.program_id(0) // num_i) * BN + tl.arange(0, BN)
    i = (tl.program_id(0) % num_i) * BI + tl.arange(0, BI)
    first = tl.load(start_ptr + expert)
    last = first + tl.load(count_ptr + expert)
    if ACCUMULATE and first == last:
        return  # nothing to add: not even a zero, which would turn -0 into +0
    acc = tl.zeros((BN, BI), tl.float32)
    part = acc
    steps = tl.cdiv(last - first, BS)
    for step in range(steps):
        at = first + step * BS + tl.arange(0, BS)
        live = at < last
        slot = tl.load(order_ptr + at, mask=live, other=0).to(tl.int64)
        g = tl.load(
            grad_ptr + slot[None, :] * N + n[:, None],
            mask=live[None, :] & (n < N)[:, None], other=0.0,
        )  # fmt: skip
        x = tl.load(
            x_ptr + (slot // PER_ROW)[:, None] * NI + i[None, :],
            mask=live[:, None] & (i < NI)[None, :], other=0.0,
        )  # fmt: skip
        part = tl.dot(g, x, part, input_precision="ieee")
        if SHORT:
            acc, part = chained(acc, part, step, steps, BS, SHORT)
    if not SHORT:
        acc = part
    out = out_ptr + expert.to(tl.int64) * N * NI + n[:, None] * NI + i[None, :]
    mask = (n < N)[:, None] & (i < NI)[None, :]
    if ACCUMULATE:
        acc = tl.load(out, mask=mask, other=0.0) + acc
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(
    y_ptr, w_ptr, out_ptr, H, K: tl.constexpr, HAS_W: tl.constexpr, BH: tl.constexpr
):
    """out[t] = one FMA chain over the slots of token t; weights of one without HAS_W."""
    token = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BH + tl.arange(0, BH)
    mask = cols < H
    total = tl.zeros((BH,), tl.float32)
    for k in tl.static_range(K):
        y = tl.load(y_ptr + (token * K + k) * H + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_W:
            total = tl.fma(tl.zeros((BH,), tl.float32) + tl.load(w_ptr + token * K + k), y, total)
        else:
            total = total + y
    tl.store(out_ptr + token * H + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_bwd_kernel(
    g_ptr, y_ptr, w_ptr, dy_ptr, dw_ptr, H, K: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """dy[t, k] = w g[t]; dw[t, k] = sum over H of g y: W lanes of N blocks, then the tree."""
    slot = tl.program_id(0).to(tl.int64)
    w = tl.load(w_ptr + slot)
    lanes = (tl.arange(0, N) * W)[:, None] + tl.arange(0, W)[None, :]
    sums = tl.zeros((N, W), tl.float32)
    for begin in range(0, H, N * W):
        cols = begin + lanes
        mask = cols < H
        g = tl.load(g_ptr + (slot // K) * H + cols, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + slot * H + cols, mask=mask, other=0.0).to(tl.float32)
        sums = tl.fma(g, y, sums)
        tl.store(dy_ptr + slot * H + cols, (w * g).to(dy_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + slot + tl.arange(0, 1), tile_sum(sums, 1, N, W, VEC))
