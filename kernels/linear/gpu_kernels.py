"""Triton kernels of GEMM class L: fp32 accumulators per output, reduced axis ascending.

    c[m, n] = round(sum_k a[m, k] * b[n, k]  (+ bias[n] in fp32))

fp32 operands: chains of FMAs over 128 values each, added ascending, as on a CPU. 16 bits:

The accumulator of an output is a single chain of matrix instructions over 16-wide groups of the
reduced axis, ascending; nothing here splits that axis. So tiles, warps, stages, grid order, loads
(pointer or tensor descriptor) and operand swap are schedule, and all of these kernels have the same
bits on Hopper (``tests/kernels/device`` proves it). A zero-filled tail of the reduced axis adds
exact zeros.

Shapes: ``a`` is [M, K] (or [K, M] when A_T), ``b`` is [N, K] (or [K, N] when B_T), ``c`` is [M, N].
"""

import triton
import triton.language as tl

DTYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


@triton.jit
def _tile_origin(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Grouped tile order: GROUP_M row tiles share each column tile's weights in L2."""
    per_group = GROUP_M * num_n
    first_m = (tile // per_group) * GROUP_M
    size_m = min(num_m - first_m, GROUP_M)
    inner = tile % per_group
    return first_m + inner % size_m, inner // size_m


@triton.jit
def chained(total, part, k, num_k, BK: tl.constexpr, SHORT: tl.constexpr):
    """(sum of the chains that are finished, the running one) after step k, of BK values each.

    A chain takes SHORT values from +0 and is then added to those before it; the first is the sum.
    """
    tl.static_assert(SHORT % BK == 0)
    ends = (k % (SHORT // BK) == SHORT // BK - 1) | (k == num_k - 1)
    added = tl.where(k < SHORT // BK, part, total + part)
    return tl.where(ends, added, total), tl.where(ends, 0.0, part)


@triton.jit
def gemm_tma_kernel(
    a_desc,
    b_desc,
    c_desc,
    bias_ptr,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUBTILE: tl.constexpr,
    NUM_SMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    OUT: tl.constexpr,
):
    """Persistent kernel over tensor descriptors: the one for M of 64 and more."""
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(N, BN)
    num_k = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_SMS, flatten=FLATTEN):
        pid_m, pid_n = _tile_origin(tile, num_m, num_n, GROUP_M)
        m0 = pid_m * BM
        n0 = pid_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(num_k):
            k0 = k * BK
            b_a = a_desc.load([k0, m0]).T if A_T else a_desc.load([m0, k0])
            b_b = b_desc.load([k0, n0]) if B_T else b_desc.load([n0, k0]).T
            acc = tl.dot(b_a, b_b, acc)
        if HAS_BIAS:
            cols = n0 + tl.arange(0, BN)
            acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        if SUBTILE:
            low, high = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            c_desc.store([m0, n0], low.to(OUT))
            c_desc.store([m0, n0 + BN // 2], high.to(OUT))
        else:
            c_desc.store([m0, n0], acc.to(OUT))


@triton.jit
def gemm_pointer_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    stride_cm,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Plain pointer kernel: the class's reference, every stride, and the streaming kernel at small
    M.

    SWAP computes the transposed product, weights as the matrix instruction's rows. SHORT: how many
    values of the reduced axis one chain takes (see :func:`chained`); 0: all.
    """
    pid_m, pid_n = _tile_origin(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP_M)
    rows = (pid_m * BM + tl.arange(0, BM)).to(tl.int64)
    cols = (pid_n * BN + tl.arange(0, BN)).to(tl.int64)
    lanes = tl.arange(0, BK)
    m_row = rows < M
    m_col = cols < N
    a_ptrs = a_ptr + rows[:, None] * stride_am + lanes[None, :].to(tl.int64) * stride_ak
    if SWAP:
        b_ptrs = b_ptr + cols[:, None] * stride_bn + lanes[None, :].to(tl.int64) * stride_bk
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        b_ptrs = b_ptr + cols[None, :] * stride_bn + lanes[:, None].to(tl.int64) * stride_bk
        acc = tl.zeros((BM, BN), tl.float32)
    part = acc
    num_k = tl.cdiv(K, BK)
    for k in range(num_k):
        m_k = lanes < K - k * BK
        if EVEN_K:
            b_a = tl.load(a_ptrs, mask=m_row[:, None], other=0.0)
        else:
            b_a = tl.load(a_ptrs, mask=m_row[:, None] & m_k[None, :], other=0.0)
        if SWAP:
            if EVEN_K:
                b_b = tl.load(b_ptrs, mask=m_col[:, None], other=0.0)
            else:
                b_b = tl.load(b_ptrs, mask=m_col[:, None] & m_k[None, :], other=0.0)
            part = tl.dot(b_b, tl.trans(b_a), part, input_precision="ieee")
        else:
            if EVEN_K:
                b_b = tl.load(b_ptrs, mask=m_col[None, :], other=0.0)
            else:
                b_b = tl.load(b_ptrs, mask=m_k[:, None] & m_col[None, :], other=0.0)
            part = tl.dot(b_a, b_b, part, input_precision="ieee")
        if SHORT:
            acc, part = chained(acc, part, k, num_k, BK, SHORT)
        a_ptrs += BK * stride_ak
        b_ptrs += BK * stride_bk
    if not SHORT:
        acc = part
    if SWAP:
        acc = tl.trans(acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=m_col, other=0.0).to(tl.float32)[None, :]
    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=m_row[:, None] & m_col[None, :])
