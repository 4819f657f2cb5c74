"""Linear on the GPU: GEMM class L, forward and backward, by certified dispatch per shape.

    gemm.L.<dtype>.sm90.v1   c = round(sum_k a b + bias)

One fp32 accumulator per output, reduced axis ascending, never split; bias in fp32; one rounding.

bf16, fp16: the chain of Hopper's matrix instructions over 16-wide groups; fp32: one chain of IEEE
FMAs, no TF32. dX and dW are the same class; dW adds chunks of DW_CHUNK tokens ascending in fp32.

cuBLASLt with a pinned algorithm serves a shape once it gave the reference's bits there on
adversarial data; else our Triton kernels do. Unaligned tensors are copied.

Legend: M rows, N outputs, K reduced axis; forms nt (forward), nn (dX), tn (dW).
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import Contract, Implementation, register_contract, register_implementation
from ..errors import ContractError
from ..gpu import cublaslt
from ..gpu.device import NAMES, aligned, missing, num_multiprocessors, require
from .gpu_table import FP32, FP32_SMALL, REFERENCE, Tile, tile_for

DW_CHUNK = 8192
_CANDIDATES, _PROOF_ELEMENTS = 4, 1 << 16
_FORMS = ("nt", "nn", "tn")


@dataclass(frozen=True, slots=True)
class Decision:
    """Who serves one shape. refused: pinned algorithms that gave other bits there."""

    shape: tuple[Any, ...]
    serves: str
    refused: tuple[str, ...]


_PLANS: dict[tuple[Any, ...], tuple[cublaslt.Problem, cublaslt.Algorithm] | Tile] = {}
_DECISIONS: dict[tuple[Any, ...], Decision] = {}


def decisions() -> list[Decision]:
    """Every shape met so far in this process, and who serves it."""
    return list(_DECISIONS.values())


def _sizes(form: str, a: Tensor, b: Tensor) -> tuple[int, int, int]:
    m, k = (a.shape[1], a.shape[0]) if form == "tn" else (a.shape[0], a.shape[1])
    n, k_b = (b.shape[0], b.shape[1]) if form == "nt" else (b.shape[1], b.shape[0])
    if k != k_b or a.dtype != b.dtype:
        raise ContractError(
            f"gemm {form} cannot reduce {tuple(a.shape)} {a.dtype} with {tuple(b.shape)} "
            f"{b.dtype}; check "
            "which weight belongs to this layer"
        )
    return m, n, k


def run_tile(
    tile: Tile, form: str, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    """Launch one of the class's own kernels into ``out`` (contiguous [M, N])."""
    m, n, k = _sizes(form, a, b)
    if m == 0 or n == 0:
        return out
    return (
        _launch_tma(tile, form, a, b, bias, out, (m, n, k))
        if tile.tma and _describable(a, b, out)
        else _launch_pointer(tile, form, a, b, bias, out, (m, n, k))
    )


def _describable(*tensors: Tensor) -> bool:
    """Tensor descriptors need 16-byte aligned bases and row strides."""
    return all(
        each.data_ptr() % 16 == 0
        and each.stride(0) * each.element_size() % 16 == 0
        and min(each.shape) > 0
        for each in tensors
    )


def _launch_pointer(
    tile: Tile,
    form: str,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sizes: tuple[int, int, int],
) -> Tensor:
    import triton

    from . import gpu_kernels

    m, n, k = sizes
    stride_am, stride_ak = (a.stride(1), a.stride(0)) if form == "tn" else a.stride()
    stride_bn, stride_bk = b.stride() if form == "nt" else (b.stride(1), b.stride(0))
    grid = (triton.cdiv(m, tile.bm) * triton.cdiv(n, tile.bn),)
    gpu_kernels.gemm_pointer_kernel[grid](
        a,
        b,
        out,
        a if bias is None else bias,
        m,
        n,
        k,
        stride_am,
        stride_ak,
        stride_bn,
        stride_bk,
        out.stride(0),
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        GROUP_M=8,
        HAS_BIAS=bias is not None,
        SWAP=tile.swap,
        EVEN_K=k % tile.bk == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _launch_tma(
    tile: Tile,
    form: str,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sizes: tuple[int, int, int],
) -> Tensor:
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from . import gpu_kernels

    m, n, k = sizes
    sms = num_multiprocessors(a.device.index)
    width = tile.bn // 2 if tile.subtile else tile.bn
    a_block = [tile.bk, tile.bm] if form == "tn" else [tile.bm, tile.bk]
    b_block = [tile.bn, tile.bk] if form == "nt" else [tile.bk, tile.bn]
    gpu_kernels.gemm_tma_kernel[(min(triton.cdiv(m, tile.bm) * triton.cdiv(n, tile.bn), sms),)](
        TensorDescriptor.from_tensor(a, a_block),
        TensorDescriptor.from_tensor(b, b_block),
        TensorDescriptor.from_tensor(out, [tile.bm, width]),
        a if bias is None else bias,
        m,
        n,
        k,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        GROUP_M=8,
        A_T=form == "tn",
        B_T=form != "nt",
        HAS_BIAS=bias is not None,
        SUBTILE=tile.subtile,
        NUM_SMS=sms,
        FLATTEN=tile.flatten,
        OUT=gpu_kernels.DTYPES[NAMES[out.dtype]],
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def reference(
    form: str,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The class's definition on this architecture: the plain pointer kernel in one fixed tile."""
    m, n, _ = _sizes(form, a, b)
    out = torch.empty(m, n, dtype=out_dtype or a.dtype, device=a.device)
    return _launch_pointer(REFERENCE, form, a, b, bias, out, _sizes(form, a, b)) if m and n else out


def _adversarial(rows: int, k: int, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    """Wide exponents, unequal rows; pairs of columns that cancel exactly lie far apart."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(rows, k, generator=generator, device=device)
    x *= torch.exp2(torch.randint(-6, 7, (rows, k), generator=generator, device=device).float())
    order = torch.randperm(
        k, generator=torch.Generator(device=device).manual_seed(k), device=device
    )
    pairs = k // 8
    sign = 1.0 if seed % 2 else -1.0
    x[:, order[:pairs]] = 64.0
    x[:, order[pairs : 2 * pairs]] = 64.0 * sign
    return x.to(dtype)


def _proved(key: tuple[Any, ...], problem: cublaslt.Problem, algorithm: cublaslt.Algorithm) -> bool:
    form, m, n, k, dtype, out_dtype, has_bias, index = key
    device = torch.device("cuda", index)
    for repeat in range(min(8, max(1, _PROOF_ELEMENTS // (m * n)))):
        a = _adversarial(m, k, dtype, 2 * repeat, device)
        b = _adversarial(n, k, dtype, 2 * repeat + 1, device)
        a = a.t().contiguous() if form == "tn" else a
        b = b if form == "nt" else b.t().contiguous()
        bias = torch.randn(n, device=device).to(dtype) if has_bias else None
        expected = reference(form, a, b, bias, out_dtype)
        got = torch.full_like(expected, float("nan"))
        problem.run(algorithm, a, b, got, bias=bias)
        width = torch.int32 if out_dtype == torch.float32 else torch.int16
        if not torch.equal(got.view(width), expected.view(width)):
            return False
    return True


def _own(m: int, n: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return FP32_SMALL if m <= 64 else FP32
    return tile_for(m, n)


def _decide(key: tuple[Any, ...]) -> tuple[cublaslt.Problem, cublaslt.Algorithm] | Tile:
    form, m, n, k, dtype, out_dtype, has_bias, index = key
    own = _own(m, n, dtype)
    if torch.cuda.is_current_stream_capturing():
        return own  # in the class by construction; the shape is decided at its next eager call
    refused = []
    plan: tuple[cublaslt.Problem, cublaslt.Algorithm] | Tile = own
    if cublaslt.library() is not None:
        problem = cublaslt.Problem(form, m, n, k, dtype, out_dtype, index, has_bias)
        for algorithm in problem.algorithms(_CANDIDATES):
            if _proved(key, problem, algorithm):
                plan = (problem, algorithm)
                break
            refused.append(algorithm.name)
    _PLANS[key] = plan
    serves = plan.name if isinstance(plan, Tile) else plan[1].name
    _DECISIONS[key] = Decision(key, serves, tuple(refused))
    return plan


def gemm(
    form: str,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Class L product of 2-D tensors, by whoever is certified for this shape.

    accumulate: add the finished fp32 chain to ``out`` (fp32), one addition per element.
    """
    require("gemm", a, b, bias)
    if form not in _FORMS:
        raise ContractError(f"gemm has forms {', '.join(_FORMS)}, not {form!r}; choose one")
    a, b = aligned(a), aligned(b)
    bias = None if bias is None else aligned(bias)
    m, n, k = _sizes(form, a, b)
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype or a.dtype, device=a.device)
    if m == 0 or n == 0:
        return out
    if k == 0:
        return out if accumulate else out.copy_(out.new_zeros(()) if bias is None else bias)
    key = (form, m, n, k, a.dtype, out.dtype, bias is not None, a.device.index)
    plan = _PLANS.get(key) or _decide(key)
    if isinstance(plan, Tile):
        if accumulate:
            return out.add_(run_tile(plan, form, a, b, bias, torch.empty_like(out)))
        return run_tile(plan, form, a, b, bias, out)
    plan[0].run(plan[1], a, b, out, bias=bias, accumulate=accumulate)
    return out


@torch.library.custom_op("zeromismatch::gemm", mutates_args=())
def gemm_op(form: str, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """:func:`gemm` as an opaque operator: torch.compile leaves the choice to the launch."""
    return gemm(form, a, b, bias, out_dtype=out_dtype)


@gemm_op.register_fake
def _(form: str, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    m = a.shape[1] if form == "tn" else a.shape[0]
    n = b.shape[0] if form == "nt" else b.shape[1]
    return a.new_empty(m, n, dtype=out_dtype)


def grad_weight(
    grad_TN: Tensor,
    x_TK: Tensor,
    *,
    accumulate_into: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """dW [N, K]: class L over blocks of DW_CHUNK tokens, blocks added ascending in fp32."""
    tokens = grad_TN.shape[0]
    if accumulate_into is None and tokens <= DW_CHUNK:
        return gemm_op("tn", grad_TN, x_TK, None, out_dtype or torch.float32)
    total = accumulate_into
    for start in range(0, tokens, DW_CHUNK):
        block = slice(start, start + DW_CHUNK)
        if total is None:
            total = gemm("tn", grad_TN[block], x_TK[block], out_dtype=torch.float32)
        else:
            gemm("tn", grad_TN[block], x_TK[block], out=total, accumulate=True)
    return total if out_dtype is None or accumulate_into is not None else total.to(out_dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x_TK, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return gemm_op("nt", x_TK, weight, bias, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, weight = ctx.saved_tensors
        grad_TN = grad_TN.to(x_TK.dtype).contiguous()
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        d_bias = None
        if wants_bias:
            ones = torch.ones(1, grad_TN.shape[0], dtype=grad_TN.dtype, device=grad_TN.device)
            d_bias = gemm_op("nn", ones, grad_TN, None, torch.float32)[0].to(ctx.bias_dtype)
        return (
            gemm_op("nn", grad_TN, weight, None, x_TK.dtype) if wants_x else None,
            grad_weight(grad_TN, x_TK, out_dtype=weight.dtype) if wants_weight else None,
            d_bias,
            None,
        )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x[..., K]`` times ``weight[N, K]`` transposed, plus ``bias[N]``; differentiable once."""
    lead = x.shape[:-1]
    x_TK = x.reshape(math.prod(lead), x.shape[-1])
    return _Linear.apply(x_TK, weight, bias, out_dtype or x.dtype).view(*lead, weight.shape[0])


def _offer(
    tile: Tile,
    form: str,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    m, n, _ = _sizes(form, a, b)
    a, b = aligned(a), aligned(b)
    return run_tile(
        tile, form, a, b, bias, torch.empty(m, n, dtype=out_dtype or a.dtype, device=a.device)
    )


def _dispatched(
    form: str,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return gemm(form, a, b, bias, out_dtype=out_dtype)


for _dtype, _name in NAMES.items():
    _contract = register_contract(
        Contract(
            id=f"gemm.L.{_name}.sm90.v1",
            op="gemm",
            dtype=_name,
            device="sm90",
            formula="c[m, n] = round(sum_k a[m, k] b[n, k] + bias[n])",
            order="one fp32 accumulator per output, reduced axis ascending, never split",
            rounding="fp32 accumulator, bias added in fp32, one rounding to nearest even",
            functions={"float32": "fma"}.get(_name, "Hopper mma of 16-wide groups, fp32 sums"),
            reference="zeromismatch.kernels.linear.gpu:reference",
            gradient_rtol=1e-4 if _name == "float32" else 2e-2,
        )
    )
    _tiles = {_own(m, n, _dtype) for m in (1, 32, 64, 256, 1024) for n in (1024, 8192)}
    _offered = {"dispatched": _dispatched} | {t.name: functools.partial(_offer, t) for t in _tiles}
    for _served, _run in _offered.items():
        register_implementation(
            Implementation(contract=_contract.id, name=_served, run=_run, missing=missing)
        )
