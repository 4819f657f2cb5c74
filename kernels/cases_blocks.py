"""Certification cases of recurrences on matrix units: those of :mod:`.cases_recurrent` in bf16."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .cases_recurrent import Key
from .cases_recurrent import _Data as Data
from .cases_recurrent import _kind as kind_of
from .cases_recurrent import _paged as paged
from .certify import register_cases
from .contract import Contract
from .trial import Case

BLOCK_SHAPES = ((32, 1, 2, 32, 48), (64, 1, 2, 128, 128), (128, 1, 4, 128, 64), (16, 2, 2, 20, 33))


def recurrence_blocks(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    """As ``recurrence``, bf16 rows and pages; decays of pages are running sums, T of open chunks of
    a delta rule lies where their end state will be."""
    data, kind = Data(contract, seed), kind_of(contract)
    for step, shape in enumerate(BLOCK_SHAPES):
        chunk = shape[0]
        counts = [1, 3 * chunk + 1, 0, max(chunk - 1, 1), 2 * chunk + 2, 1, 17]
        before = [0, 0, 5, chunk + 1, chunk, 3 * chunk - 1, chunk - 9]
        given = list(paged(data, kind, shape, counts, before, step))
        for place in (0, 1, 2, 5, 6):
            given[place] = given[place].to(data.dtype)
        given[7] = given[7].cumsum(1)
        for request, positions in enumerate(before):
            if positions % chunk and kind != "ssd":
                page = int(given[11][request, positions // chunk])
                _solved(data, *(each[page] for each in given[5:9]), positions % chunk)
        yield Case(label=f"chunks of {chunk}, {shape[3]} by {shape[4]}", arguments=tuple(given))


def _solved(data: Data, k: Tensor, _: Tensor, g: Tensor, end: Tensor, rows: int) -> None:
    """T [HV, C, C] of an open chunk's rows, written where its end state will be."""
    chunk, heads = g.shape[:2]
    keys = k[:rows].float().repeat_interleave(heads // k.shape[1], 1).transpose(0, 1)
    sums = g[:rows].t() if g.dim() == 2 else g[:rows].transpose(0, 1)
    if g.dim() == 2:
        e = (sums[:, :, None] - sums[:, None, :]).clamp(max=0).exp()
        b = keys @ keys.transpose(1, 2) * e
    else:
        e = (sums[:, :, None] - sums[:, None]).clamp(max=0).exp()
        b = torch.einsum("hid,hjd,hijd->hij", keys, keys, e)
    beta = data.uniform(heads, rows)
    one = torch.eye(rows, device=b.device) + beta[:, :, None] * b.tril(-1)
    t = torch.linalg.solve_triangular(one, torch.diag_embed(beta), upper=False)
    space = end.view(data.dtype).flatten(1)[:, : chunk * chunk].unflatten(1, (chunk, chunk))
    space[:, :rows] = 0.0
    space[:, :rows, :rows] = t.to(data.dtype)


register_cases("recurrence_blocks", recurrence_blocks)
