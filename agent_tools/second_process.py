"""A second process that loads a model while the first one does.

Gates of a large model run in two processes (``gates/apart.py``). Importing torch and reading the
weights takes each of them ten seconds or more, on one core: begun together, both are ready when
one is. Nothing heavy is imported here.

    with second_process("smollm2-135m", dtype="float32", device="cpu", seed=0) as pool:
        loaded = load_model("smollm2-135m")         # meanwhile
        run_gates(loaded, "aligned", pool=pool)     # or never uses it

``pytest tests/agent_tools/gates``.
"""

import contextlib
import gc
import multiprocessing
import os
import threading
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..model_recipes.models import LoadedModel

DTypeName = Literal["float32", "bfloat16"]
Asked = tuple[str, DTypeName, str, int]
_LOADED: dict[Asked, "LoadedModel"] = {}


def worth_it(model: str, *, device: str, rollout: str) -> bool:
    """Whether gates of this model may want one: on a CPU with cores for two, no reduced model."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(threads) if threads.isdecimal() else os.cpu_count() or 1
    reduced = model.startswith(("tiny:", "code:"))
    return device == "cpu" and rollout == "paged" and cores > 1 and not reduced


@contextlib.contextmanager
def without_gc() -> Generator[None]:
    """While much is imported: objects by the million, and none of them garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def new_pool() -> ProcessPoolExecutor:
    """One process, begun with its first task; it ends with this one, however that ends."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=_follow_parent)


@contextlib.contextmanager
def second_process(
    model: str, *, dtype: DTypeName, device: str, seed: int
) -> Generator[ProcessPoolExecutor]:
    """Begin it, and let it load the model."""
    with new_pool() as pool:
        pool.submit(_load, (model, dtype, device, seed))
        yield pool


def take(model: str, *, dtype: DTypeName, device: str, seed: int) -> "LoadedModel":
    """In the second process: the model that it loaded, else load it now."""
    from ..model_recipes.models import load_model

    held = _LOADED.pop((model, dtype, device, seed), None)
    return held or load_model(model, dtype=dtype, device=device, seed=seed)


def _load(asked: Asked) -> None:
    with without_gc():
        from .gates import run_gates  # all that its work will import

    assert run_gates
    model, dtype, device, seed = asked
    _LOADED[asked] = take(model, dtype=dtype, device=device, seed=seed)


def _follow_parent() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed leaves no work running."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
