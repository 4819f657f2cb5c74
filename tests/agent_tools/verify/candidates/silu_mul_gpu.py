"""SiLU times up in Triton: one program for a run of columns of one row; both products rounded."""

import torch
import triton
import triton.language as tl


@triton.jit
def silu_mul_kernel(g, u, y, F, stride_g, stride_u, HAS_UP: tl.constexpr, BLOCK: tl.constexpr):
    """y = round(round(silu(g)) * u)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    x = tl.load(g + row * stride_g + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.math.div_rn(x, 1.0 + tl.math.exp2(-x * 1.4426950408889634)).to(y.dtype.element_ty)
    if HAS_UP:
        v = tl.load(u + row * stride_u + at, mask=inside, other=0.0).to(tl.float32)
        s = (s.to(tl.float32) * v).to(y.dtype.element_ty)
    tl.store(y + row * F + at, s, mask=inside)


@triton.jit
def silu_mul_bwd_kernel(
    g, u, dy, dg, du, F, stride_g, stride_u, HAS_UP: tl.constexpr, BLOCK: tl.constexpr
):
    """dg = dy u (h + x h (1 - h)), du = dy silu(g)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    x = tl.load(g + row * stride_g + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * F + at, mask=inside, other=0.0).to(tl.float32)
    down = 1.0 + tl.math.exp2(-x * 1.4426950408889634)
    if HAS_UP:
        v = tl.load(u + row * stride_u + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.math.div_rn(x, down).to(dg.dtype.element_ty).to(tl.float32)
        tl.store(du + row * F + at, (d * s).to(du.dtype.element_ty), mask=inside)
        d = d * v
    h = tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), down)
    tl.store(
        dg + row * F + at, (d * (h + x * (h * (1.0 - h)))).to(dg.dtype.element_ty), mask=inside
    )


def forward(gate, up):
    """round(silu(gate)) * up of [M, F], rounded."""
    gate = gate if gate.stride(-1) == 1 else gate.contiguous()
    up = up if up.stride(-1) == 1 else up.contiguous()
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel() > 0:
        grid = (gate.shape[0], triton.cdiv(gate.shape[1], 2048))
        silu_mul_kernel[grid](
            gate,
            up,
            y,
            gate.shape[1],
            gate.stride(0),
            up.stride(0),
            HAS_UP=True,
            BLOCK=2048,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return y


def backward(dy, gate, up):
    """(dgate, dup) of [M, F]."""
    gate = gate if gate.stride(-1) == 1 else gate.contiguous()
    up = up if up.stride(-1) == 1 else up.contiguous()
    dy = dy.contiguous()
    dg = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    du = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if dg.numel() > 0:
        grid = (gate.shape[0], triton.cdiv(gate.shape[1], 2048))
        silu_mul_bwd_kernel[grid](
            gate,
            up,
            dy,
            dg,
            du,
            gate.shape[1],
            gate.stride(0),
            up.stride(0),
            HAS_UP=True,
            BLOCK=2048,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return dg, du
