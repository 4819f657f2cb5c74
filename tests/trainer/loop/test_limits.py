"""No memory for a batch: named, with a remedy that a resumed run takes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zeromismatch.kernels.errors import CapabilityError
from zeromismatch.model_recipes.models import LoadedModel
from zeromismatch.trainer.loop.config import TrainConfig, differences
from zeromismatch.trainer.loop.limits import named_memory
from zeromismatch.trainer.loop.run import Setup, train

CONFIG = TrainConfig(recipe="-", task="-", max_rows=4096)


@pytest.mark.parametrize(
    ("ranks", "remedy"), [(1, "resume with a lower max_rows"), (2, "start again with a lower")]
)
def test_an_allocation_that_fails_says_what_to_do(ranks: int, remedy: str) -> None:
    config = CONFIG.model_copy(update={"ranks": ranks})
    with (
        pytest.raises(CapabilityError, match=rf"update 7: .*4096 tokens.*{remedy}"),
        named_memory(7, config),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="must match") as other, named_memory(7, config):
        torch.ones(2) + torch.ones(3)
    assert not isinstance(other.value, CapabilityError)
    lower = config.model_copy(update={"max_rows": 2048})
    assert differences(config, lower) == ([] if ranks == 1 else ["max_rows: 4096 -> 2048"])


def test_a_run_goes_on_with_fewer_rows_and_the_same_bits(
    fresh: Callable[[], LoadedModel], setup_of: Callable[..., Setup], tmp_path: Path
) -> None:
    whole = setup_of(lag=1, updates=4, max_rows=200)
    wanted = train(whole, tmp_path / "whole", model=fresh())
    train(setup_of(lag=1, updates=2, max_rows=200), tmp_path / "run", model=fresh())
    fewer = replace(whole, config=whole.config.model_copy(update={"max_rows": 20}))
    got = train(fewer, tmp_path / "run", resume=True, model=fresh())
    assert (got.resumed_at, got.weights_root) == (2, wanted.weights_root)
