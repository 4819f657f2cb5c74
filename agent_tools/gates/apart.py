"""Gates of a large model in two processes, where there are cores for both.

Gates share nothing but the rollout, and what is sampled does not depend on who samples it: each
process draws the same tokens. What C10 times runs when the other process has ended.

    with Apart(asked, plan, size, names, threads=1) as other:    # C1, C6, C7, C8, C9 of ``names``
        ...                                                      # the rest, here
        results = other.results()

One thread (``OMP_NUM_THREADS=1``) means one process. The digest of the prompts is compared.
"""

import contextlib
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ...kernels.errors import CapabilityError, MisalignedError
from ...model_recipes.plan import Plan
from ..second_process import new_pool, take
from .base import GateResult, Request
from .bench import Size

APART = ("C1", "C6", "C7", "C8", "C9")
"""About half of the work."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Gates under way in another process."""

    future: Future[tuple[str, list[str]]]
    prompts: str

    def results(self) -> list[GateResult]:
        """Wait for them."""
        try:
            prompts, texts = self.future.result()
        except BrokenProcessPool as error:
            raise CapabilityError(
                "the second process of the gates ended by itself, perhaps for want of memory; "
                "set OMP_NUM_THREADS=1 to run all gates in one"
            ) from error
        if prompts != self.prompts:
            raise MisalignedError(
                "the two processes of the gates made other prompts from the same seed; report "
                "this, and set OMP_NUM_THREADS=1 to run all gates in one"
            )
        return [GateResult.model_validate_json(text) for text in texts]


@contextlib.contextmanager
def apart(
    asked: Request, plan: Plan, size: Size, names: Sequence[str], *, prompts: str, threads: int,
    pool: ProcessPoolExecutor | None = None,
) -> Generator[Apart]:  # fmt: skip
    """Start them; ``threads`` of their own. prompts: the digest of this process's prompts.

    pool: a process that has loaded the model (``second_process.py``); None begins one.
    """
    with contextlib.nullcontext(pool) if pool is not None else new_pool() as other:
        texts = asked.model_dump_json(), plan.model_dump_json()
        yield Apart(other.submit(_run, *texts, asdict(size), list(names), threads), prompts)


def _run(
    asked_text: str, plan_text: str, counts: dict[str, int], names: list[str], threads: int
) -> tuple[str, list[str]]:
    """In the other process: load the model again and run the gates of these names."""
    from ...model_recipes.plan import load_own_kernels
    from .bench import Bench, copy_of, requests_digest
    from .run import GATES, prompts_for, run_gate

    torch.set_num_threads(threads)
    asked, size = Request.model_validate_json(asked_text), Size(**counts)
    model = take(asked.model, dtype=asked.dtype, device=asked.device, seed=asked.seed)
    untouched = copy_of(model)
    if asked.recipe is not None:
        load_own_kernels(asked.recipe)
    file = Path(asked.prompts) if asked.prompts else None
    bench = Bench(
        model=model, plan=Plan.model_validate_json(plan_text), size=size, quick=asked.quick,
        prompts=tuple(prompts_for(model, size, asked.seed, file)), seed=asked.seed,
        untouched=untouched,
    )  # fmt: skip
    try:
        found = [run_gate(gate, bench) for gate in GATES if gate.id in names]
    finally:
        bench.release()
    return requests_digest(bench.prompts), [each.model_dump_json() for each in found]
