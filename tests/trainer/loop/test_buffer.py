"""The work buffer: slots bound the lag, whoever comes first."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromismatch.kernels.errors import BudgetError, UsageError
from zeromismatch.trainer.loop.buffer import Claim, Closed, WorkBuffer

NOW = 0.01


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_no_claim_can_be_older_than_the_cap_in_any_order_of_events(
    groups: int, lag: int, count: int, deterministic: bool, produce: list[bool]
) -> None:
    updates = 8
    buffer: WorkBuffer[int] = WorkBuffer(
        groups=groups, lag=lag, updates=updates, deterministic=deterministic
    )
    version, claimed = 0, []
    for wants_to_produce in produce:
        if wants_to_produce:
            try:
                claim = buffer.claim(count, timeout=0)
            except (BudgetError, Closed):
                continue
            for number in claim.groups:
                lag_of_it = number // groups - claim.version
                assert lag_of_it <= lag
                if deterministic:
                    assert claim.version == max(0, number // groups - lag)
                buffer.put(number, number)
            claimed += claim.groups
        else:
            try:
                taken = buffer.take(version, timeout=0)
            except BudgetError:
                continue
            assert taken == list(range(version * groups, (version + 1) * groups))
            version += 1
            buffer.published(version)
            if version == updates:
                break
    assert claimed == sorted(set(claimed))
    assert max(claimed, default=0) < (version + 1 + lag) * groups


def test_producers_wait_for_room_and_are_counted() -> None:
    buffer: WorkBuffer[str] = WorkBuffer(groups=2, lag=0, updates=2)
    assert buffer.claim(9, timeout=NOW).groups == (0, 1)
    with pytest.raises(BudgetError, match=r"room in the work buffer.*raise wait_seconds"):
        buffer.claim(9, timeout=NOW)
    for number in (1, 0):
        buffer.put(number, f"group {number}")
    assert buffer.take(0, timeout=NOW) == ["group 0", "group 1"]
    thread = threading.Timer(0.0, buffer.published, (1,))
    thread.start()
    assert buffer.claim(1, timeout=30).groups == (2,)
    thread.join(30)


def test_the_learner_waits_for_the_oldest_group_however_many_newer_ones_are_there() -> None:
    buffer: WorkBuffer[int] = WorkBuffer(groups=1, lag=3, updates=4)
    for number in [buffer.claim(1, timeout=NOW).groups[0] for _ in range(4)][1:]:
        buffer.put(number, number)
    with pytest.raises(BudgetError, match=r"groups of update 0"):
        buffer.take(0, timeout=NOW)


@settings(deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(0, 6),
    st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_in_free_mode_the_lag_stays_between_what_is_kept_ahead_and_the_cap(
    groups: int, lag: int, ahead: int, produce: list[bool]
) -> None:
    buffer: WorkBuffer[int] = WorkBuffer(
        groups=groups, lag=lag, updates=99, deterministic=False, ahead=ahead
    )
    version = 0
    for wants_to_produce in [*produce, *[True, False] * 5]:
        if wants_to_produce:
            try:
                claim = buffer.claim(groups, timeout=0)
            except BudgetError:
                continue
            update = claim.groups[0] // groups
            assert min(update, ahead, lag) <= update - claim.version <= lag
            for number in claim.groups:
                buffer.put(number, number)
        else:
            try:
                buffer.take(version, timeout=0)
            except BudgetError:
                continue
            version += 1
            buffer.published(version)
    assert version  # neither side waits for ever


def test_the_learner_takes_an_update_while_the_last_one_ahead_is_still_being_drawn() -> None:
    buffer: WorkBuffer[int] = WorkBuffer(groups=1, lag=2, updates=9, deterministic=False, ahead=2)
    for number in [buffer.claim(1, timeout=NOW).groups[0] for _ in range(2)]:
        buffer.put(number, number)
    with pytest.raises(BudgetError):
        buffer.take(0, timeout=NOW)  # update 2 has not started
    buffer.claim(1, timeout=NOW)
    assert buffer.take(0, timeout=NOW) == [0]


def test_a_group_nobody_claimed_is_refused() -> None:
    buffer: WorkBuffer[int] = WorkBuffer(groups=1, lag=0, updates=1)
    with pytest.raises(UsageError, match=r"not claimed"):
        buffer.put(0, 0)
    buffer.claim(1, timeout=NOW)
    buffer.put(0, 0)
    with pytest.raises(UsageError, match=r"arrived twice"):
        buffer.put(0, 0)


def test_closing_ends_every_wait_with_the_failure() -> None:
    buffer: WorkBuffer[int] = WorkBuffer(groups=1, lag=0, updates=9)
    buffer.close(ValueError("the reason"))
    with pytest.raises(ValueError, match=r"the reason"):
        buffer.take(0, timeout=60)


def test_a_resumed_buffer_claims_only_what_has_not_arrived() -> None:
    buffer: WorkBuffer[int] = WorkBuffer(
        groups=2, lag=2, updates=4, version=1, held={2: 2, 5: 5, 0: 0}
    )
    assert buffer.claim(9, timeout=NOW).groups == (3,)
    claim = buffer.claim(9, timeout=NOW)
    assert (claim.groups, claim.version) == ((4,), 0)
    assert buffer.oldest_needed() == 0


def test_what_was_claimed_before_starts_on_its_version_once_that_is_there() -> None:
    buffer: WorkBuffer[int] = WorkBuffer(
        groups=2, lag=3, updates=5, version=2, deterministic=False, held={4: 4},
        claimed={4: 1, 5: 1, 6: 3},
    )  # fmt: skip
    assert buffer.oldest_needed() == 1
    assert buffer.claim(9, timeout=NOW) == Claim(groups=(5,), version=1)
    with pytest.raises(BudgetError):
        buffer.claim(9, timeout=NOW)  # version 3 was published, and must be again
    buffer.put(5, 5)
    buffer.take(2, timeout=NOW)
    buffer.published(3)
    buffer.published(4)
    assert buffer.oldest_needed() == 3
    assert buffer.claim(9, timeout=NOW) == Claim(groups=(6,), version=3)
    assert buffer.claim(9, timeout=NOW) == Claim(groups=(7,), version=4)
    assert buffer.claim(9, timeout=NOW) == Claim(groups=(8, 9), version=4)


def test_versions_that_more_updates_would_need_are_kept() -> None:
    buffer: WorkBuffer[int] = WorkBuffer(groups=1, lag=2, updates=4, version=4, held={})
    assert buffer.oldest_needed() == 2
    free: WorkBuffer[int] = WorkBuffer(
        groups=1, lag=2, updates=4, version=4, deterministic=False, held={}
    )
    assert free.oldest_needed() == 4
