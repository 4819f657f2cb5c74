"""Certification cases of attention over a paged cache on the CPU.

Requests of a batch stand for the schedules that serve them: a whole prefill, a chunk on top of
cached keys, a single decode row, a first token; lengths lie on both sides of page borders, several
pages long. Pages are scattered in a pool whose unused pages, and whose slots past a request's
length, hold NaN: a kernel that reads a key it must not see shows it. Rows of one request depend on
its cache, so the row variations of :mod:`.trial` do not apply; the reference treats every row
alone, which makes equality with it phase invariance as well.

Layout (as in ``kernels/reference/attention.py``): k_pages [P, HK, D, 16], v_pages [P, HK, 16, D].
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import adversarial
from .contract import Contract
from .trial import Case

PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One batch: (query rows, keys) of each request, and the attention's shape and options."""

    requests: tuple[tuple[int, int], ...]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def label(self) -> str:
        batch = " ".join(f"{rows}/{keys}" for rows, keys in self.requests)
        options = f", window {self.window}" if self.window else ""
        options += f", softcap {self.softcap:g}" if self.softcap else ""
        options += ", sinks" if self.sinks else ""
        return f"rows/keys {batch}; heads {self.heads}/{self.kv_heads} of {self.head_dim}{options}"


QUICK = (
    Setting(requests=((84, 84), (1, 67), (20, 41), (1, 1))),
    Setting(requests=((1, 33), (7, 16)), heads=3, kv_heads=3, head_dim=80),
    Setting(requests=((40, 40), (1, 49)), window=19, softcap=30.0, sinks=True),
)
FULL = (
    *QUICK,
    Setting(
        requests=tuple((1, keys) for keys in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129))
    ),
    Setting(requests=((130, 130),)),
    Setting(requests=((17, 130), (1, 130), (64, 130), (129, 130))),
    Setting(requests=((33, 33), (1, 65)), heads=9, kv_heads=3),
    Setting(requests=((33, 33), (1, 65)), heads=8, kv_heads=1, head_dim=128),
    Setting(requests=((33, 33), (1, 65)), heads=2, kv_heads=2, head_dim=16),
    Setting(requests=((70, 70), (1, 70), (9, 70)), window=16),
    Setting(requests=((70, 70), (1, 70), (9, 70)), window=33),
    Setting(requests=((30, 30), (1, 40)), softcap=5.0),
    Setting(requests=((30, 30), (1, 40)), sinks=True),
)


def _pages(setting: Setting, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(k pages, v pages, block table): request data at scattered pages, NaN everywhere else."""
    lengths = [keys for _, keys in setting.requests]
    needed = [-(-length // PAGE) for length in lengths]
    total = sum(needed) + 3
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    shape = (total, setting.kv_heads, setting.head_dim)
    k_pages = torch.full((*shape, PAGE), float("nan"), dtype=dtype)
    v_pages = torch.full(
        (total, setting.kv_heads, PAGE, setting.head_dim), float("nan"), dtype=dtype
    )
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    used = 0
    for request, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        pages = order[used : used + count]
        table[request, :count] = pages
        used += count
        width = setting.kv_heads * setting.head_dim
        k, v = (
            adversarial.rows(
                length, width, seed=seed + 10 * request + side, dtype=dtype, scale=0.2
            ).view(length, setting.kv_heads, setting.head_dim)
            for side in (1, 2)
        )
        slots = torch.arange(length)
        k_pages[pages.long()[slots // PAGE], :, :, slots % PAGE] = k
        v_pages[pages.long()[slots // PAGE], :, slots % PAGE] = v
    return k_pages, v_pages, table


def case(setting: Setting, base: int, dtype: torch.dtype) -> Case:
    """The arguments of one batch, drawn from the seed ``base``."""
    k_pages, v_pages, table = _pages(setting, base, dtype)
    counts = torch.tensor([0] + [rows for rows, _ in setting.requests], dtype=torch.int32)
    width = setting.heads * setting.head_dim
    q = adversarial.rows(int(counts.sum()), width, seed=base + 7, dtype=dtype, scale=0.3)
    sinks = (
        adversarial.rows(1, setting.heads, seed=base + 8, kind="plain")[0]
        if setting.sinks
        else None
    )
    arguments = (
        q.view(-1, setting.heads, setting.head_dim),
        k_pages,
        v_pages,
        counts.cumsum(0).to(torch.int32),
        torch.tensor([keys for _, keys in setting.requests], dtype=torch.int32),
        table,
        setting.head_dim**-0.5,
        setting.window,
        setting.softcap,
        sinks,
    )
    return Case(label=setting.label, arguments=arguments)


def attention(contract: Contract, quick: bool, seed: int, key: tuple[int, ...]) -> Iterator[Case]:
    dtype = getattr(torch, contract.dtype)
    for number, setting in enumerate(QUICK if quick else FULL):
        yield case(setting, seed * 1_000_003 + 1000 * number, dtype)
