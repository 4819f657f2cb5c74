"""Workers on devices of their own and an auditor in a process of its own change no bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import BudgetError
from zeromismatch.model_recipes.models import LoadedModel
from zeromismatch.model_recipes.state import named_state
from zeromismatch.trainer.loop import hosts
from zeromismatch.trainer.loop.elsewhere import VISIBLE, Elsewhere
from zeromismatch.trainer.loop.run import Setup, train
from zeromismatch.trainer.loop.versions import Versions
from zeromismatch.trainer.loop.worker import RolloutWorker, WorkerSpec

Fresh = Callable[[], LoadedModel]
SetupOf = Callable[..., Setup]


def spec_of(setup: Setup, folder: Path) -> WorkerSpec:
    return WorkerSpec(
        model=setup.model, dtype="float32", model_seed=0, plan=setup.plan, task=setup.task,
        config=setup.config, versions=folder,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_weights_that_are_sent_to_a_worker_change_no_bit(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[hosts.ProcessHost] = []

    class Kept(hosts.ProcessHost):
        def __init__(self, spec: WorkerSpec) -> None:
            super().__init__(spec)
            made.append(self)

    monkeypatch.setitem(hosts.HOSTS, "processes", Kept)
    settings = {"lag": 1, "updates": 5, "audit": 4, "checkpoint_every": 50}
    wanted = train(setup_of(**settings), tmp_path / "threads", model=fresh())
    apart = setup_of(**settings, placement="processes", apart=True, audit_apart=True)
    facts: list[object] = []
    got = train(apart, tmp_path / "apart", sink=facts.append, model=fresh())
    assert got.weights_root == wanted.weights_root
    # the five updates draw from versions 0, 0, 1, 2 and 3; version 0 lies in a file alone
    assert [len(host.sent_seconds()) for host in made] == [3]
    for one in facts:
        assert len(one.audit.mu) == len(one.batch.mu)  # type: ignore[attr-defined]
        assert bits.equal(one.audit.mu, one.audit.logp)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_auditor_that_is_killed_is_made_again_and_finds_the_same(
    fresh: Fresh, setup_of: SetupOf, tmp_path: Path
) -> None:
    setup = setup_of(groups=2, audit=3, placement="processes")
    spec = spec_of(setup, tmp_path)
    versions = Versions(tmp_path)
    versions.publish(named_state(fresh().module), 0)
    worker = RolloutWorker(spec, fresh())
    drawn = worker.generate((4, 5), 0).groups
    worker.close()
    here = hosts.auditor_of(spec, fresh())
    wanted = here.groups((4, 5), drawn)
    assert sum(len(group.audited) for group in wanted) == 3
    one_by_one = [*here.groups((4,), drawn[:1]), *here.groups((5,), drawn[1:])]
    here.close()
    assert one_by_one == wanted
    for group in wanted:
        recorded = [group.trajectories[member].logprob_bits for member in group.audited]
        assert [value for each in recorded for value in each] == list(group.audit_bits)
    there = hosts.AuditHost(spec)
    try:
        assert there.groups((4, 5), drawn) == wanted
        process = there._elsewhere.process
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        assert there.groups((4, 5), drawn) == wanted
    finally:
        there.close()


class Told:
    def visible(self) -> str:
        return os.environ[VISIBLE]

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
def test_a_process_that_never_answers_is_given_up_in_time_and_ended() -> None:
    there = Elsewhere(Told, wait_seconds=60, noun="a rollout worker")
    try:
        there.call("__repr__", timeout=60)  # it is there
        with pytest.raises(BudgetError, match=r"did not finish 'stop' in 1 s; raise wait_seconds"):
            there.call("stop", timeout=1)
    finally:
        there.close()
    assert there.process.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_a_process_counts_its_gpus_from_its_own_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,5,7")
    there = Elsewhere(Told, wait_seconds=60, noun="it", gpu=1)
    try:
        assert there.call("visible", timeout=60) == "5,4,7"
        assert os.environ[VISIBLE] == "4,5,7"
    finally:
        there.close()
