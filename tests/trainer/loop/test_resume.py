"""kill -9 anywhere, resume, and nothing is lost: bit for bit where the schedule is fixed."""

import json
import os
import random
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zeromismatch.model_recipes.models import LoadedModel
from zeromismatch.model_recipes.state import named_state
from zeromismatch.trainer.diagnostics.journal import Journal as Metrics
from zeromismatch.trainer.diagnostics.journal import read_journal
from zeromismatch.trainer.loop.audit import Group
from zeromismatch.trainer.loop.folder import CONFIG
from zeromismatch.trainer.loop.journal import Journal
from zeromismatch.trainer.loop.records import UpdateFacts
from zeromismatch.trainer.loop.run import Setup, train
from zeromismatch.trainer.loop.versions import Versions
from zeromismatch.trainer.loop.worker import RolloutWorker, WorkerSpec

Fresh = Callable[[], LoadedModel]
SetupOf = Callable[..., Setup]
KILLS = 20
FREE_KILLS, MOST_FREE_KILLS = 4, 24
TIMED = {"rollout_seconds", "train_seconds", "sync_seconds", "wait_seconds", "blocked_seconds",
         "install_seconds", "audit_seconds",
         "tokens_per_second"}  # fmt: skip


def child(
    setup: Setup,
    folder: Path,
    model: LoadedModel,
    seconds: float | None,
    also: Callable[[UpdateFacts], None] = lambda facts: None,
) -> bool:
    """Train in a forked process, killed after ``seconds``; True if it reached the end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.close(read)
            with Metrics(folder, tensorboard=False) as metrics:

                def sink(facts: UpdateFacts) -> None:
                    metrics.write(facts)
                    also(facts)

                train(setup, folder, resume=(folder / CONFIG).exists(), sink=sink, model=model)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    select.select([read], [], [], seconds)  # readable when the child is gone
    os.close(read)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return not os.WIFSIGNALED(status)


def metrics_of(folder: Path) -> list[dict[str, object]]:
    """Every update's record without what depends on the clock."""
    return [
        {
            name: value
            for name, value in json.loads(one.model_dump_json()).items()
            if name not in TIMED
        }
        for one in read_journal(folder)
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_twenty_random_points_the_run_ends_with_the_same_bits(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    setup = setup_of(lag=2, updates=6, checkpoint_every=3)
    train(setup, tmp_path / "warm", model=fresh())  # certificates, before any fork
    whole = tmp_path / "whole"
    with Metrics(whole, tensorboard=False) as metrics:
        outcome = train(setup, whole, sink=metrics.write, model=fresh())  # type: ignore[arg-type]
    wanted = metrics_of(whole)
    assert len(wanted) == 6
    rng = random.Random(8)
    kills = runs = 0
    reached: set[int] = set()
    while kills < KILLS or runs < 1:
        folder = tmp_path / f"run{runs}"
        folder.mkdir(exist_ok=True)
        limit = rng.uniform(0.0, outcome.seconds) if kills < KILLS else None
        if child(setup, folder, fresh(), limit):
            assert metrics_of(folder) == wanted
            assert Versions(folder / "versions").root(6) == outcome.weights_root
            runs += 1
        else:
            kills += 1
            found = folder / "metrics.jsonl"
            reached.add(len(read_journal(folder)) if found.exists() else 0)
    assert kills == KILLS
    assert len(reached) > 2, "the kills fell too close together to mean anything"


def learned_of(facts: UpdateFacts) -> dict[int, list[list[int]]]:
    """Logprob bits and versions of each group's action tokens."""
    batch = facts.batch
    return {
        group: [batch.mu[rows].view(dtype=torch.int32).tolist(), batch.versions[rows].tolist()]
        for group in batch.group.unique().tolist()
        for rows in [(batch.group == group)[batch.response]]
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_free_running_under_kills_learns_from_every_group_once_as_it_was_drawn(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    setup = setup_of(lag=3, updates=6, checkpoint_every=2, mode="free", max_new_tokens=12)
    train(setup, tmp_path / "warm", model=fresh())  # certificates, before any fork
    outcome = train(setup, tmp_path / "whole", model=fresh())
    rng = random.Random(5)
    kills = runs = seen_on_their_way = seen_arrived = 0

    def more() -> bool:
        """Enough kills, and some where there was something to lose."""
        missed = kills < MOST_FREE_KILLS and not min(seen_on_their_way, seen_arrived)
        return kills < FREE_KILLS or missed

    while runs < 1 or more():
        folder = tmp_path / f"run{runs}"
        folder.mkdir()
        on_their_way: dict[int, int] = {}
        arrived: dict[int, Group] = {}

        def keep(facts: UpdateFacts, log: Path = folder / "learned.jsonl") -> None:
            with log.open("a") as file:
                file.write(json.dumps([facts.batch.version, learned_of(facts)]) + "\n")

        while True:
            limit = rng.uniform(0.3, 0.9) * outcome.seconds if more() else None
            if child(setup, folder, fresh(), limit, keep):
                break
            kills += 1
            journal = Journal(folder / "arrived.jsonl")
            for number, version in journal.claimed().items():
                assert on_their_way.setdefault(number, version) == version
            for number, group in journal.held().items():
                assert arrived.setdefault(number, group) == group
        runs += 1
        seen_on_their_way += len(on_their_way)
        seen_arrived += len(arrived)
        # an update that a kill undid was made again of the same samples, to the bit
        updates: dict[int, dict[str, list[list[int]]]] = {}
        for line in (folder / "learned.jsonl").read_text().splitlines():
            update, groups = json.loads(line)
            assert updates.setdefault(update, groups) == groups
        assert [one.version for one in read_journal(folder)] == [*range(6)]
        assert {update: [*groups] for update, groups in updates.items()} == {
            update: [str(2 * update), str(2 * update + 1)] for update in range(6)
        }
        for number, group in arrived.items():
            kept = [value for each in group.trajectories for value in each.logprob_bits]
            assert updates[number // 2][str(number)][0] == kept
        for number, version in on_their_way.items():
            assert set(updates[number // 2][str(number)][1]) == {version}
    assert min(seen_on_their_way, seen_arrived) > 0, "no kill fell where it could lose anything"


def test_a_group_drawn_again_by_another_worker_in_other_company_has_the_same_bits(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    setup = setup_of(max_new_tokens=6)
    versions = Versions(tmp_path)
    versions.publish(named_state(fresh().module), 0)
    drawn: list[object] = []
    for together in ((3, 4), (4, 5)):
        worker = RolloutWorker(
            WorkerSpec(
                model=setup.model, dtype="float32", model_seed=0, plan=setup.plan, task=setup.task,
                config=setup.config, versions=tmp_path,
            ),
            fresh(),
        )  # fmt: skip
        drawn.append(worker.generate(together, 0).groups[together.index(4)])
        worker.close()
    assert drawn[0] == drawn[1]


def test_free_running_loses_no_group_that_had_arrived(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    setup = setup_of(lag=3, updates=5, checkpoint_every=2, mode="free")
    stopped = RuntimeError("stopped here")

    def stop(facts: object) -> None:
        if facts.batch.version == 2:  # type: ignore[attr-defined]
            raise stopped

    with pytest.raises(RuntimeError, match=r"stopped here"):
        train(setup, tmp_path, sink=stop, model=fresh())
    arrived = Journal(tmp_path / "arrived.jsonl").held()
    assert len(arrived) >= 2
    seen: dict[int, tuple[int, ...]] = {}

    def keep(facts: object) -> None:
        batch = facts.batch  # type: ignore[attr-defined]
        for group in set(batch.group.tolist()):
            rows = (batch.group == group)[batch.response]
            seen[group] = tuple(batch.mu[rows].view(dtype=batch.versions.dtype).tolist())

    outcome = train(setup, tmp_path, resume=True, sink=keep, model=fresh())
    assert outcome.resumed_at == 2
    assert sorted(seen) == [*range(4, 10)]
    for number, group in arrived.items():
        if number >= 4:
            kept = [value for each in group.trajectories for value in each.logprob_bits]
            assert seen[number] == tuple(kept)
