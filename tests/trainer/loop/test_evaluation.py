"""Evaluation beside training: its figures, its resumption, and that training does not notice it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from zeromismatch.agent_tools.training_report import training_page
from zeromismatch.kernels.errors import UsageError
from zeromismatch.model_recipes.models import LoadedModel
from zeromismatch.trainer.loop.evaluation import (
    FILE,
    HELD_OUT,
    Evaluation,
    measured,
    read_evaluations,
)
from zeromismatch.trainer.loop.records import Prompt, Trajectory, UpdateFacts
from zeromismatch.trainer.loop.run import Setup, train
from zeromismatch.trainer.tasks.even import Even

Fresh = Callable[[], LoadedModel]
SetupOf = Callable[..., Setup]
EVALUATED = {"evaluate_every": 1, "evaluate_problems": 3, "evaluate_samples": 2}


def scored(reward: float) -> Trajectory:
    return Trajectory(
        id="0/0", group=0, prompt=Prompt(tokens=(1,)), tokens=(1, 2), sampled_mask=(False, True),
        turns=((1, 2),), logprob_bits=(0,), versions=(0,), temperature=1.0, reward=reward,
    )  # fmt: skip


def test_figures_of_four_problems_by_hand() -> None:
    rewards = ((1.0, 0.0), (0.5, 1.0), (1.0, 1.0), (0.0, 0.0))
    groups = [[scored(reward) for reward in each] for each in rewards]
    found = measured(groups, version=4, root="r", seconds=1.0)
    assert (found.problems, found.samples) == (4, 2)
    assert (found.pass_at_1, found.mean_at_k, found.reward) == (0.5, 0.5, 4.5 / 8)
    assert found.standard_error == (0.5 / 3 / 4) ** 0.5


def without_time(found: list[Evaluation]) -> list[Evaluation]:
    return [replace(each, seconds=0.0) for each in found]


class CutOff(Exception):
    pass


def test_training_keeps_its_bits_and_a_run_that_was_cut_off_its_evaluations(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    plain = train(setup_of(lag=1, updates=2), tmp_path / "plain", model=fresh())
    told: list[Evaluation] = []
    setup = setup_of(lag=1, updates=2, checkpoint_every=1, **EVALUATED)
    beside = train(setup, tmp_path / "beside", evaluated=told.append, model=fresh())
    assert beside.weights_root == plain.weights_root
    found = read_evaluations(tmp_path / "beside")
    assert found == told
    assert [each.version for each in found] == [0, 1, 2]
    assert len({each.weights_root for each in found}) == 3
    assert found[-1].weights_root == beside.weights_root

    def stop(facts: UpdateFacts) -> None:
        if facts.batch.version == 1:
            raise CutOff

    with pytest.raises(CutOff):
        train(setup, tmp_path / "cut", sink=stop, model=fresh())
    kept = tmp_path / "cut" / FILE
    kept.write_text(kept.read_text()[:-9])  # a kill in the middle of a line
    train(setup, tmp_path / "cut", resume=True, model=fresh())
    again = without_time(read_evaluations(tmp_path / "cut"))
    assert [each for each in without_time(found) if each not in again] == []


def test_a_run_that_is_out_of_time_stops_with_a_checkpoint_and_goes_on_from_it(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    settings = {"lag": 1, "updates": 2, "checkpoint_every": 50}
    whole = train(setup_of(**settings), tmp_path / "whole", model=fresh())
    short = setup_of(stop_after=1e-9, **settings)
    last = train(short, tmp_path / "short", model=fresh())
    assert last.version == 1
    last = train(short, tmp_path / "short", resume=True, model=fresh())
    assert (last.resumed_at, last.version) == (1, 2)
    assert last.weights_root == whole.weights_root


@dataclass(frozen=True)
class Unheld:
    """Has training problems and no others."""

    name: str = "unheld"

    def prompt(self, index: int, rng: object) -> Prompt:
        if index >= HELD_OUT:
            raise IndexError(index)
        return Even(vocabulary=3011).prompt(index, rng)  # type: ignore[arg-type]

    def score(self, trajectory: Trajectory) -> float:
        return Even(vocabulary=3011).score(trajectory)


def test_an_evaluation_that_fails_ends_the_run_with_its_reason(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    setup = setup_of(Unheld(), lag=0, updates=2, **EVALUATED)
    with pytest.raises(UsageError, match=r"unheld: prompt 1000000000 raised IndexError"):
        train(setup, tmp_path, model=fresh())


def test_the_page_shows_evaluations() -> None:
    one = measured([[scored(1.0)]], version=4, root="r", seconds=1.0)
    page = training_page([], title="t", evaluations=[one, replace(one, version=8)])
    assert page.sections[0].title == "Held-out problems"
    assert page.sections[0].rows[1][:3] == ("8", "1.000", "1.000")
    assert page.sections[0].curves
