"""Certification cases that only the GPU's contracts have: class L's forms, attention, wide logits.

Shapes lie on both sides of tile edges, of the dispatcher's row limits and of attention's chunks.
The references here are kernels too, so sizes are real; quick sweeps (first use) stay small, since
every new shape is compiled.

Legend: M, N rows and columns of a product, K its reduced axis; T rows, V vocabulary, D head size.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from . import adversarial
from .contract import Contract
from .reference.logprob import logprob as reference_logprob
from .trial import Case

Key = tuple[int, ...]
QUICK_PRODUCTS = ((1, 64, 576), (40, 136, 200), (130, 320, 1536))
FULL_PRODUCTS = (
    *QUICK_PRODUCTS,
    *((m, 4096, 1024) for m in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)),
    *((m, 1536, 4096) for m in (1, 16, 17, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1024)),
    *((m, 1024, 12288) for m in (1, 64, 260, 4096, 4097)),
    (8193, 1536, 576),
    (33, 33, 37),
)
QUICK_LOGITS = ((1, 1000), (3, 9000), (40, 17))
FULL_LOGITS = (*QUICK_LOGITS, (7, 4096), (7, 4097), (65, 49152), (5, 151936), (130, 333), (2, 1))
# lengths, heads, kv heads, D, window, softcap, sinks
QUICK_SETTINGS = (
    ((1030, 33), 8, 2, 128, 0, 0.0, False),
    ((1030, 1, 70), 4, 2, 64, 0, 0.0, False),
    ((130, 17), 6, 2, 48, 37, 30.0, True),
)
FULL_SETTINGS = (
    *QUICK_SETTINGS,
    ((3300, 129), 8, 2, 128, 0, 0.0, False),
    ((2049, 16), 9, 3, 64, 0, 0.0, False),
    ((1500, 40), 4, 1, 128, 700, 0.0, True),
    ((1100, 65), 7, 1, 128, 0, 0.0, False),
    ((1200,), 4, 2, 80, 0, 0.0, False),
    ((1100,), 4, 2, 96, 100, 0.0, False),
    ((1300, 3), 4, 2, 256, 0, 50.0, False),
    ((200, 90), 2, 2, 16, 0, 0.0, False),
)
# Plain causal attention of head size 128: more than three of the library's key tiles, and groups
# on both sides of its limits on query rows.
QUICK_FLASH3 = FULL_SETTINGS[0], ((513, 1, 130), 8, 1, 128, 0, 0.0, False)
FULL_FLASH3 = (
    *QUICK_FLASH3,
    *((lengths, heads, kv_heads, 128, 0, 0.0, False) for lengths, heads, kv_heads in (
        ((3300, 129), 8, 2), ((1100, 65), 7, 1), ((900, 64), 4, 4), ((2049, 16, 17), 16, 1),
        ((1500,), 32, 8), ((127, 128, 129, 255, 256, 257, 383, 384, 385), 5, 1),
    )),
)  # fmt: skip


# tokens, query heads, kv heads, D, positions
QUICK_HEADS = ((1, 3, 1, 64, 70), (40, 16, 8, 128, 5000), (7, 9, 3, 64, 300), (130, 2, 2, 16, 9))
FULL_HEADS = (
    *QUICK_HEADS,
    *((t, 4, 2, 128, 2048) for t in (2, 3, 15, 16, 17, 255, 256, 257, 4097)),
    *((33, 5, 1, d, 100) for d in (16, 32, 64, 128)),
    (5, 32, 8, 64, 131_072),
)


def stock_gemm(
    form: str, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """What torch runs instead: its library may split the reduced axis, by the shape."""
    left, right = a.t() if form == "tn" else a, b.t() if form == "nt" else b
    product = left @ right
    return (product if bias is None else product + bias).to(out_dtype or a.dtype)


def stock_attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float, *rest: object
) -> Tensor:
    """What torch runs instead, request by request; without windows, caps and sinks."""
    outs: list[Tensor] = []
    for start, stop in pairwise(query_start.tolist()):
        one, keys, values = (each[start:stop].transpose(0, 1)[None] for each in (q, k, v))
        out = functional.scaled_dot_product_attention(
            one, keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def _rows(contract: Contract, rows: int, width: int, seed: int, scale: float = 1.0) -> Tensor:
    dtype = getattr(torch, contract.dtype)
    return adversarial.rows(rows, width, seed=seed, dtype=dtype, device="cuda", scale=scale)


def gemm(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for step, (m, n, k) in enumerate(QUICK_PRODUCTS if quick else FULL_PRODUCTS):
        base = seed * 1_000_003 + 10 * step
        form = ("nt", "nn", "tn")[step % 3]
        a = _rows(contract, *((k, m) if form == "tn" else (m, k)), base)
        b = _rows(contract, *((n, k) if form == "nt" else (k, n)), base + 1, 0.1)
        bias = _rows(contract, 1, n, base + 2)[0] if step % 2 else None
        wide = torch.float32 if step % 4 < 2 else None
        yield Case(label=f"{form} {m} x {n} x {k}", arguments=(form, a, b, bias, wide))


def logprob(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for step, (t, v) in enumerate(QUICK_LOGITS if quick else FULL_LOGITS):
        base = seed * 1_000_003 + 10 * step
        temperature = torch.linspace(0.3, 2.0, t, device="cuda")
        temperature[::3] = 1.0
        targets = adversarial.integers((t,), v, seed=base + 1, device="cuda")
        yield Case(
            label=f"rows {t}, vocabulary {v}",
            arguments=(_rows(contract, t, v, base, 0.5), targets, temperature),
            rows=(0, 1, 2),
        )


def logprob_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for case in logprob(contract, quick, seed, key):
        rows, vocabulary = case.arguments[0].shape
        if vocabulary <= 1000:  # its reference goes column by column
            _, row_max, log_sum = reference_logprob(*case.arguments)
            grad = torch.linspace(-2.0, 2.0, rows, device="cuda")
            saved = (row_max, log_sum, grad)
            yield Case(
                label=case.label, arguments=(*case.arguments, *saved), rows=(0, 1, 2, 3, 4, 5)
            )


def norm_rotary(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    """Heads side by side in wider rows, with norms and, every third time, without."""
    for step, (t, heads, kv_heads, d, top) in enumerate(QUICK_HEADS if quick else FULL_HEADS):
        base = seed * 1_000_003 + 10 * step
        rows = _rows(contract, t, (heads + 2 * kv_heads) * d, base, 0.5)
        x = rows[:, : (heads + kv_heads) * d].unflatten(1, (heads + kv_heads, d))
        weights = (None, None) if step % 3 == 2 else _rows(contract, 2, d, base + 1).unbind()
        angle = torch.linspace(0, 9, top * d, device="cuda").view(top, d)
        where = adversarial.integers((t,), top, seed=base + 2, device="cuda")
        yield Case(
            label=f"tokens {t}, heads {heads}/{kv_heads} of {d}, {top} positions",
            arguments=(x, *weights, 1e-6, where, angle.cos(), angle.sin(), heads),
            rows=(0, 4),
        )


def attention(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    flash3 = ".flash3." in contract.id
    few, all_of_them = (QUICK_FLASH3, FULL_FLASH3) if flash3 else (QUICK_SETTINGS, FULL_SETTINGS)
    for step, setting in enumerate(few if quick else all_of_them):
        lengths, heads, kv_heads, dim, window, softcap, has_sinks = setting
        base = seed * 1_000_003 + 10 * step
        q, k, v = (
            _rows(contract, sum(lengths), num * dim, base + i, 0.3).view(-1, num, dim)
            for i, num in enumerate((heads, kv_heads, kv_heads))
        )
        start = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32).cuda()
        sinks = torch.linspace(-2.0, 2.0, heads, device="cuda") if has_sinks else None
        label = f"lengths {lengths}, heads {heads}/{kv_heads} of {dim}"
        label += f", window {window}" if window else ""
        label += f", softcap {softcap:g}" if softcap else ""
        label += ", sinks" if has_sinks else ""
        yield Case(label=label, arguments=(q, k, v, start, dim**-0.5, window, softcap, sinks))


def attention_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    from .attention.gpu import packed_forward

    for step, case in enumerate(attention(contract, quick, seed, key)):
        q, k, v, start, *settings = case.arguments
        if q.shape[0] > 1500:
            continue  # its reference takes the smallest tiles
        do = _rows(contract, q.shape[0], q.shape[1] * q.shape[2], 7 * step + 3, 0.3).view_as(q)
        o, lse = packed_forward(q, k, v, start, tuple(settings), specialised=False)
        yield Case(label=case.label, arguments=(do, q, k, v, o, lse, start, *settings[:3]))
