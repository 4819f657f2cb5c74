"""Attention prefill for Hopper in Gluon: one producer warp, two consumer warpgroups of 64 queries.

The numbers are those of :func:`.gpu_kernels.attention_walk_kernel`, operation for operation; only
the schedule differs. The producer streams K and V blocks through the bulk copy engine; each
consumer issues the score product of block j + 1 right behind the value product of block j, and
works on its softmax while the other consumer has the matrix units. The running total over chunks
lives in shared memory, touched once per chunk, so registers hold one accumulator.

Covers head size 128, contiguous keys whose requests begin at multiples of BN rows or alone in the
tensor (rows past the end are zero-filled by the copy engine), causal, without window, soft-capping
and sinks.
"""

# ruff: noqa: E741  (l is the denominator's usual name)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _find(start_ptr, B, index):
    low = 0
    high = B
    while high - low > 1:
        mid = (low + high) // 2
        if gl.load(start_ptr + mid) <= index:
            low = mid
        else:
            high = mid
    return low


@gluon.jit
def _place(walk_start_ptr, query_start_ptr, B, BM: gl.constexpr):
    """(request start row, length, first query of this tile) of the program's tile."""
    tile = gl.program_id(1)
    b = _find(walk_start_ptr, B, tile)
    start = gl.load(query_start_ptr + b)
    length = gl.load(query_start_ptr + b + 1) - start
    first = (gl.load(walk_start_ptr + b + 1) - 1 - tile) * BM
    return start, length, first


@gluon.jit
def _producer(
    q_desc,
    k_desc,
    v_desc,
    q_smem,
    k_smem,
    v_smem,
    bars,
    start,
    key_start,
    first,
    blocks,
    head,
    kv_head,
    BM: gl.constexpr,
    BN: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    HALF: gl.constexpr = BM // 2
    mbarrier.expect(bars.index(0), 2 * HALF * D * 2)
    tma.async_copy_global_to_shared(
        q_desc, [start + first, head * D], bars.index(0), q_smem.index(0)
    )
    tma.async_copy_global_to_shared(
        q_desc, [start + first + HALF, head * D], bars.index(0), q_smem.index(1)
    )
    for j in range(blocks):
        stage = j % STAGES
        phase = (j // STAGES) & 1
        row = key_start + j * BN
        mbarrier.wait(bars.index(1 + STAGES + stage), phase ^ 1)
        mbarrier.expect(bars.index(1 + stage), BN * D * 2)
        tma.async_copy_global_to_shared(
            k_desc, [row, kv_head * D], bars.index(1 + stage), k_smem.index(stage)
        )
        mbarrier.wait(bars.index(1 + 3 * STAGES + stage), phase ^ 1)
        mbarrier.expect(bars.index(1 + 2 * STAGES + stage), BN * D * 2)
        tma.async_copy_global_to_shared(
            v_desc, [row, kv_head * D], bars.index(1 + 2 * STAGES + stage), v_smem.index(stage)
        )


@gluon.jit
def _softmax(s, m, l, acc, c, s_layout: gl.constexpr, l_layout: gl.constexpr, dtype: gl.constexpr):
    """(p as operand, m, l, acc) with l and acc rescaled."""
    m_new = gl.maximum(m, gl.max(s, 1) * c)
    guard = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(
        gl.fma(s, gl.full_like(s, 0.0) + c, gl.full_like(s, 0.0) - gl.expand_dims(guard, 1))
    )
    a = gl.exp2(m - guard)
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    pb = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
    acc = acc * gl.expand_dims(a, 1)
    l = l * gl.expand_dims(
        gl.convert_layout(a, gl.SliceLayout(1, l_layout), assert_trivial=True), 1
    )
    return pb, m_new, l, acc


@gluon.jit
def _merge(tot_m, tot_l, total, m, l, acc):
    """One chunk into the running total; l as [R]."""
    m_new = gl.maximum(tot_m, m)
    guard = gl.where(m_new == float("-inf"), 0.0, m_new)
    a = gl.exp2(tot_m - guard)
    b = gl.exp2(m - guard)
    tot_l = gl.fma(tot_l, a, l * b)
    total = gl.fma(
        total, gl.full_like(total, 0.0) + gl.expand_dims(a, 1), acc * gl.expand_dims(b, 1)
    )
    return m_new, tot_l, total


@gluon.jit
def _consumer(
    wg: gl.constexpr,
    q_smem,
    k_smem,
    v_smem,
    o_smem,
    ones_smem,
    bars,
    o_ptr,
    lse_ptr,
    start,
    length,
    first,
    blocks,
    head,
    stride_ot,
    stride_lse,
    c,
    BM: gl.constexpr,
    BN: gl.constexpr,
    P: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    dtype: gl.constexpr,
):
    R: gl.constexpr = BM // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    l_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    PER: gl.constexpr = P // BN

    q = q_smem.index(wg)
    total_smem = o_smem.index(wg)
    total_smem.store(gl.full((R, D), 0.0, gl.float32, o_layout))
    tot_m = gl.full((R,), float("-inf"), gl.float32, row_layout)
    tot_l = gl.full((R,), 0.0, gl.float32, row_layout)
    m = gl.full((R,), float("-inf"), gl.float32, row_layout)
    l = gl.full((R, 8), 0.0, gl.float32, l_layout)
    acc = gl.full((R, D), 0.0, gl.float32, o_layout)
    zero = gl.full((R, BN), 0.0, gl.float32, s_layout)

    mbarrier.wait(bars.index(0), 0)
    mbarrier.wait(bars.index(1), 0)
    s_now = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s_now])
    mbarrier.arrive(bars.index(1 + STAGES), count=1)
    for j in range(blocks - 1):
        stage = j % STAGES
        phase = (j // STAGES) & 1
        after = (j + 1) % STAGES
        after_phase = ((j + 1) // STAGES) & 1
        pb, m, l, acc = _softmax(s, m, l, acc, c, s_layout, l_layout, dtype)
        mbarrier.wait(bars.index(1 + 2 * STAGES + stage), phase)
        acc_now = warpgroup_mma(pb, v_smem.index(stage), acc, is_async=True)
        l_now = warpgroup_mma(pb, ones_smem.permute((1, 0)), l, is_async=True)
        mbarrier.wait(bars.index(1 + after), after_phase)
        s_now = warpgroup_mma(
            q, k_smem.index(after).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        acc, l = warpgroup_mma_wait(1, deps=[acc_now, l_now])
        mbarrier.arrive(bars.index(1 + 3 * STAGES + stage), count=1)
        s = warpgroup_mma_wait(0, deps=[s_now])
        mbarrier.arrive(bars.index(1 + STAGES + after), count=1)
        if (j + 1) % PER == 0:
            flat = gl.convert_layout(gl.max(l, 1), row_layout, assert_trivial=True)
            tot_m, tot_l, total = _merge(tot_m, tot_l, total_smem.load(o_layout), m, flat, acc)
            total_smem.store(total)
            m = gl.full((R,), float("-inf"), gl.float32, row_layout)
            l = gl.full((R, 8), 0.0, gl.float32, l_layout)
            acc = gl.full((R, D), 0.0, gl.float32, o_layout)

    last = (blocks - 1) % STAGES
    keys = (blocks - 1) * BN + gl.arange(0, BN, gl.SliceLayout(0, s_layout))
    queries = first + wg * R + gl.arange(0, R, row_layout)
    seen = gl.expand_dims(keys, 0) <= gl.expand_dims(queries, 1)
    seen = seen & (gl.expand_dims(keys, 0) < length)
    s = gl.where(seen, s, float("-inf"))
    pb, m, l, acc = _softmax(s, m, l, acc, c, s_layout, l_layout, dtype)
    mbarrier.wait(bars.index(1 + 2 * STAGES + last), ((blocks - 1) // STAGES) & 1)
    acc_now = warpgroup_mma(pb, v_smem.index(last), acc, is_async=True)
    l_now = warpgroup_mma(pb, ones_smem.permute((1, 0)), l, is_async=True)
    acc, l = warpgroup_mma_wait(0, deps=[acc_now, l_now])
    flat = gl.convert_layout(gl.max(l, 1), row_layout, assert_trivial=True)
    tot_m, tot_l, total = _merge(tot_m, tot_l, total_smem.load(o_layout), m, flat, acc)

    safe = gl.where(tot_l == 0.0, 1.0, tot_l)
    o = gl.div_rn(total + 0.0, gl.full_like(total, 0.0) + gl.expand_dims(safe, 1))
    lse = tot_m + gl.log2(safe)
    gl.store(lse_ptr + head * stride_lse + start + queries, lse, mask=queries < length)
    q.store(o.to(dtype))
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    out = q.load(wide)
    rows = first + wg * R + gl.arange(0, R, gl.SliceLayout(1, wide))
    dims = gl.arange(0, D, gl.SliceLayout(0, wide))
    at = gl.expand_dims((start + rows).to(gl.int64) * stride_ot + head * D, 1) + gl.expand_dims(
        dims, 0
    )
    mask = gl.expand_dims(rows < length, 1) & (gl.expand_dims(dims, 0) < D)
    gl.store(o_ptr + at, out, mask=mask)


@gluon.jit
def attention_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_ptr,
    lse_ptr,
    query_start_ptr,
    key_start_ptr,
    walk_start_ptr,
    B,
    stride_ot,
    stride_lse,
    c,
    G: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    P: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One tile of BM queries of one head of one request."""
    dtype: gl.constexpr = q_desc.dtype
    if gl.program_id(1) >= gl.load(walk_start_ptr + B):
        return
    start, length, first = _place(walk_start_ptr, query_start_ptr, B, BM)
    key_start = gl.load(key_start_ptr + _find(walk_start_ptr, B, gl.program_id(1)))
    head = gl.program_id(0)
    blocks = (gl.minimum(first + BM, length) + BN - 1) // BN

    half: gl.constexpr = BM // 2
    q_smem = gl.allocate_shared_memory(dtype, [2, half, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, D], v_desc.layout)
    o_smem = gl.allocate_shared_memory(gl.float32, [2, half, D], gl.NVMMASharedLayout(128, 32, 2))
    ones_smem = gl.allocate_shared_memory(dtype, [8, BN], gl.NVMMASharedLayout(128, 16, 2))
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ones_smem.store(gl.full((8, BN), 1.0, dtype, flat))
    bars = gl.allocate_shared_memory(gl.int64, [1 + 4 * STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(1 + i), count=1)
        mbarrier.init(bars.index(1 + STAGES + i), count=2)
        mbarrier.init(bars.index(1 + 2 * STAGES + i), count=1)
        mbarrier.init(bars.index(1 + 3 * STAGES + i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0,
                    q_smem,
                    k_smem,
                    v_smem,
                    o_smem,
                    ones_smem,
                    bars,
                    o_ptr,
                    lse_ptr,
                    start,
                    length,
                    first,
                    blocks,
                    head,
                    stride_ot,
                    stride_lse,
                    c,
                    BM,
                    BN,
                    P,
                    D,
                    STAGES,
                    dtype,
                ),
            ),
            (
                _consumer,
                (
                    1,
                    q_smem,
                    k_smem,
                    v_smem,
                    o_smem,
                    ones_smem,
                    bars,
                    o_ptr,
                    lse_ptr,
                    start,
                    length,
                    first,
                    blocks,
                    head,
                    stride_ot,
                    stride_lse,
                    c,
                    BM,
                    BN,
                    P,
                    D,
                    STAGES,
                    dtype,
                ),
            ),
            (
                _producer,
                (
                    q_desc,
                    k_desc,
                    v_desc,
                    q_smem,
                    k_smem,
                    v_smem,
                    bars,
                    start,
                    key_start,
                    first,
                    blocks,
                    head,
                    head // G,
                    BM,
                    BN,
                    D,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
