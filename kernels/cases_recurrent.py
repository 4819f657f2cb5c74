"""Certification cases of recurrences, their convolution, gates and norms.

Recurrences: requests of 0 to 3 chunks and a row, begun at positions on both sides of a boundary,
whose earlier rows and states lie on shuffled pages of which all others hold NaN. Log decays go from
0 to far below the range of exp, keys cancel. Row operators: odd widths on both sides of the lanes.

Legend: T rows, C rows per chunk, HK, HV heads, K, V sizes, D channels, W taps, P pages.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import adversarial, cases_blocks
from .certify import register_cases, register_stock
from .contract import Contract
from .reference import recurrence as definition
from .trial import Case

Key = tuple[int, ...]
QUICK_ROWS = (1, 7, 40, 130)
FULL_ROWS = (*QUICK_ROWS, 2, 3, 16, 17, 33, 64, 65, 127, 129, 257)
SHAPES = (  # C, HK, HV, K, V
    (8, 1, 2, 16, 16),
    (4, 2, 2, 5, 33),
    (16, 1, 1, 20, 8),
    (3, 1, 3, 18, 17),
)
FULL_SHAPES = (*SHAPES, (16, 2, 4, 16, 32), (1, 1, 2, 7, 5), (64, 1, 1, 32, 16), (33, 1, 1, 17, 48))
STORAGES = (torch.float32, torch.bfloat16)


class _Data:
    """A fresh seed for every tensor."""

    def __init__(self, contract: Contract, seed: int) -> None:
        self.dtype = getattr(torch, contract.dtype)
        self.device = "cpu" if contract.device == "cpu" else "cuda"
        self.seed = seed * 1_000_003

    def rows(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        self.seed += 1
        count = 1
        for each in shape[1:]:
            count *= each
        drawn = adversarial.rows(
            shape[0], count, seed=self.seed, dtype=dtype or self.dtype, device=self.device,
            scale=scale,
        )  # fmt: skip
        return drawn.view(shape)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        return (torch.rand(shape, generator=generator) * (high - low) + low).to(self.device)

    def keys(self, *shape: int) -> Tensor:
        """Rows of about unit length, some of which cancel."""
        raw = self.rows(*shape, dtype=torch.float32)
        return raw / raw.norm(dim=-1, keepdim=True).clamp(min=1e-3)

    def decays(self, *shape: int) -> Tensor:
        """Log decays: mild, none at all, and now and then beyond the range of exp."""
        g = -(self.uniform(*shape) ** 3) * 4.0
        where = self.uniform(*shape)
        return torch.where(where < 0.1, 0.0, torch.where(where > 0.97, g * 60.0, g))


Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def _inputs(data: _Data, kind: str, rows: int, shape: tuple[int, ...]) -> Rows:
    _, key_heads, heads, key, value = shape
    q, k = data.keys(rows, key_heads, key), data.keys(rows, key_heads, key)
    v = data.rows(rows, heads, value, dtype=torch.float32, scale=0.01)
    g = data.decays(rows, heads, key) if kind == "kda" else data.decays(rows, heads)
    return q, k, v, g, None if kind == "ssd" else data.uniform(rows, heads)


def _kind(contract: Contract) -> str:
    return contract.id.split(".")[1]


def _int(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def recurrence(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data, kind = _Data(contract, seed), _kind(contract)
    for step, shape in enumerate(SHAPES if quick else FULL_SHAPES):
        chunk = shape[0]
        counts = [1, 3 * chunk + 1, 0, max(chunk - 1, 1), 2 * chunk + 2, 1]
        before = [0, 0, 5, chunk + 1, chunk, 3 * chunk - 1]
        label = f"chunks of {chunk}, heads {shape[1]} to {shape[2]}, {shape[3]} by {shape[4]}"
        yield Case(label=label, arguments=_paged(data, kind, shape, counts, before, step))


def _paged(
    data: _Data, kind: str, shape: tuple[int, ...], counts: list[int], before: list[int], step: int
) -> tuple[Any, ...]:
    """Rows of requests with ``before`` positions on pages already, and the pages."""
    chunk, _, heads, key, value = shape
    total = sum(counts)
    q, k, v, g, beta = _inputs(data, kind, total, shape)
    widest = max(-(-(a + b) // chunk) for a, b in zip(counts, before, strict=True))
    pages = len(counts) * widest
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(step)).to(torch.int32)
    table = order.view(len(counts), widest).contiguous().to(data.device)
    old = _inputs(data, kind, pages * chunk, shape)
    k_pages, u_pages, g_pages = (x.unflatten(0, (pages, chunk)) for x in old[1:4])
    end_pages = data.rows(pages, heads, key, value, dtype=torch.float32, scale=0.01)
    stores = [each.clone() for each in (k_pages, u_pages, g_pages, end_pages)]
    for request, positions in enumerate(before):
        for index in range(widest):
            page = int(table[request, index])
            rows = min(max(positions - index * chunk, 0), chunk)
            for store in stores[:3]:
                store[page, rows:] = float("nan")
            if rows < chunk:
                stores[3][page] = float("nan")
    start = _int([sum(counts[:b]) for b in range(len(counts) + 1)], data.device)
    length = _int([a + b for a, b in zip(counts, before, strict=True)], data.device)
    return q, k, v, g, beta, *stores, start, length, table


def stock_recurrence(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What engines run instead: the state after every token, rows of the chunk replayed first."""
    q, k, v, g, beta, k_pages, u_pages, g_pages, end_pages, start, length, table = arguments
    out, (_, u, ends) = torch.empty_like(v), definition.recurrence(*arguments)
    chunk = k_pages.shape[1]
    for b, positions in enumerate(length.tolist()):
        rows = slice(int(start[b]), int(start[b + 1]))
        index, old = divmod(positions - rows.stop + rows.start, chunk)
        if rows.start == rows.stop:
            continue
        page = int(table[b, index])
        state = torch.zeros_like(end_pages[:1])
        if index:
            state = end_pages[table[b, index - 1 : index].long()]
        held = k_pages[page, :old], u_pages[page, :old], g_pages[page, :old]
        _, state = definition.stepwise(held[0], *held, None, state, torch.tensor([0, old]))
        strength = None if beta is None else beta[rows]
        count = torch.tensor([0, rows.stop - rows.start])
        new = q[rows], k[rows], v[rows], g[rows], strength
        out[rows], _ = definition.stepwise(*new, state, count)
    return out, u, ends


BLOCK_SHAPES = ((32, 1, 2, 32, 48), (64, 1, 2, 128, 128), (128, 1, 4, 128, 64), (16, 2, 2, 20, 33))


def recurrence_blocks(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    """As ``recurrence``, bf16 rows and pages; decays of pages are running sums."""
    data, kind = _Data(contract, seed), _kind(contract)
    for step, shape in enumerate(BLOCK_SHAPES):
        chunk = shape[0]
        counts = [1, 3 * chunk + 1, 0, max(chunk - 1, 1), 2 * chunk + 2, 1, 17]
        before = [0, 0, 5, chunk + 1, chunk, 3 * chunk - 1, chunk - 9]
        given = list(_paged(data, kind, shape, counts, before, step))
        for place in (0, 1, 2, 5, 6):
            given[place] = given[place].to(data.dtype)
        given[7] = given[7].cumsum(1)
        for request, positions in enumerate(before):
            if positions % chunk and kind != "ssd":
                page = int(given[11][request, positions // chunk])
                beta = data.uniform(shape[2], positions % chunk)
                cases_blocks.solve(given[5][page], given[7][page], beta, given[8][page])
        yield Case(label=f"chunks of {chunk}, {shape[3]} by {shape[4]}", arguments=tuple(given))


def recurrence_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data, kind = _Data(contract, seed), _kind(contract)
    for shape in SHAPES if quick else FULL_SHAPES:
        chunk = shape[0]
        counts = [2 * chunk + 1, 0, 1, chunk, 3 * chunk + 2 if chunk == 16 else 0]
        start = _int([sum(counts[:b]) for b in range(6)], data.device)
        rows = _inputs(data, kind, sum(counts), shape)
        on_host = [None if x is None else x.cpu() for x in rows]
        pages = [x.new_empty(0, chunk, *x.shape[1:]) for x in on_host[1:4] if x is not None]
        ends = torch.empty(0, shape[2], shape[3], shape[4])
        index = start.cpu(), start.diff().cpu(), torch.zeros(5, 0, dtype=torch.int32)
        arguments: tuple[Any, ...] = (*on_host, *pages, ends, *index)
        _, u, states = definition.recurrence(*arguments)
        u, states = u.to(data.device), states.to(data.device)
        d_o = data.rows(sum(counts), shape[2], shape[4], dtype=torch.float32, scale=0.1)
        label = f"chunks of {chunk}, heads {shape[1]} to {shape[2]}, {shape[3]} by {shape[4]}"
        yield Case(label=label, arguments=(d_o, *rows, u, states, start, chunk))


def recurrence_blocks_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    """As ``recurrence_grad`` of bf16 rows; any states may stand at the chunks' ends."""
    data, kind = _Data(contract, seed), _kind(contract)
    for shape in BLOCK_SHAPES:
        chunk, count = shape[0], 4 * shape[0] - 1
        start = _int([0, 2 * chunk + 1, 2 * chunk + 1, 2 * chunk + 2, count], data.device)
        *rows, g, beta = _inputs(data, kind, count, shape)
        given = (*(each.to(data.dtype) for each in rows), g, beta)
        ends = data.rows(3, *shape[2:], dtype=torch.float32, scale=0.01)
        d_o = data.rows(count, shape[2], shape[4], dtype=torch.float32, scale=0.1)
        label = f"chunks of {chunk}, {shape[3]} by {shape[4]}"
        yield Case(label=label, arguments=(d_o, *given, ends, start, chunk))


def recurrence_stepwise(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data, kind = _Data(contract, seed), _kind(contract)
    for step, shape in enumerate(SHAPES if quick else FULL_SHAPES):
        counts = [1, 0, 99 if step == 1 else 7]
        start = _int([0, 1, 1, sum(counts)], data.device)
        state = data.rows(3, *shape[2:], dtype=torch.float32, scale=0.01)
        rows = _inputs(data, kind, sum(counts), shape)
        label = f"heads {shape[1]} to {shape[2]}, {shape[3]} by {shape[4]}"
        yield Case(label=label, arguments=(*rows, state, start))


CONVOLUTIONS = ((40, 4, 8), (17, 1, 3), (33, 3, 16), (160, 2, 5))  # D, W, C


def convolution(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, (channels, width, chunk) in enumerate(CONVOLUTIONS):
        counts = [1, 2 * chunk + 1, 0, 2, 1, 3 * chunk + 17]
        before = [0, 1, 5, chunk, 2 * chunk - 1, 0]
        pages, widest = 60, 10
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(step))
        table = order.to(torch.int32).view(6, widest).contiguous().to(data.device)
        rows = data.rows(pages, chunk, channels)
        for request, positions in enumerate(before):
            for index in range(widest):
                rows[int(table[request, index]), max(positions - index * chunk, 0) :] = float("nan")
        start = _int([sum(counts[:b]) for b in range(7)], data.device)
        length = _int([a + b for a, b in zip(counts, before, strict=True)], data.device)
        bias = data.rows(1, channels)[0] if step % 2 == 0 else None
        arguments = (
            data.rows(sum(counts), channels), data.rows(channels, width), bias, step % 3 != 1,
            rows, start, length, table,
        )  # fmt: skip
        yield Case(label=f"{channels} channels, {width} taps", arguments=arguments)


def convolution_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, (channels, width, _) in enumerate(CONVOLUTIONS):
        start = _int([0, 1, 1, 3, 20 if step else 110], data.device)
        rows = int(start[-1])
        bias = data.rows(1, channels)[0] if step % 2 == 0 else None
        initial = data.rows(channels, width).float() if step % 2 else None
        arguments = (
            data.rows(rows, channels), data.rows(rows, channels), data.rows(channels, width), bias,
            step % 3 != 1, start, initial, None,
        )  # fmt: skip
        yield Case(label=f"{channels} channels, {width} taps", arguments=arguments)


WIDTHS = ((64, 64), (33, 33), (48, 16), (257, 257), (16, 16), (96, 32), (7, 7))  # H, group
ORDERS = ("silu_after", "sigmoid_after", "silu_before")


def _sized(quick: bool) -> Iterator[tuple[int, int]]:
    yield from enumerate(QUICK_ROWS if quick else FULL_ROWS)


def gated_rmsnorm_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, count in _sized(quick):
        for place, order in enumerate(ORDERS):
            width, group = WIDTHS[(step + place) % len(WIDTHS)]
            group = group if order == "silu_before" else width
            gate_dtype, weight_dtype = (STORAGES[(step + place) // n % 2] for n in (1, 2))
            wide = torch.promote_types(data.dtype, weight_dtype)
            out = wide if order == "silu_before" else data.dtype
            arguments = (
                data.rows(count, width, dtype=out), data.rows(count, width, scale=0.1),
                data.rows(count, width, dtype=gate_dtype, scale=0.1),
                data.rows(1, width, dtype=weight_dtype)[0], 1e-6, group, order,
                data.uniform(width) if step % 2 else None,
            )  # fmt: skip
            yield Case(label=f"rows {count}, {order}, {width} by {group}", arguments=arguments)


def gated_rmsnorm(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for case in gated_rmsnorm_grad(contract, quick, seed, key):
        yield Case(label=case.label, arguments=case.arguments[1:7], rows=(0, 1))


def l2norm_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, count in _sized(quick):
        width = WIDTHS[step % len(WIDTHS)][0]
        dy = data.rows(count, width, dtype=torch.float32)
        arguments = (dy, data.rows(count, width), 1e-6, step % 2 == 0, 0.25)
        yield Case(label=f"rows {count}, width {width}", arguments=arguments, rows=(0, 1))


def l2norm(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for case in l2norm_grad(contract, quick, seed, key):
        yield Case(label=case.label, arguments=case.arguments[1:], rows=(0,))


def _elementwise(tensors: int) -> Any:
    def cases(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
        data = _Data(contract, seed)
        for step, count in _sized(quick):
            width = WIDTHS[step % len(WIDTHS)][0]
            arguments = tuple(data.rows(count, width, scale=0.1) for _ in range(tensors))
            label = f"rows {count}, width {width}"
            yield Case(label=label, arguments=arguments, rows=tuple(range(tensors)))

    return cases


HEADS = ((4, 1), (3, 16), (1, 33), (17, 1), (2, 5))  # heads, columns of each


def decay_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, count in _sized(quick):
        heads, columns = HEADS[step % len(HEADS)]
        width, other = heads * columns, STORAGES[step % 2]
        arguments = (
            data.rows(count, width, dtype=torch.float32), data.rows(count, width),
            data.uniform(heads, low=-2.0, high=3.0).to(other),
            data.uniform(width, low=-4.0, high=1.0).to(other),
            data.uniform(heads) if step % 2 else None, data.uniform(width) if step % 2 else None,
        )  # fmt: skip
        yield Case(label=f"rows {count}, {heads} heads of {columns}", arguments=arguments)


def decay(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for case in decay_grad(contract, quick, seed, key):
        yield Case(label=case.label, arguments=case.arguments[1:4], rows=(0,))


def time_step_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, count in _sized(quick):
        heads, other = HEADS[step % len(HEADS)][0], STORAGES[step % 2]
        arguments = (
            data.rows(count, heads), data.rows(count, heads),
            data.uniform(heads, low=-4.0, high=1.0).to(other), (0.0, 0.001)[step % 2],
            (float("inf"), 0.1)[step // 2 % 2], data.uniform(heads) if step % 2 else None,
        )  # fmt: skip
        yield Case(label=f"rows {count}, {heads} heads", arguments=arguments)


def time_step(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for case in time_step_grad(contract, quick, seed, key):
        yield Case(label=case.label, arguments=case.arguments[1:5], rows=(0,))


def discretised_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, count in _sized(quick):
        heads, columns = HEADS[step % len(HEADS)]
        arguments = (
            data.rows(count, heads, columns, dtype=torch.float32),
            data.rows(count, heads, dtype=torch.float32),
            data.rows(count, heads, columns), data.rows(count, heads).abs(),
            data.uniform(heads, low=-2.0, high=3.0).to(STORAGES[step % 2]),
            data.uniform(heads) if step % 2 else None,
        )  # fmt: skip
        yield Case(label=f"rows {count}, {heads} heads of {columns}", arguments=arguments)


def discretised(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for case in discretised_grad(contract, quick, seed, key):
        yield Case(label=case.label, arguments=case.arguments[2:5], rows=(0, 1))


def skip_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, count in _sized(quick):
        heads, columns = HEADS[step % len(HEADS)]
        arguments = (
            data.rows(count, heads, columns, dtype=torch.float32),
            data.rows(count, heads, columns, dtype=torch.float32),
            data.rows(count, heads, columns), data.uniform(heads).to(STORAGES[step % 2]),
            data.uniform(heads) if step % 2 else None,
        )  # fmt: skip
        yield Case(label=f"rows {count}, {heads} heads of {columns}", arguments=arguments)


def skip(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for case in skip_grad(contract, quick, seed, key):
        yield Case(label=case.label, arguments=case.arguments[1:4], rows=(0, 1))


for _cases in (
    recurrence, recurrence_blocks, recurrence_grad, recurrence_blocks_grad, recurrence_stepwise,
    convolution, convolution_grad, gated_rmsnorm, gated_rmsnorm_grad, l2norm, l2norm_grad, decay,
    decay_grad, time_step, time_step_grad, discretised, discretised_grad, skip, skip_grad,
):  # fmt: skip
    register_cases(_cases.__name__, _cases)
for _name in ("ssd", "gated_delta", "kda"):
    register_stock(f"recurrence.{_name}.float32.cpu.v1", stock_recurrence)
for _op, _tensors in {"sigmoid": 1, "sigmoid_mul": 2, "relu_squared": 1}.items():
    register_cases(_op, _elementwise(_tensors))
    register_cases(f"{_op}_grad", _elementwise(_tensors + 1))
