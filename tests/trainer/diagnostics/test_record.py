"""Every number of an update's record, worked out by hand in fp64."""

import math
from dataclasses import replace

import pytest
import torch

from zeromismatch.kernels.errors import InconclusiveError, NonFiniteError
from zeromismatch.trainer.diagnostics.record import (
    ess,
    moved_against,
    peak_to_median,
    record_of,
)
from zeromismatch.trainer.loop.records import UpdateFacts

from .conftest import make_facts, poisoned


def differences(facts: UpdateFacts) -> list[float]:
    return [p - q for p, q in zip(facts.logp.tolist(), facts.batch.mu.tolist(), strict=True)]


def k3(d: float) -> float:
    return math.expm1(d) - d


def test_estimators_are_the_fp64_sums(facts: UpdateFacts):
    record, d = record_of(facts), differences(facts)
    expected = {
        "d3": sum(map(k3, d)) / 7,
        "k1": -sum(d) / 7,
        "log_ratio_least": min(d),
        "log_ratio_most": max(d),
        "ess_tokens": sum(map(math.exp, d)) ** 2 / (7 * sum(math.exp(2 * x) for x in d)),
        "entropy": 9.0 / 7,
        "reward": 0.5,
    }
    for name, value in expected.items():
        assert getattr(record, name) == pytest.approx(value, rel=1e-12), f"{name} in fp64"
    responses = [d[0], sum(d[1:4]), sum(d[4:6]), d[6]]
    w = [math.exp(x) for x in responses]
    fp64 = sum(w) ** 2 / (4 * sum(x * x for x in w))
    assert record.ess_responses == pytest.approx(fp64, rel=1e-12)


def test_lags_are_counted_per_token_and_d3_is_split_by_them(facts: UpdateFacts):
    record, d = record_of(facts), differences(facts)
    assert record.lag_histogram == {0: 2, 1: 3, 2: 2}
    assert (record.lag_median, record.lag_most, record.lag_cap) == (1.0, 2, 2)
    assert record.d3_by_lag[0] == 0.0
    assert record.d3_by_lag[2] == pytest.approx((k3(d[4]) + k3(d[5])) / 2), "fp64"
    whole = sum(record.d3_by_lag[lag] * count for lag, count in record.lag_histogram.items()) / 7
    assert whole == pytest.approx(record.d3), "fp64"


def test_the_kernel_term_is_apart_from_the_lag(facts: UpdateFacts):
    record = record_of(facts)
    assert (record.kernel.compared, record.kernel.unequal) == (3, 0)
    assert record.kernel.k3 == record.kernel.largest == record.kernel.mean == 0
    assert (record.total.compared, record.total.unequal) == (7, 5)
    nudged = facts.audit.logp.clone()
    nudged[1] = torch.nextafter(nudged[1], torch.tensor(0.0))
    one = record_of(replace(facts, audit=replace(facts.audit, logp=nudged)))
    assert one.kernel.unequal == 1
    assert one.kernel.largest > 0


def test_an_audit_of_nothing_is_no_zero(facts: UpdateFacts):
    nothing = torch.zeros(0)
    empty = replace(facts.audit, mu=nothing, logp=nothing, versions=nothing)
    with pytest.raises(InconclusiveError, match="no token was audited"):
        record_of(replace(facts, audit=empty))


def test_groups_shares_and_speed(facts: UpdateFacts):
    record = record_of(facts)
    assert record.zero_advantage_groups == 0.5
    assert record.rejected == 0.0
    assert record.length_quantiles == (1.0, 1.0, 1.5, 2.25, 3.0)
    assert record.tokens_per_second == 10.0
    assert record.moves is None


def test_moves_count_tokens_that_went_the_wrong_way():
    facts = make_facts()
    # advantages 0.5, −0.5 (three tokens), 0: only the first four are asked to move
    step = torch.tensor([0.1, -0.1, 0.1, 0.0, 9.0, 9.0, 9.0])
    assert moved_against(facts.logp, facts.logp + step, facts.batch) == 0.5
    assert record_of(replace(facts, after=facts.logp + step)).moves == 0.5


def test_peak_to_median_follows_the_run():
    assert peak_to_median([0.0, 0.0]) is None
    assert peak_to_median([1.0, 2.0, 6.0]) == 3.0
    record = record_of(make_facts(shift=0.2), earlier=[1e-4, 2e-4])
    assert record.d3_peak_to_median == pytest.approx(record.d3 / 2e-4), "fp64"


def test_effective_sample_size_survives_huge_weights_in_fp64():
    assert ess(torch.tensor([2000.0, 2000.0], dtype=torch.float64)) == pytest.approx(1.0)
    assert ess(torch.tensor([2000.0, 0.0], dtype=torch.float64)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "what"),
    [("rewards", "reward"), ("advantages", "advantage"), ("mu", "rollout logprob")],
)
def test_what_is_no_number_stops_the_run_by_name(facts: UpdateFacts, name: str, what: str):
    values = getattr(facts.batch, name).clone()
    values[1] = float("nan")
    with pytest.raises(NonFiniteError, match=f"update 5: {what} at \\[1\\]"):
        record_of(poisoned(facts, **{name: values}))
    with pytest.raises(NonFiniteError, match="gradient norm"):
        record_of(replace(facts, gradient_norm=float("inf")))
