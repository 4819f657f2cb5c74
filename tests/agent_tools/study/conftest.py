"""Records of runs that never happened, for pages; and one small study that did."""

import pytest

from zeromismatch.trainer.diagnostics.record import Gap, UpdateRecord


def gap(compared: int = 8, unequal: int = 0, largest: float = 0.0) -> Gap:
    return Gap(
        compared=compared, unequal=unequal, largest=largest, mean=0.0, deviation=0.0,
        mean_magnitude=largest / 2, k3=largest**2,
    )  # fmt: skip


def record(version: int, **changes: object) -> UpdateRecord:
    values: dict[str, object] = {
        "version": version, "responses": 4, "tokens": 8, "length_quantiles": (2, 2, 2, 2, 2),
        "kernel": gap(), "total": gap(), "k1": 0.0, "d3": 1e-3 * (version + 1),
        "d3_peak_to_median": None, "log_ratio_least": -0.1, "log_ratio_most": 0.1,
        "ess_tokens": 0.9, "ess_responses": 0.8, "lag_histogram": {1: 8}, "lag_median": 1.0,
        "lag_most": 1, "lag_cap": 1, "d3_by_lag": {1: 1e-3}, "gradient_norm": 2.0,
        "learning_rate": 1e-3, "loss": 0.0, "reward": 0.5 + 0.01 * version,
        "reward_deviation": 0.1, "zero_advantage_groups": 0.0, "entropy": 3.0, "rejected": 0.25,
        "moves": 0.5, "nonfinite": 0, "weights_root": "ab" * 16, "plan_digest": "cd" * 16,
        "rollout_seconds": 1.0, "train_seconds": 1.0, "sync_seconds": 0.1, "wait_seconds": 0.1,
        "blocked_seconds": 0.0, "tokens_per_second": 100.0,
    }  # fmt: skip
    return UpdateRecord.model_validate(values | changes)


@pytest.fixture
def records() -> list[UpdateRecord]:
    return [record(version) for version in range(6)]
