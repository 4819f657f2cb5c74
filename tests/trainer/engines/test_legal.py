"""Every violation is named with its event, for every kind of state; legal schedules pass."""

import pytest

from zeromismatch.kernels.errors import ScheduleError
from zeromismatch.trainer.engines.base import (
    Event,
    Evict,
    Hit,
    Preempt,
    Publish,
    Request,
    Resume,
    Schedule,
    Slice,
    StateKind,
    StateSpec,
    Step,
)
from zeromismatch.trainer.engines.legal import granule, legal, require_legal

SHARED = tuple(range(100, 140))
A = Request(id="a", tokens=(*SHARED, *range(60)))
B = Request(id="b", tokens=(*SHARED, *range(200, 260)))
REQUESTS = (A, B)
KV = StateSpec(site="attn", kind="kv", granule=16)


def run(request: str, start: int, stop: int, keep: int | None = None) -> Step:
    return Step(slices=(Slice(request=request, start=start, stop=stop, keep=keep),))


def violations(*events: Event, specs: tuple[StateSpec, ...] = (KV,), **options: int) -> list[str]:
    return legal(Schedule(events=events), specs, REQUESTS, **options)


def test_chunks_hits_drafts_eviction_preemption_and_publication_are_legal() -> None:
    assert not violations(
        run("a", 0, 32),
        Hit(request="b", source="a", upto=16),
        Step(
            slices=(
                Slice(request="b", start=16, stop=50, keep=40),
                Slice(request="a", start=32, stop=33),
            ),
            padded_rows=3,
        ),
        Preempt(request="a"),
        Resume(request="a"),
        Hit(request="a", source="b", upto=32),
        run("a", 32, 100),
        Hit(request="a", source="a", upto=96),
        run("a", 96, 100),
        Evict(request="a"),
        Publish(version=1, digest="x"),
        run("a", 0, 5),
        Step(slices=(), padded_rows=4),
    )


@pytest.mark.parametrize(
    ("events", "index", "sentence"),
    [
        ([run("a", 0, 8), run("a", 9, 12)], 1, "leaves a gap"),
        ([run("a", 3, 8)], 0, "leaves a gap"),
        ([run("a", 0, 8), run("a", 7, 12)], 1, "overlaps"),
        ([run("a", 0, 101)], 0, "future positions"),
        ([run("a", 0, 0)], 0, "is empty"),
        ([run("a", 0, 8), run("a", 8, 5)], 1, "is empty"),
        ([run("a", -1, 8)], 0, "before the first token"),
        ([run("zz", 0, 8)], 0, "unknown request 'zz'"),
        ([run("a", 0, 8, keep=9)], 0, "keep 9 is outside"),
        ([run("a", 0, 8), run("a", 8, 12, keep=7)], 1, "keep 7 is outside"),
        ([run("a", 0, 8, keep=6), run("a", 8, 9)], 1, "leaves a gap"),
        ([Step(slices=())], 0, "has no rows"),
        ([Step(slices=run("a", 0, 1).slices, padded_rows=-1)], 0, "padded_rows is -1"),
        (
            [
                Step(
                    slices=(
                        Slice(request="a", start=0, stop=1),
                        Slice(request="a", start=1, stop=2),
                    )
                )
            ],
            0,
            "twice in one step",
        ),
        ([Hit(request="b", source="a", upto=16)], 0, "has state for [0, 0)"),
        ([run("a", 0, 20), Hit(request="b", source="a", upto=32)], 1, "has state for [0, 20)"),
        ([run("a", 0, 40), Hit(request="b", source="a", upto=8)], 1, "off the granule 16"),
        ([run("a", 0, 40), Hit(request="b", source="a", upto=0)], 1, "at least one granule"),
        ([run("a", 0, 64), Hit(request="b", source="a", upto=48)], 1, "equal only up to 40"),
        ([run("a", 0, 40), Hit(request="zz", source="a", upto=16)], 1, "unknown request"),
        ([run("a", 0, 40), Hit(request="b", source="zz", upto=16)], 1, "unknown source"),
        (
            [run("a", 0, 40), run("b", 0, 2), Hit(request="b", source="a", upto=16)],
            2,
            "already has state for [0, 2)",
        ),
        (
            [run("a", 0, 40), Evict(request="a"), Hit(request="b", source="a", upto=16)],
            2,
            "has state for [0, 0)",
        ),
        (
            [run("a", 0, 40), Preempt(request="a"), Hit(request="b", source="a", upto=16)],
            2,
            "has state for [0, 0)",
        ),
        (
            [
                run("a", 0, 40),
                Publish(version=1, digest="x"),
                Hit(request="b", source="a", upto=16),
            ],
            2,
            "has state for [0, 0)",
        ),
        ([run("a", 0, 8), Publish(version=1, digest="x"), run("a", 8, 9)], 2, "leaves a gap"),
        ([run("a", 0, 8), Evict(request="a"), run("a", 8, 9)], 2, "leaves a gap"),
        ([run("a", 0, 8), Preempt(request="a"), run("a", 0, 9)], 2, "put a Resume before"),
        (
            [
                run("a", 0, 40),
                run("b", 0, 8),
                Preempt(request="b"),
                Hit(request="b", source="a", upto=16),
            ],
            3,
            "put its Resume before the Hit",
        ),
        ([Resume(request="a")], 0, "is not preempted"),
        ([run("a", 0, 8), Preempt(request="a"), Preempt(request="a")], 2, "already preempted"),
        ([Preempt(request="a")], 0, "not running"),
        ([Evict(request="a")], 0, "no state to evict"),
        ([Evict(request="zz")], 0, "unknown request"),
        (
            [Publish(version=2, digest="x"), Publish(version=2, digest="y")],
            1,
            "does not exceed version 2",
        ),
    ],
)
def test_violation_is_a_sentence_with_its_event(
    events: list[Event], index: int, sentence: str
) -> None:
    found = violations(*events)
    assert any(v.startswith(f"event {index} (") and sentence in v for v in found), found


def test_a_legal_remainder_is_not_blamed_for_an_earlier_violation() -> None:
    assert len(violations(run("a", 0, 8), run("a", 9, 12), run("a", 12, 20))) == 1


def test_publish_must_exceed_the_installed_version() -> None:
    assert violations(Publish(version=3, digest="x"), version=3)
    assert not violations(Publish(version=4, digest="x"), version=3)


def test_hit_needs_the_same_adapter() -> None:
    other = Request(id="c", tokens=A.tokens, adapter="lora")
    schedule = Schedule(events=(run("a", 0, 40), Hit(request="c", source="a", upto=16)))
    (sentence,) = legal(schedule, (KV,), (A, other))
    assert "adapter" in sentence


def test_requests_and_specs_are_checked_too() -> None:
    broken = (
        A,
        A,
        Request(id="e", tokens=()),
        Request(id="m", tokens=(1, 2), sampled_mask=(True,)),
    )
    specs = (
        StateSpec(site="x", kind="kv", granule=0),
        StateSpec(site="y", kind="window", granule=16),
        StateSpec(site="z", kind="recurrent", granule=16, snapshot_every=0),
    )
    text = "\n".join(legal(Schedule(events=()), specs, broken))
    for part in ("'a' is used twice", "'e' has no tokens", "sampled_mask", "granule is 0"):
        assert part in text
    assert "y: a window state needs a window" in text
    assert "snapshot_every is 0" in text


def test_require_legal_lists_every_violation() -> None:
    schedule = Schedule(events=(run("a", 3, 8), Resume(request="b")))
    with pytest.raises(ScheduleError, match="2 violation") as error:
        require_legal(schedule, (KV,), REQUESTS)
    assert "event 0" in str(error.value)
    assert "event 1" in str(error.value)


# --- what each kind of state allows --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kv", "latent", "indexer", "window"])
def test_positional_state_rolls_back_only_if_its_spec_says_so(kind: StateKind) -> None:
    window = 64 if kind == "window" else None
    can = StateSpec(site="s", kind=kind, granule=16, window=window)
    cannot = StateSpec(site="s", kind=kind, granule=16, window=window, rollback=False)
    assert not violations(run("a", 0, 20, keep=17), specs=(can,))
    assert "cannot be rolled back" in violations(run("a", 0, 20, keep=17), specs=(cannot,))[0]
    assert "cannot be rolled back" in violations(run("a", 0, 20, keep=16), specs=(cannot,))[0]


@pytest.mark.parametrize("kind", ["recurrent", "conv"])
def test_recurrent_state_is_hit_and_rolled_back_only_at_snapshots(kind: StateKind) -> None:
    spec = StateSpec(site="s", kind=kind, granule=8, snapshot_every=32, rollback=False)
    hit16 = (run("a", 0, 40), Hit(request="b", source="a", upto=16))
    hit32 = (run("a", 0, 40), Hit(request="b", source="a", upto=32))
    assert "snapshots only every 32" in violations(*hit16, specs=(spec,))[0]
    assert not violations(*hit32, specs=(spec,))
    assert "go back only to its snapshots" in violations(run("a", 0, 40, keep=39), specs=(spec,))[0]
    assert not violations(run("a", 0, 40, keep=32), specs=(spec,))
    replaying = StateSpec(site="s", kind=kind, granule=8, snapshot_every=32, rollback=True)
    assert not violations(run("a", 0, 40, keep=39), specs=(replaying,))


def test_recurrent_state_without_a_snapshot_interval_has_one_per_granule() -> None:
    spec = StateSpec(site="s", kind="recurrent", granule=8, rollback=False)
    assert not violations(run("a", 0, 40, keep=24), specs=(spec,))
    assert violations(run("a", 0, 40, keep=25), specs=(spec,))
    assert not violations(run("a", 0, 40), Hit(request="b", source="a", upto=24), specs=(spec,))


def test_compressed_state_goes_back_inside_its_open_granule_only() -> None:
    spec = StateSpec(site="s", kind="compressed", granule=16, rollback=False)
    assert not violations(run("a", 0, 31, keep=18), specs=(spec,))
    assert not violations(run("a", 0, 40, keep=16), specs=(spec,))
    assert violations(run("a", 0, 40, keep=18), specs=(spec,))
    assert violations(run("a", 0, 32, keep=18), specs=(spec,))
    assert violations(run("a", 0, 40), Hit(request="b", source="a", upto=8), specs=(spec,))


def test_window_state_is_hit_only_while_its_keys_exist() -> None:
    spec = StateSpec(site="s", kind="window", granule=16, window=20)
    near = (run("a", 0, 33), Hit(request="b", source="a", upto=32))
    far = (run("a", 0, 40), Hit(request="b", source="a", upto=16))
    assert not violations(*near, specs=(spec,))
    assert not violations(run("a", 0, 20), *far[1:], specs=(spec,))
    assert "has keys from 20 on" in violations(*far, specs=(spec,))[0]
    # a rollback does not bring back what fell out of the window
    back = (run("a", 0, 40, keep=38), Hit(request="b", source="a", upto=16))
    assert violations(*back, specs=(spec,))
    # and neither does a hit on a source that itself started from a hit
    chain = (
        run("a", 0, 33),
        Hit(request="b", source="a", upto=32),
        Evict(request="a"),
        Hit(request="a", source="b", upto=16),
    )
    assert violations(*chain, specs=(spec,))


def test_every_site_must_agree_to_a_hit() -> None:
    specs = (KV, StateSpec(site="r", kind="recurrent", granule=24))
    found = violations(run("a", 0, 40), Hit(request="b", source="a", upto=16), specs=specs)
    assert len(found) == 1
    assert "of r (recurrent)" in found[0]
    assert granule(specs) == 48
    assert granule(()) == 1
