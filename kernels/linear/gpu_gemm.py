"""GEMM class L on the GPU: one product in three forms, by certified dispatch per shape.

    gemm.L.<dtype>.sm90.v1 (fp32: v2)   c = round(sum_k a b + bias)

Reduced axis ascending, never split between programs; bias in fp32; one rounding.

bf16, fp16: one fp32 accumulator, the chain of Hopper's matrix instructions over 16-wide groups.
fp32: chains of IEEE FMAs over SHORT values, each from +0, added ascending, no TF32: the rule, and
but for zeros' signs the bits, of the CPU's forward products. One chain over all would be 2 to 6
times further from fp64 at 512 to 8,192 values.

cuBLASLt with a pinned algorithm serves a shape in 16 bits once it gave the reference's bits there
on adversarial data; else our Triton kernels do. Unaligned tensors are copied.

Legend: M rows, N outputs, K reduced axis; forms nt (forward), nn (dX), tn (dW).
"""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ContractError, DiskError
from ..gpu import cublaslt
from ..gpu.device import (
    NAMES,
    PROVED_ARCHITECTURES,
    aligned,
    num_multiprocessors,
    programs,
    require,
)
from .gpu_table import FP32, FP32_SMALL, REFERENCE, Tile, tile_for

if TYPE_CHECKING:
    from .gpu_shapes import Served

SHORT = 128
"""Values of the reduced axis in one chain of fp32 FMAs."""
VERSIONS = {"float32": "v2"}
"""Of contracts whose products are class L, by storage type; v1 where nothing is said."""
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
_STORED: dict[torch.dtype, "dict[tuple[Any, ...], Served]"] = {}


def decisions() -> list[Decision]:
    """Every shape met so far in this process, and who serves it."""
    return list(_DECISIONS.values())


def sizes_of(form: str, a: Tensor, b: Tensor) -> tuple[int, int, int]:
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
    m, n, k = sizes_of(form, a, b)
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

    gpu_kernels = programs(__package__, "gpu_kernels")

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
        SHORT=SHORT if a.dtype == torch.float32 else 0,
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

    gpu_kernels = programs(__package__, "gpu_kernels")

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
    m, n, _ = sizes_of(form, a, b)
    out = torch.empty(m, n, dtype=out_dtype or a.dtype, device=a.device)
    return (
        _launch_pointer(REFERENCE, form, a, b, bias, out, sizes_of(form, a, b)) if m and n else out
    )


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


def own_tile(m: int, n: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return FP32_SMALL if m <= 64 else FP32
    return tile_for(m, n)


def _decide(key: tuple[Any, ...]) -> tuple[cublaslt.Problem, cublaslt.Algorithm] | Tile:
    form, m, n, k, dtype, out_dtype, has_bias, index = key
    plan: tuple[cublaslt.Problem, cublaslt.Algorithm] | Tile = own_tile(m, n, dtype)
    if torch.cuda.is_current_stream_capturing():
        return plan  # in the class by construction; the shape is decided at its next eager call
    refused: tuple[str, ...] = ()
    if dtype != torch.float32 and cublaslt.library() is not None:
        problem = cublaslt.Problem(form, m, n, k, dtype, out_dtype, index, has_bias)
        algorithm, refused = _known(key) or _search(key, problem)
        plan = plan if algorithm is None else (problem, algorithm)
    _PLANS[key] = plan
    serves = plan.name if isinstance(plan, Tile) else plan[1].name
    _DECISIONS[key] = Decision(key, serves, refused)
    return plan


Found = tuple[cublaslt.Algorithm | None, tuple[str, ...]]


def _search(key: tuple[Any, ...], problem: cublaslt.Problem) -> Found:
    """The first of the heuristic's choices that is proved at this shape, and the ones that failed;
    kept on disk for other processes.
    """
    form, m, n, k, dtype, out_dtype, has_bias, _ = key
    refused: list[str] = []
    chosen: cublaslt.Algorithm | None = None
    for algorithm in problem.algorithms(_CANDIDATES):
        if _proved(key, problem, algorithm):
            chosen = algorithm
            break
        refused.append(algorithm.name)
    from . import gpu_shapes  # pydantic

    place = (form, m, n, k, NAMES[out_dtype], has_bias)
    held = _STORED.setdefault(dtype, {})
    held[place] = gpu_shapes.Served(
        form=form,
        m=m,
        n=n,
        k=k,
        out=NAMES[out_dtype],
        bias=has_bias,
        algorithm=None if chosen is None else chosen.name,
        raw=None if chosen is None else chosen.raw.hex(),
        refused=tuple(refused),
    )
    try:
        gpu_shapes.save(_contract(dtype), held)
    except DiskError as error:
        warnings.warn(
            f"{error}; until then every process proves them", RuntimeWarning, stacklevel=2
        )
    return chosen, tuple(refused)


def _contract(dtype: torch.dtype) -> str:
    name = NAMES[dtype]
    return f"gemm.L.{name}.{PROVED_ARCHITECTURES[0]}.{VERSIONS.get(name, 'v1')}"


def _known(key: tuple[Any, ...]) -> Found | None:
    """What was found at this shape before, on this machine."""
    from . import gpu_shapes

    form, m, n, k, dtype, out_dtype, has_bias, _ = key
    if dtype not in _STORED:
        _STORED[dtype] = gpu_shapes.load(_contract(dtype))
    held = _STORED[dtype].get((form, m, n, k, NAMES[out_dtype], has_bias))
    if held is None:
        return None
    if held.algorithm is None or held.raw is None:
        return None, held.refused
    return cublaslt.Algorithm(held.algorithm, bytes.fromhex(held.raw)), held.refused


def reprove(dtype: torch.dtype) -> str | None:
    """Prove every stored shape of a storage type again; the first that differs now, or None."""
    from . import gpu_shapes

    index = torch.cuda.current_device()
    outs = {name: each for each, name in NAMES.items()}
    for held in gpu_shapes.load(_contract(dtype)).values():
        if held.algorithm is not None and held.raw is not None:
            algorithm = cublaslt.Algorithm(held.algorithm, bytes.fromhex(held.raw))
            key = (held.form, held.m, held.n, held.k, dtype, outs[held.out], held.bias, index)
            if not _proved(
                key, cublaslt.Problem(*key[:4], dtype, key[5], index, held.bias), algorithm
            ):
                shape = f"{held.form} {held.m} x {held.n} x {held.k}"
                return f"{held.algorithm} gives other bits now at {shape}"
    return None


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
    m, n, k = sizes_of(form, a, b)
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
