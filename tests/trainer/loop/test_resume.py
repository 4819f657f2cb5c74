"""kill -9 anywhere, resume, and nothing is lost: bit for bit where the schedule is fixed."""

import json
import os
import random
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from zeromismatch.model_recipes.models import LoadedModel
from zeromismatch.trainer.diagnostics.journal import Journal as Metrics
from zeromismatch.trainer.diagnostics.journal import read_journal
from zeromismatch.trainer.loop.folder import CONFIG
from zeromismatch.trainer.loop.journal import Journal
from zeromismatch.trainer.loop.run import Setup, train
from zeromismatch.trainer.loop.versions import Versions

Fresh = Callable[[], LoadedModel]
SetupOf = Callable[..., Setup]
KILLS = 20
TIMED = {"rollout_seconds", "train_seconds", "sync_seconds", "wait_seconds", "blocked_seconds",
         "tokens_per_second"}  # fmt: skip


def child(setup: Setup, folder: Path, model: LoadedModel, seconds: float | None) -> bool:
    """Train in a forked process, killed after ``seconds``; True if it reached the end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.close(read)
            with Metrics(folder, tensorboard=False) as metrics:
                resume = (folder / CONFIG).exists()
                train(setup, folder, resume=resume, sink=metrics.write, model=model)  # type: ignore[arg-type]
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
    setup = setup_of(lag=2, updates=6, checkpoint_every=2)
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
