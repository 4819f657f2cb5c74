"""The loop as a whole: real lag, kernel term 0, the same bits wherever the workers are."""

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from zeromismatch.agent_tools.training import rise
from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import BudgetError, MisalignedError, NonFiniteError, UsageError
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import stock_plan
from zeromismatch.model_recipes.state import state_digest, weights_root
from zeromismatch.trainer.loop import hosts
from zeromismatch.trainer.loop.records import Prompt, Trajectory, UpdateFacts
from zeromismatch.trainer.loop.run import Outcome, Setup, train
from zeromismatch.trainer.tasks.codec import ByteCodec
from zeromismatch.trainer.tasks.even import Even
from zeromismatch.trainer.tasks.user import UserTask

Fresh = Callable[[], LoadedModel]
SetupOf = Callable[..., Setup]


def run(setup: Setup, folder: Path, model: LoadedModel) -> tuple[Outcome, list[UpdateFacts]]:
    facts: list[UpdateFacts] = []
    outcome = train(setup, folder, sink=facts.append, model=model)
    return outcome, facts


def lags(one: UpdateFacts) -> torch.Tensor:
    return one.batch.version - one.batch.versions


@pytest.mark.parametrize(
    ("lag", "updates"),
    [(0, 3), (2, 5), (8, 10), pytest.param(64, 66, marks=[pytest.mark.slow])],
)
@pytest.mark.timeout(600)
def test_after_warm_up_every_token_is_exactly_as_old_as_the_cap_and_the_kernel_term_is_zero(
    lag: int, updates: int, fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    settings = {"audit": 4, "checkpoint_every": 20, "learning_rate": 1e-4}
    outcome, facts = run(setup_of(lag=lag, updates=updates, **settings), tmp_path, fresh())
    assert outcome.version == len(facts) == updates
    for update, one in enumerate(facts):
        assert set(lags(one).tolist()) == {min(update, lag)}
        assert len(one.audit.mu) == len(one.batch.mu)
        assert bits.equal(one.audit.mu, one.audit.logp)
        same = bool(torch.equal(one.output.weights, torch.ones_like(one.output.weights)))
        assert same == (min(update, lag) == 0)
    exported = load_model(str(outcome.export))
    assert weights_root(state_digest(exported.module)) == outcome.weights_root
    assert len([*(tmp_path / "versions").iterdir()]) <= lag + 2


def test_weights_that_stay_in_memory_change_no_bit(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    settings = {"lag": 3, "updates": 9, "audit": 4, "workers": 1}
    plain, _ = run(setup_of(**settings), tmp_path / "files", fresh())
    shared = setup_of(**settings, share_weights=True)
    outcome, facts = run(shared, tmp_path / "memory", fresh())
    assert outcome.weights_root == plain.weights_root
    assert all(bits.equal(one.audit.mu, one.audit.logp) for one in facts)
    assert not list((tmp_path / "memory" / "versions").glob("*.card"))  # withdrawn at the end


@dataclass(frozen=True)
class Low:
    """The share of sampled ids below 1000, a third of all: quickly learned."""

    name: str = "low"

    def prompt(self, index: int, rng: random.Random) -> Prompt:
        return Prompt(tokens=(1, *(rng.randrange(3, 3011) for _ in range(3))))

    def score(self, trajectory: Trajectory) -> float:
        sampled = trajectory.responses[0]
        return sum(token < 1000 for token in sampled) / len(sampled)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_reward_rises_and_with_shuffled_rewards_it_does_not(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    settings = {"lag": 2, "updates": 20, "groups": 4, "group_size": 4, "max_new_tokens": 8}
    rises: list[float] = []
    for shuffled in (False, True):
        setup = setup_of(Low(), shuffle_rewards=shuffled, checkpoint_every=50, **settings)
        _, facts = run(setup, tmp_path / str(shuffled), fresh())
        first, last, error = rise([float(one.batch.rewards.mean()) for one in facts])
        rises.append((last - first) / error)
    assert rises[0] > 3 > rises[1]


def test_several_workers_and_another_split_give_the_bits_of_one(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    one, _ = run(setup_of(lag=2, updates=3), tmp_path / "one", fresh())
    many, _ = run(setup_of(lag=2, updates=3, workers=2, max_rows=24), tmp_path / "two", fresh())
    assert one.weights_root == many.weights_root
    other, _ = run(setup_of(lag=1, updates=3), tmp_path / "other", fresh())
    assert other.weights_root != one.weights_root


def test_free_running_keeps_to_the_cap(fresh: Fresh, setup_of: SetupOf, tmp_path: Path) -> None:
    _, facts = run(setup_of(lag=2, updates=6, mode="free"), tmp_path, fresh())
    for one in facts:
        assert 0 <= int(lags(one).min()) <= int(lags(one).max()) <= 2
        assert bits.equal(one.audit.mu, one.audit.logp)


@dataclass(frozen=True)
class Slow:
    """Ends responses only at their length, so that publications fall into them."""

    name: str = "slow"

    def prompt(self, index: int, rng: random.Random) -> Prompt:
        return Prompt(tokens=(5, 6, rng.randrange(3, 3011)), max_new_tokens=40)

    def score(self, trajectory: Trajectory) -> float:
        return float(trajectory.tokens[-1] % 2)


@pytest.mark.parametrize("partial", ["recorded", "forbidden"])
def test_a_publication_in_mid_response_is_forbidden_or_recorded_per_token_and_audited_as_such(
    partial: str, fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    settings = {"mode": "free", "partial": partial, "audit": 4, "group_size": 2}
    _, facts = run(setup_of(Slow(), lag=3, updates=8, **settings), tmp_path, fresh())
    mixed = 0
    for one in facts:
        assert bits.equal(one.audit.mu, one.audit.logp)
        assert int(lags(one).max()) <= 3
        for response in range(one.batch.num_responses):
            versions = one.batch.versions[one.batch.response == response]
            assert bool((versions.diff() >= 0).all())
            mixed += int(versions[0] != versions[-1])
    assert (mixed > 0) == (partial == "recorded")
    assert len({int(version) for one in facts for version in one.batch.versions}) > 1


def test_stock_kernels_are_stopped_at_the_first_token_that_differs(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path, base: LoadedModel
) -> None:
    config = setup_of(lag=0, updates=2, group_size=8, max_new_tokens=8).config
    stock = Setup(model=base.spec, plan=stock_plan(), task=Even(vocabulary=3011), config=config)
    with pytest.raises(MisalignedError, match=r"update 0.*under the same weights, version 0"):
        run(stock, tmp_path, fresh())


@dataclass(frozen=True)
class Faulty:
    """A task with one fault."""

    fault: str
    name: str = "faulty"

    def prompt(self, index: int, rng: random.Random) -> Prompt:
        if self.fault == "prompt raises":
            raise KeyError("entry 7")
        return Prompt(tokens=(3, 4) if self.fault != "empty" else ())

    def score(self, trajectory: Trajectory) -> float:
        if self.fault == "hangs":
            signal.sigwait([signal.SIGUSR2])
        return float("inf") if self.fault == "infinite" else 1.0

    def next_turn(self, trajectory: Trajectory) -> tuple[int, ...] | None:
        if self.fault == "silent":
            return ()
        return (9,) * 3000 if self.fault == "long" else None


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("prompt raises", UsageError, r"faulty: prompt 0 raised KeyError.*entry 7"),
        ("empty", UsageError, "prompt of group 0 is empty"),
        ("infinite", NonFiniteError, "reward of response 0/0 is inf"),
        ("silent", UsageError, "answered 0/0 with no token"),
        ("long", ValueError, "3005 positions|limit"),
        ("hangs", BudgetError, "score of 0/0 took more than 0.2 s"),
    ],
)
def test_a_bad_task_ends_the_run_and_is_named(
    fault: str,
    error: type[Exception],
    message: str,
    fresh: Fresh,
    setup_of: SetupOf,
    tmp_path: Path,
) -> None:
    setup = setup_of(Faulty(fault), updates=1, task_seconds=0.2 if fault == "hangs" else 30)
    with pytest.raises(error, match=message):
        run(setup, tmp_path, fresh())


@dataclass(frozen=True)
class Endless:
    """No token ends a turn, and no turn is the last."""

    name: str = "endless"

    def prompt(self, index: int, rng: random.Random) -> Prompt:
        return Prompt(tokens=(3, 4))

    def score(self, trajectory: Trajectory) -> float:
        return float(trajectory.tokens[-1] % 2)

    def next_turn(self, trajectory: Trajectory) -> tuple[int, ...] | None:
        return (9,)


def test_a_response_that_never_ends_is_ended_by_the_settings(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    setup = setup_of(Endless(), lag=0, updates=1, max_turns=3, max_new_tokens=4)
    _, facts = run(setup, tmp_path, fresh())
    assert facts[0].batch.lengths.tolist() == [3 * 4] * 4
    assert bits.equal(facts[0].audit.mu, facts[0].audit.logp)


def test_equal_rewards_move_nothing(fresh: Fresh, setup_of: SetupOf, tmp_path: Path) -> None:
    outcome, facts = run(setup_of(Faulty("none"), lag=1, updates=3), tmp_path, fresh())
    assert [one.gradient_norm for one in facts] == [0.0] * 3
    assert outcome.weights_root == facts[0].weights_root


FATAL_TASK = """
import signal
from pathlib import Path
from zeromismatch.trainer.tasks.codec import ByteCodec
from zeromismatch.trainer.tasks.even import Even
from zeromismatch.trainer.tasks.user import UserTask

class Fatal:
    name = "fatal"
    even = Even(vocabulary=3011)

    def prompt(self, index, rng):
        mark = Path(__file__).with_name("died")
        if index == 3 and not mark.exists():
            mark.touch()
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.02)  # of processor time: while it decodes
        return self.even.prompt(index, rng)

    def score(self, trajectory):
        Path(__file__).with_name("scored").open("a").write(f"{trajectory.id}\\n")
        return self.even.score(trajectory)

def make(codec):
    return Fatal()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_process_killed_in_mid_generation_costs_no_bit(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    wanted, _ = run(setup_of(lag=1, updates=3), tmp_path / "threads", fresh())
    (tmp_path / "fatal_task.py").write_text(FATAL_TASK)
    task = UserTask("fatal_task:make", ByteCodec(), tmp_path)
    setup = setup_of(task, lag=1, updates=3, placement="processes", wait_seconds=800)
    got, _ = run(setup, tmp_path / "processes", fresh())
    assert (tmp_path / "died").exists()
    # it died before it had finished the group, which was drawn once more
    assert (tmp_path / "scored").read_text().count("3/0") == 1
    assert got.weights_root == wanted.weights_root


def test_a_worker_that_dies_again_and_again_ends_the_run(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(hosts.ThreadHost):
        def generate(self, groups, version, timeout):  # type: ignore[no-untyped-def]
            raise hosts.WorkerDied("gone; look")

    monkeypatch.setitem(hosts.HOSTS, "processes", Dying)
    with pytest.raises(hosts.WorkerDied):
        run(setup_of(updates=1, placement="processes"), tmp_path, fresh())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_actors_give_the_bits_of_threads(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("raylet_start_wait_time_s", "300"),
        ("agent_register_timeout_ms", "300000"),
    ):
        monkeypatch.setenv(f"RAY_{name}", value)  # a busy machine
    ray = pytest.importorskip("ray")
    wanted, _ = run(setup_of(lag=1, updates=2), tmp_path / "threads", fresh())
    try:
        got, _ = run(
            setup_of(lag=1, updates=2, placement="ray", wait_seconds=800), tmp_path / "ray", fresh()
        )
    finally:
        ray.shutdown()
    assert got.weights_root == wanted.weights_root
