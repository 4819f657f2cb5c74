"""Speed beside stock torch, measured in one run: ``zm kernels bench``.

Each row of the table is one operator at one shape (:mod:`.bench_works` lists them). Our function,
with its checks and its certified implementation, and stock torch's run in turn, so that a busy or
slowing machine hits both; the ratio is stock's median over ours, above 1 where ours is faster, with
the quartiles of the pairwise ratios beside it. ``floor`` is what the project demands of the row;
rows without one are for information.

    rows = bench(quick=True)
    print(markdown(rows))

On a GPU, captured graphs are replayed and timed by events (:mod:`.bench_works_gpu`). Left out:
gradients.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import certificates
from .bench_works import Call, Work, time_of, works
from .bench_works_gpu import replayed, time_on_gpu, works_gpu
from .cpu.load import core
from .dispatch import choose
from .errors import CapabilityError, NotCertifiedError, UsageError
from .gpu.device import missing

SECONDS, QUICK_SECONDS = 0.4, 0.08
LEAST_PAIRS, MOST_PAIRS = 5, 2000

GPU_SERVERS = ("triton", "gluon", "dispatched")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One operator at one shape, in microseconds (medians).

    ratio: stock / ours. spread: first and third quartile of the pairwise ratios. floor: the least
    ratio demanded, or None. implementation: who served the contract.

        BenchRow(op="linear", dtype="float32", shape="64 rows, 576 to 1536", ours_us=310.2,
                 stock_us=342.0, ratio=1.10, spread=(1.07, 1.14), pairs=600, floor=0.8,
                 stock="F.linear", implementation="core-avx512")
    """

    op: str
    dtype: str
    shape: str
    ours_us: float
    stock_us: float
    ratio: float
    spread: tuple[float, float]
    pairs: int
    floor: float | None
    stock: str
    implementation: str

    @property
    def reached(self) -> bool | None:
        """Whether the floor is reached; None without one."""
        return None if self.floor is None else self.ratio >= self.floor

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "reached": self.reached}


def bench(
    device: str = "cpu", quick: bool = False, *, progress: Progress | None = None
) -> list[BenchRow]:
    """Measure every row; ``quick`` takes fewer repetitions and leaves out the heaviest rows.

    progress: called with (row, rows done, rows in all). CapabilityError where the CPU core is not
    built, or only a reference serves.
    """
    if device not in ("cpu", "cuda"):
        raise UsageError(f"there is no benchmark for {device!r} here; use --device cpu or cuda")
    if device == "cpu":
        core()
        listed = works()
    else:
        why = missing()
        if why:
            raise CapabilityError(f"no GPU benchmark: {why}; use --device cpu")
        listed = works_gpu()
    chosen = [work for work in listed if not (quick and work.heavy)]
    rows = []
    with torch.no_grad():
        for done, work in enumerate(chosen):
            if progress is not None:
                progress(f"{work.op} {work.shape}", done, len(chosen))
            rows.append(_measure(work, QUICK_SECONDS if quick else SECONDS, device))
    return rows


def _measure(work: Work, seconds: float, device: str) -> BenchRow:
    served = choose(work.contract).name if work.contract else f"core-{core().name}"
    if served == "reference":
        raise NotCertifiedError(
            f"only the reference serves {work.contract}, which is not worth timing; "
            "`zm kernels list` says why"
        )
    ours, stock = work.prepare()
    if device == "cuda":
        pairs = _pairs(replayed(ours), replayed(stock), seconds, time_on_gpu)
    else:
        pairs = _pairs(ours, stock, seconds, time_of)
    medians = [statistics.median(side) / 1000 for side in zip(*pairs, strict=True)]
    ratios = [theirs / mine for mine, theirs in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    return BenchRow(
        op=work.op,
        dtype=str(work.dtype).removeprefix("torch."),
        shape=work.shape,
        ours_us=round(medians[0], 2),
        stock_us=round(medians[1], 2),
        ratio=round(medians[1] / medians[0], 3),
        spread=(round(low, 3), round(high, 3)),
        pairs=len(pairs),
        floor=work.floor,
        stock=work.stock,
        implementation=served,
    )


def _pairs(
    ours: Call, stock: Call, seconds: float, timer: Callable[[Call], int]
) -> list[tuple[int, int]]:
    """(ours, stock) in nanoseconds; who goes first alternates."""
    for call in (ours, stock, ours, stock):
        call()
    pairs: list[tuple[int, int]] = []
    started = time.perf_counter()
    while len(pairs) < LEAST_PAIRS or (
        time.perf_counter() - started < seconds and len(pairs) < MOST_PAIRS
    ):
        if len(pairs) % 2:
            theirs, mine = timer(stock), timer(ours)
        else:
            mine, theirs = timer(ours), timer(stock)
        pairs.append((mine, theirs))
    return pairs


def markdown(rows: list[BenchRow]) -> str:
    """The table for ``benchmarks/``, headed by the machine that it was measured on."""
    on_gpu = any(row.implementation.startswith(GPU_SERVERS) for row in rows)
    here = certificates.environment("sm90" if on_gpu else "cpu")
    share = f"Triton {here.triton}" if on_gpu else f"{torch.get_num_threads()} threads"
    lines = [
        f"{here.processor}, {share}, torch {here.torch}. Medians in "
        "microseconds, ours and stock in turn in one run; ratio is stock / ours.",
        "",
        "| operator | dtype | shape | ours | stock | ratio | quartiles | floor | stock operator |",
        "|---|---|---|--:|--:|--:|---|--:|---|",
    ]
    for row in rows:
        floor = "" if row.floor is None else f"{row.floor:.1f}{'' if row.reached else ' (missed)'}"
        lines.append(
            f"| {row.op} | {row.dtype} | {row.shape} | {row.ours_us:,.1f} | {row.stock_us:,.1f} "
            f"| {row.ratio:.2f} | {row.spread[0]:.2f}–{row.spread[1]:.2f} | {floor} "
            f"| `{row.stock}` |"
        )
    return "\n".join(lines) + "\n"
