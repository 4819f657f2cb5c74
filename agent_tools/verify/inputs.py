"""The verifier's own inputs: shapes and data from a seed that no candidate can know.

    draw = Draw(contract, seed)
    for case in held_out(contract, draw, quick=False): case.label, case.arguments, case.rows

Row counts lie on both sides of every tile edge and beyond; all other sizes are drawn anew in every
run, so a kernel that knows the shapes of the certification sweep gains nothing. References are slow
loops over the reduced axis, hence the other axes shrink as rows grow. Operators without a maker
here use their certification cases with secret data (:func:`has_own_shapes` says which).

Legend: T rows, K inputs, N outputs, H width, V vocabulary, D head size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels import cases_attention, certify
from ...kernels.contract import Contract
from ...kernels.dispatch import reference
from ...kernels.trial import Case
from . import inputs_moe as inputs_moe  # registers its makers
from .draw import MAKERS, Draw, Maker, case_of, maker

ROWS = (1, 7, 8, 9, 127, 128, 129, 255, 256, 257, 4096, 4097)
QUICK_ROWS = (1, 9, 129, 257)
PAGE = cases_attention.PAGE


@maker("rmsnorm")
def _rmsnorm(draw: Draw, t: int) -> Case:
    h = draw.size(2, 700, t)
    residual = draw.maybe(draw.rows(t, h))
    eps = draw.random.choice((1e-5, 1e-6, 3e-5))
    arguments = (draw.rows(t, h), draw.vector(h), eps, draw.random.random() < 0.4, residual)
    return case_of(
        f"rows {t}, width {h}", *arguments, rows=(0,) if residual is None else (0, 4)
    )


@maker("rmsnorm_grad")
def _rmsnorm_grad(draw: Draw, t: int) -> Case:
    h = draw.size(2, 400, t)
    dy, s, ds = (draw.rows(t, h) for _ in range(3))
    initial = draw.maybe(draw.rows(1, h)[0].float())
    unit = draw.random.random() < 0.4
    return case_of(
        f"rows {t}, width {h}", dy, s, draw.vector(h), 1e-5, unit, draw.maybe(ds), initial
    )


@maker("rmsnorm_wide")
def _rmsnorm_wide(draw: Draw, t: int) -> Case:
    h, residual = draw.size(2, 700, t), None
    residual = draw.maybe(draw.rows(t, h))
    arguments = (draw.rows(t, h), draw.vector(h), draw.random.choice((1e-5, 1e-6)), residual)
    return case_of(f"rows {t}, width {h}", *arguments, rows=(0,) if residual is None else (0, 3))


@maker("rmsnorm_wide_grad")
def _rmsnorm_wide_grad(draw: Draw, t: int) -> Case:
    h = draw.size(2, 400, t)
    dy, s, ds = (draw.rows(t, h) for _ in range(3))
    initial = draw.maybe(draw.rows(1, h)[0].float())
    return case_of(f"rows {t}, width {h}", dy, s, draw.vector(h), 1e-5, draw.maybe(ds), initial)


@maker("linear", "lm_head", "router")
def _linear(draw: Draw, t: int) -> Case:
    k, n = draw.size(2, 700, 1), draw.size(2, 140, t)
    x, weight = draw.rows(t, k), draw.rows(n, k, scale=0.1)
    bias = draw.maybe(draw.vector(n))
    rounding = () if draw.contract.op != "linear" else (draw.maybe(torch.float32),)
    return case_of(f"rows {t}, {k} to {n}", x, weight, bias, *rounding, rows=(0,))


@maker("linear_grad_input")
def _grad_input(draw: Draw, t: int) -> Case:
    n, k = draw.size(2, 600, 1), draw.size(2, 140, t)
    return case_of(
        f"rows {t}, {n} to {k}", draw.rows(t, n), draw.rows(n, k, scale=0.1), None, rows=(0,)
    )


@maker("linear_grad_weight")
def _grad_weight(draw: Draw, t: int) -> Case:
    n, k = draw.size(2, 60, max(1, t // 64)), draw.size(2, 60, max(1, t // 64))
    initial = draw.maybe(draw.rows(n, k).float())
    return case_of(f"tokens {t}, [{n}, {k}]", draw.rows(t, n), draw.rows(t, k), initial, None, None)


@maker("linear_grad_bias")
def _grad_bias(draw: Draw, t: int) -> Case:
    n = draw.size(2, 300, 1)
    initial = draw.maybe(draw.vector(n).float())
    return case_of(f"tokens {t}, [{n}]", draw.rows(t, n), initial, None, None)


@maker("embedding")
def _embedding(draw: Draw, t: int) -> Case:
    h, v = draw.size(2, 700, t), draw.size(3, 900)
    return case_of(f"rows {t} of [{v}, {h}]", draw.integers(t, v), draw.rows(v, h), rows=(0,))


@maker("embedding_grad")
def _embedding_grad(draw: Draw, t: int) -> Case:
    h, v = draw.size(2, 300, max(1, t // 8)), draw.size(3, 200)
    initial = draw.maybe(draw.rows(v, h).float())
    ids = draw.integers(t, min(v, 9))
    return case_of(f"tokens {t} into [{v}, {h}]", draw.rows(t, h), ids, v, initial, None)


def _temperature(draw: Draw, t: int) -> Tensor:
    temperature = draw.uniform(t, 0.3, 2.0)
    temperature[::3] = 1.0
    return temperature


@maker("logprob")
def _logprob(draw: Draw, t: int) -> Case:
    v = draw.size(2, 1500, t)
    logits = draw.rows(t, v, scale=0.5)
    return case_of(
        f"rows {t}, vocabulary {v}", logits, draw.integers(t, v), _temperature(draw, t),
        rows=(0, 1, 2),
    )  # fmt: skip


@maker("logprob_grad")
def _logprob_grad(draw: Draw, t: int) -> Case:
    v = draw.size(2, 1500, t)
    given = (draw.rows(t, v, scale=0.5), draw.integers(t, v), _temperature(draw, t))
    forward = "logprob.lanes16.float32.cpu.v1" if draw.device == "cpu" else None
    forward = forward or f"logprob.blocks.float32.{draw.contract.device}.v1"
    _, peak, log_sum = reference(forward).run(*given)
    arguments = (*given, peak, log_sum, draw.uniform(t, -2.0, 2.0), None)
    return case_of(f"rows {t}, vocabulary {v}", *arguments, rows=(0, 1, 2, 3, 4, 5))


@maker("activation", "activation_gelu")
def _activation(draw: Draw, t: int) -> Case:
    h = draw.size(2, 900, t)
    return case_of(f"rows {t}, width {h}", draw.rows(t, h, scale=0.3), rows=(0,))


@maker("gated", "gated_gelu", "activation_grad", "activation_gelu_grad")
def _gated(draw: Draw, t: int) -> Case:
    h = draw.size(2, 900, t)
    pair = (draw.rows(t, h, scale=0.3), draw.rows(t, h, scale=0.3))
    padded = (*pair, None) if "grad" in draw.contract.op and draw.device != "cpu" else pair
    return case_of(f"rows {t}, width {h}", *padded, rows=(0, 1))


@maker("gated_grad", "gated_gelu_grad")
def _gated_grad(draw: Draw, t: int) -> Case:
    h = draw.size(2, 700, t)
    tensors = (draw.rows(t, h, scale=0.3) for _ in range(3))
    return case_of(f"rows {t}, width {h}", *tensors, rows=(0, 1, 2))


@maker("softcap")
def _softcap(draw: Draw, t: int) -> Case:
    v, cap = draw.size(2, 900, t), draw.random.uniform(5.0, 60.0)
    return case_of(f"rows {t}, vocabulary {v}, cap {cap:.3g}", draw.rows(t, v), cap, rows=(0,))


@maker("softcap_grad")
def _softcap_grad(draw: Draw, t: int) -> Case:
    v, cap = draw.size(2, 900, t), draw.random.uniform(5.0, 60.0)
    return case_of(
        f"rows {t}, vocabulary {v}, cap {cap:.3g}", draw.rows(t, v), draw.rows(t, v), cap,
        rows=(0, 1),
    )  # fmt: skip


@maker("rotary")
def _rotary(draw: Draw, t: int) -> Case:
    heads = draw.size(1, 6, t)
    head = 2 * draw.size(1, 40, t * heads)
    width = 2 * draw.random.randint(1, head // 2)
    angle = draw.rows(t, width).float()
    x = draw.rows(t, heads * head).view(t, heads, head)
    return case_of(
        f"rows {t}, {heads} heads of {head}, {width} turned", x, torch.cos(angle),
        torch.sin(angle), rows=(0, 1, 2),
    )  # fmt: skip


@maker("sampling")
def _sampling(draw: Draw, t: int) -> Case:
    v = draw.size(2, 900, t)
    logits = draw.rows(t, v, scale=0.2)
    logits[4::9] = logits[4::9].round()
    temperature = draw.uniform(t, 0.1, 2.0)
    temperature[::4] = 0.0
    return case_of(
        f"rows {t}, vocabulary {v}", logits, draw.integers(t, 2**62), draw.integers(t, 10_000),
        temperature, rows=(0, 1, 2, 3),
    )  # fmt: skip


@maker("rotary_table")
def _rotary_table(draw: Draw, t: int) -> Case:
    half = draw.random.randint(1, 80)
    order = torch.arange(half, dtype=torch.float64, device=draw.device) / half
    frequency = draw.random.uniform(500.0, 1e6) ** -order
    scaling = draw.random.choice((1.0, draw.random.uniform(0.5, 2.0)))
    label = f"rows {t}, {half} frequencies"
    return case_of(label, frequency, draw.integers(t, 131_072), scaling, rows=(1,))


def _attention(draw: Draw, t: int) -> Case:
    """A whole prefill, chunks on cached keys and decode rows, ``t`` query rows in all or fewer."""
    left, requests = min(t, 150), []
    while left > 0:
        count = draw.random.choice((1, left, draw.random.randint(1, left)))
        requests.append((count, count + draw.random.choice((0, draw.random.randint(0, 80)))))
        left -= count
    kv_heads = draw.random.choice((1, 2, 3))
    setting = cases_attention.Setting(
        requests=tuple(requests[:12]), heads=kv_heads * draw.random.choice((1, 2, 3)),
        kv_heads=kv_heads, head_dim=16 * draw.random.randint(1, 5),
        window=draw.random.choice((0, draw.random.randint(1, 90))),
        softcap=draw.random.choice((0.0, draw.random.uniform(5.0, 50.0))),
        sinks=draw.random.random() < 0.3,
    )  # fmt: skip
    return cases_attention.case(setting, draw.random.getrandbits(40), draw.dtype)


def _attention_grad(draw: Draw, t: int) -> Case:
    """Packed requests of ``t`` rows in all, or fewer, after their own forward."""
    lengths, left = [], min(t, 60)
    while left > 0:
        lengths.append(draw.random.randint(1, left))
        left -= lengths[-1]
    kv_heads, dim = draw.random.choice((1, 2)), 16 * draw.random.randint(1, 4)
    heads = kv_heads * draw.random.choice((1, 3))
    rows = sum(lengths)
    q, k, v, dout = (
        draw.rows(rows, num * dim, scale=0.3).view(rows, num, dim)
        for num in (heads, kv_heads, kv_heads, heads)
    )
    window, softcap = draw.random.choice((0, 17)), draw.random.choice((0.0, 7.0))
    options = (dim**-0.5, window, softcap, draw.maybe(draw.uniform(heads, -2.0, 2.0)))
    start = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    pages = torch.tensor([-(-length // PAGE) for length in lengths])
    first = pages.cumsum(0) - pages
    slots = torch.cat(
        [torch.arange(n) + PAGE * int(at) for n, at in zip(lengths, first, strict=True)]
    )
    held = [each.new_zeros(int(pages.sum()) * PAGE, *each.shape[1:]) for each in (k, v)]
    held[0][slots], held[1][slots] = k, v
    k_pages, v_pages = (each.unflatten(0, (-1, PAGE)) for each in held)
    table = (first[:, None] + torch.arange(int(pages.max()))).to(torch.int32)
    forward = reference(draw.contract.id.replace("attention_grad.", "attention.")).run
    saved = forward(
        q, k_pages.permute(0, 2, 3, 1).contiguous(), v_pages.transpose(1, 2).contiguous(), start,
        torch.tensor(lengths, dtype=torch.int32), table, *options,
    )  # fmt: skip
    label = f"lengths {lengths}, heads {heads}/{kv_heads} of {dim}, window {window}"
    return case_of(label, dout, q, k, v, *saved, start, *options)


_PAGED: dict[str, Maker] = {"attention": _attention, "attention_grad": _attention_grad}


def has_own_shapes(contract: Contract) -> bool:
    """Whether the sizes are secret too, not only the data."""
    paged = contract.op in _PAGED and contract.device == "cpu"
    return contract.op in MAKERS or paged


def held_out(
    contract: Contract, draw: Draw, *, quick: bool, rows: tuple[int, ...] | None = None
) -> Iterator[Case]:
    """The cases of one entry; ``rows``: other row counts than the verifier's list."""
    if not has_own_shapes(contract):
        seed = draw.random.getrandbits(30)
        yield from certify.cases_of(contract, quick=quick, seed=seed)
        return
    maker = MAKERS.get(contract.op) or _PAGED[contract.op]
    for num_rows in rows or (QUICK_ROWS if quick else ROWS):
        yield maker(draw, num_rows)
