"""No memory for a batch: named, with a remedy that a resumed run takes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zeromismatch.kernels.errors import CapabilityError
from zeromismatch.model_recipes.models import LoadedModel
from zeromismatch.trainer.loop.config import TrainConfig, differences
from zeromismatch.trainer.loop.hosts import ProcessHost
from zeromismatch.trainer.loop.limits import ROLLOUT_REMEDY, fewer_rows, named_memory, rows_of
from zeromismatch.trainer.loop.run import Setup, train
from zeromismatch.trainer.loop.worker import Generated, RolloutWorker

CONFIG = TrainConfig(recipe="-", task="-", max_rows=4096)


@pytest.mark.parametrize(
    ("ranks", "remedy"), [(1, "resume with a lower max_rows"), (2, "start again with a lower")]
)
def test_an_allocation_that_fails_says_what_to_do(ranks: int, remedy: str) -> None:
    config = CONFIG.model_copy(update={"ranks": ranks})
    with (
        pytest.raises(CapabilityError, match=rf"update 7, .*4096 tokens.*{remedy}"),
        named_memory(f"update 7, {rows_of(config)}", fewer_rows(config)),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="must match") as other, named_memory("it", "wait"):
        torch.ones(2) + torch.ones(3)
    assert not isinstance(other.value, CapabilityError)
    lower = config.model_copy(update={"max_rows": 2048})
    assert differences(config, lower) == ([] if ranks == 1 else ["max_rows: 4096 -> 2048"])


@pytest.mark.parametrize(
    "told",
    [
        ValueError("Free memory on device cuda:0 (3/140 GiB) on startup is less than desired"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore"),
    ],
)
def test_what_vllm_and_cudas_libraries_say_of_memory_is_named_too(told: Exception) -> None:
    with (
        pytest.raises(CapabilityError, match=r"no memory for the vllm engine .*lower cache_gib"),
        named_memory("the vllm engine", ROLLOUT_REMEDY),
    ):
        raise told


class Starved(RolloutWorker):
    """Asks for more memory than there is, the second time that it is asked for groups."""

    def _generate(self, groups: Sequence[int], version: int) -> Generated:
        if 0 not in groups:
            torch.empty(1 << 60, dtype=torch.uint8)
        return super()._generate(groups, version)


@pytest.mark.slow
def test_a_worker_without_memory_ends_the_run_which_goes_on_from_there(
    fresh: Callable[[], LoadedModel],
    setup_of: Callable[..., Setup],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = setup_of(lag=0, updates=2, checkpoint_every=1, placement="processes")
    wanted = train(setup_of(lag=0, updates=2), tmp_path / "whole", model=fresh())
    with monkeypatch.context() as starved:
        starved.setattr(ProcessHost, "worker", Starved)
        with pytest.raises(CapabilityError, match=r"drawing 4 responses of version 1 .*resume"):
            train(setup, tmp_path / "run", model=fresh())
    got = train(setup, tmp_path / "run", resume=True, model=fresh())
    assert (got.resumed_at, got.weights_root) == (1, wanted.weights_root)


def test_a_run_goes_on_with_fewer_rows_and_the_same_bits(
    fresh: Callable[[], LoadedModel], setup_of: Callable[..., Setup], tmp_path: Path
) -> None:
    whole = setup_of(lag=1, updates=4, max_rows=200)
    wanted = train(whole, tmp_path / "whole", model=fresh())
    train(setup_of(lag=1, updates=2, max_rows=200), tmp_path / "run", model=fresh())
    fewer = replace(whole, config=whole.config.model_copy(update={"max_rows": 20}))
    got = train(fewer, tmp_path / "run", resume=True, model=fresh())
    assert (got.resumed_at, got.weights_root) == (2, wanted.weights_root)
