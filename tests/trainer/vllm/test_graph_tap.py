"""Taps of the rollout's operators, without vLLM: its runner is stood in for by one forward."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import CapabilityError
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import stock_plan
from zeromismatch.trainer.engines.vllm.graph_tap import GraphTaps, Seen, started_taps
from zeromismatch.trainer.engines.vllm.operators import OPERATORS

CPU = torch.device("cpu")
LAYER = "model.layers.1"


class Forward:
    """A norm with its addition, a fused linear layer and a gated product; keeps what each gave."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.norm, self.up = torch.randn(8), torch.randn(12, 8)
        self.gave: dict[str, torch.Tensor] = {}
        self.skipped = False

    @property
    def names(self) -> dict[int, str]:
        return {
            self.norm.data_ptr(): f"{LAYER}.input_layernorm",
            self.up.data_ptr(): f"{LAYER}.mlp.gate_up_proj",
        }

    def execute_model(self, output: Any) -> str:
        x = torch.randn(output.total_num_scheduled_tokens, 8)
        y, total = OPERATORS.add_rms_norm(x, x.clone(), self.norm, 1e-6)
        z = OPERATORS.linear(y, self.up, None)
        self.gave = {f"{LAYER}.input_layernorm": y, "model.layers.0#add_1": total,
                     f"{LAYER}.mlp.gate_up_proj": z}  # fmt: skip
        if not self.skipped:
            self.gave[f"{LAYER}.mlp#gated"] = OPERATORS.silu_mul(z)
        return "done"


def step(rows: int) -> Any:
    return SimpleNamespace(total_num_scheduled_tokens=rows)


def test_each_step_leaves_the_digest_of_every_row_under_the_trainers_names() -> None:
    forward, seen = Forward(), list[Seen]()
    taps = GraphTaps(outputs=8, rows=16, device=CPU)
    rows = [("a", 4), ("a", 5), ("b", 0)]
    with taps.reading(forward, lambda _: rows, forward.names, seen.append):
        assert forward.execute_model(step(3)) == "done"
        first = dict(forward.gave)
        forward.skipped = True  # as a graph would that lost an operator
        forward.execute_model(step(3))
        forward.execute_model(step(0))
    assert [each.rows for each in seen] == [tuple(rows)] * 2
    assert seen[0].digests.keys() == first.keys()
    for name, output in first.items():
        assert bits.equal(torch.from_numpy(seen[0].digests[name].copy()), bits.digest_rows(output))
    assert seen[1].digests.keys() == first.keys() - {f"{LAYER}.mlp#gated"}
    forward.execute_model(step(3))  # nobody reads any more
    assert len(seen) == 2


def test_a_flag_on_the_device_makes_one_bit_of_one_operator_wrong() -> None:
    forward, seen = Forward(), list[Seen]()
    taps = GraphTaps(outputs=8, rows=16, device=CPU)
    with pytest.raises(CapabilityError, match="run the engine once"), taps.faulty():
        pass
    for _ in range(2):
        torch.manual_seed(1)
        with taps.reading(forward, lambda _: [("a", 0), ("a", 1)], forward.names, seen.append):
            forward.execute_model(step(2))
    torch.manual_seed(1)
    with (
        taps.faulty() as site,
        taps.reading(forward, lambda _: [("a", 0), ("a", 1)], forward.names, seen.append),
    ):
        forward.execute_model(step(2))
    plain, again, faulty = seen
    assert site == f"{LAYER}.mlp.gate_up_proj"
    for name, digests in plain.digests.items():
        assert (digests == again.digests[name]).all()
        wrong = {0} if name in (site, f"{LAYER}.mlp#gated") else set()
        differs = (digests != faulty.digests[name]).any(axis=1)
        assert set(differs.nonzero()[0].tolist()) == wrong


def test_an_output_that_does_not_fit_is_an_error() -> None:
    forward = Forward()
    taps = GraphTaps(outputs=8, rows=2, device=CPU)
    with (
        pytest.raises(CapabilityError, match="do not hold"),
        taps.reading(forward, lambda _: [], forward.names, lambda _: None),
    ):
        forward.execute_model(step(3))


def test_vllms_own_kernels_have_no_taps() -> None:
    with pytest.raises(CapabilityError, match="no taps"):
        started_taps(load_model("tiny:llama"), stock_plan(), 64)
