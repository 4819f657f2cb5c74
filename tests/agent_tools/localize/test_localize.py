"""Localize on real engines: every status, every budget, and every single bit."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from zeromismatch.agent_tools.compare import Comparison
from zeromismatch.agent_tools.faults import plant
from zeromismatch.agent_tools.flips import FlipBit, flipped_weight
from zeromismatch.agent_tools.localize import Options, localize
from zeromismatch.agent_tools.records import Divergence
from zeromismatch.agent_tools.scenarios import random_requests
from zeromismatch.agent_tools.sides import Runner, Side
from zeromismatch.agent_tools.trace import Trace, Tracer
from zeromismatch.agent_tools.trace_store import load_trace
from zeromismatch.agent_tools.verdict import compare_traces
from zeromismatch.kernels.errors import BudgetError, DiskError, NonFiniteError
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.trainer.engines.base import Observer, Request, SiteCall

QUICK = Options(causes=False, self_test=False)


def run(
    left: str,
    right: str,
    model: LoadedModel,
    requests: tuple[Request, ...],
    plan: str = "aligned",
    options: Options = QUICK,
    right_model: LoadedModel | None = None,
) -> Divergence:
    return localize(
        Side.parse(left), Side.parse(right), model, requests,
        plan=plan, options=options, right_model=right_model,
    )  # fmt: skip


@pytest.fixture(scope="module")
def stock(model: LoadedModel, requests: tuple[Request, ...]) -> Divergence:
    return run("transformers:decode", "transformers:alone", model, requests, "stock", Options())


def test_the_self_test_flips_a_row_that_its_request_computes_itself(model: LoadedModel) -> None:
    """Under prefix hits the shortest request may take its middle from another one."""
    prefix = tuple(range(3, 43))
    tails = ((50, 51), tuple(range(60, 80)), tuple(range(90, 120)))
    requests = tuple(
        Request(
            id=f"r{index}",
            tokens=prefix + tail,
            sampled_mask=(False,) * 41 + (True,) * (len(tail) - 1),
        )
        for index, tail in enumerate(tails)
    )
    for schedule in ("prefix-hit", *(f"fuzz:{seed}" for seed in range(6))):
        found = run(f"paged:{schedule}", "packed:packed", model, requests,
                    options=Options(causes=False))  # fmt: skip
        assert found.self_test is not None
        assert found.self_test.passed, (schedule, found.self_test.activation)


def test_a_side_that_computes_a_row_twice_in_two_ways_still_repeats_itself(
    model: LoadedModel,
) -> None:
    """A request that hits its own prefix runs its tail among fewer rows; here the tile follows."""
    requests = random_requests(model, count=3, max_reply=8, seed=0)
    left = Runner(
        side=Side.parse("paged:prefix-hit"), model=model, requests=requests, plan="aligned"
    )
    tracer = Tracer()
    with plant("B02", model):
        trace = left.traced(tracer, tracer)
        found = run("paged:prefix-hit", "paged:alone", model, requests,
                    options=Options(causes=False))  # fmt: skip
    assert Comparison(trace, trace).count()[1] > 0
    assert Comparison(trace, trace, repeated=True).count()[1] == 0
    assert found.status == "DIVERGENT", found.reason
    assert found.self_test is not None
    assert found.self_test.passed, found.self_test.activation
    assert found.notes == ()


@pytest.mark.parametrize("schedule", ["fuzz:1", "prefix-hit", "preempt", "chunk:7"])
def test_aligned_sides_are_equal_and_say_how_much_was_compared(
    model: LoadedModel, requests: tuple[Request, ...], schedule: str
) -> None:
    found = run(f"paged:{schedule}", "packed:packed", model, requests, options=Options())
    assert found.status == "EQUAL", found.reason
    assert found.exit_code == 0
    assert found.logprobs is not None
    assert found.coverage is not None
    scored = sum(len(request.tokens) - 1 for request in requests)
    assert found.logprobs.differing == 0
    assert scored * 0.8 < found.logprobs.compared <= scored  # a prefix that was hit isn't scored
    assert found.logprobs.sampled_compared == sum(sum(r.sampled_mask) for r in requests)
    assert found.coverage.share == 1.0
    assert found.coverage.rows > 30 * scored
    assert found.self_test is not None
    assert found.self_test.passed


def test_stock_kernels_diverge_and_every_culprit_is_named(stock: Divergence) -> None:
    assert stock.status == "DIVERGENT"
    assert stock.exit_code == 1
    named = {culprit.site for culprit in stock.culprits}
    linears = {f"model.layers.{layer}.{part}_proj" for layer in (0, 1)
               for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o",
                            "mlp.gate", "mlp.up", "mlp.down")}  # fmt: skip
    assert linears <= named
    assert "lm_head" in named
    assert not any(site.endswith(("norm", "add_0", "add_1")) for site in named)
    assert stock.first_divergence is not None
    assert stock.first_divergence.site in named


def test_culprits_come_with_evidence_and_a_measured_cause(stock: Divergence) -> None:
    projection = next(c for c in stock.culprits if c.site == "model.layers.0.self_attn.q_proj")
    assert projection.left_digest != projection.right_digest
    assert projection.difference is not None
    assert projection.difference.left_bits != projection.difference.right_bits
    assert sum(projection.ulp_histogram.values()) == projection.affected * 288
    assert projection.cause.name == "reduction order"
    assert {p.name for p in projection.cause.probes} >= {"again", "row count", "exact sums"}
    assert projection.first.rows == 1
    assert projection.pattern.by_rows[1][0] == projection.affected
    assert stock.groups[0].op_class == "linear"


def test_with_only_the_culprits_replaced_everything_else_is_equal(stock: Divergence) -> None:
    assert stock.confirmation is not None
    assert stock.confirmation.confirmed
    assert stock.confirmation.compared > 1000
    assert stock.confirmation.logprobs_compared > 100
    assert stock.graft is not None
    assert stock.graft.unjudged == ()


def test_a_verdict_is_one_json_document_that_reads_back(stock: Divergence) -> None:
    assert Divergence.model_validate_json(stock.model_dump_json()) == stock


def sites_of(model: LoadedModel, requests: tuple[Request, ...]) -> Trace:
    runner = Runner(side=Side.parse("packed"), model=model, requests=requests, plan="aligned")
    tracer = Tracer()
    return runner.traced(tracer, tracer)


def test_one_flipped_bit_of_any_activation_is_placed_at_its_site(
    model: LoadedModel, requests: tuple[Request, ...]
) -> None:
    short = tuple(
        Request(id=r.id, tokens=r.tokens[:6], sampled_mask=(False,) * 5 + (True,))
        for r in requests[:2]
    )
    sites = sites_of(model, short).sites
    assert len(sites) > 30
    for index, site in enumerate(sites):
        request, position = short[index % 2].id, index % 5
        where = {"site": site, "request": request, "position": position, "element": index}
        flip = partial(FlipBit, **where)
        options = Options(causes=False, self_test=False, fault=flip)
        found = run("paged:chunk:3", "packed:packed", model, short, options=options)
        assert found.status == "DIVERGENT", (site, found.reason)
        assert [culprit.site for culprit in found.culprits] == [site]
        culprit = found.culprits[0]
        assert (culprit.first.request, culprit.first.position) == (request, position)
        assert (culprit.affected, culprit.ulp_histogram.get("1")) == (1, 1)
        assert found.first_divergence is not None
        assert found.first_divergence.site == site
        assert found.confirmation is not None
        assert found.confirmation.confirmed, found.confirmation


def test_one_flipped_bit_of_any_weight_is_placed_by_tensor_and_index(
    model: LoadedModel, requests: tuple[Request, ...]
) -> None:
    other = load_model("tiny:llama")
    short = (Request(id="a", tokens=requests[0].tokens[:3]),)
    for name, tensor in other.module.named_parameters():
        element = tensor.numel() * 2 // 3
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(element), tensor.shape))
        with flipped_weight(other.module, name, element):
            found = run("packed", "packed", model, short, right_model=other)
        assert found.status == "MISALIGNED"
        assert found.exit_code == 3
        assert found.anchor.misalignment is not None
        assert (found.anchor.misalignment.tensor, found.anchor.misalignment.index) == (name, index)
        assert found.coverage is None
        assert found.logprobs is None


def test_a_single_token_scores_nothing_and_is_inconclusive(
    model: LoadedModel, requests: tuple[Request, ...]
) -> None:
    single = (Request(id="a", tokens=requests[0].tokens[:1]),)
    found = run("paged", "packed", model, single)
    assert found.status == "INCONCLUSIVE"
    assert found.exit_code == 3
    assert "0 scored tokens" in found.reason


def test_a_memory_budget_below_one_token_is_refused(
    model: LoadedModel, requests: tuple[Request, ...]
) -> None:
    options = Options(causes=False, self_test=False, memory_bytes=1000)
    with pytest.raises(BudgetError, match="raise the budget"):
        run("transformers:decode", "transformers:alone", model, requests, "stock", options)


def test_equal_logprobs_that_are_no_numbers_are_refused_and_named(
    requests: tuple[Request, ...],
) -> None:
    broken = load_model("tiny:llama")
    with torch.no_grad():
        broken.module.get_parameter("model.norm.weight")[7] = float("nan")
    with pytest.raises(NonFiniteError, match="first at request random-00, position 1"):
        run("paged", "packed", broken, requests[:1])


class Wavering:
    """Disturbs one site differently every time it runs."""

    def __init__(self, inner: Observer, site: str) -> None:
        self.inner, self.site = inner, site

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        self.inner.begin_rows(step, rows)

    def on_site(self, call: SiteCall, /) -> torch.Tensor | None:
        if call.site.name != self.site:
            return self.inner.on_site(call)
        output = call.output * (1 + 1e-3 * torch.rand(1))
        replaced = self.inner.on_site(dataclasses.replace(call, output=output))
        return output if replaced is None else replaced


def test_a_side_that_never_repeats_itself_is_named_as_nondeterministic(
    model: LoadedModel, requests: tuple[Request, ...]
) -> None:
    site = "model.layers.0.mlp.up_proj"
    options = Options(fault=partial(Wavering, site=site))
    found = run("packed", "packed", model, requests[:1], options=options)
    assert found.status == "DIVERGENT"
    assert [culprit.site for culprit in found.culprits] == [site]
    assert found.culprits[0].cause.name == "nondeterminism"
    assert found.self_test is not None
    assert not found.self_test.passed
    assert "does not repeat itself" in found.self_test.activation


class Blind:
    """Hides every site from the recorder but the first of each forward pass."""

    def __init__(self, inner: Observer) -> None:
        self.inner = inner

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        self.inner.begin_rows(step, rows)

    def on_site(self, call: SiteCall, /) -> torch.Tensor | None:
        return self.inner.on_site(call) if call.site.op_class == "embedding" else None


def test_a_recorder_that_sees_little_gives_no_verdict(
    model: LoadedModel, requests: tuple[Request, ...]
) -> None:
    found = run("paged", "packed", model, requests[:1], options=Options(fault=Blind))
    assert found.status == "INCONCLUSIVE"
    assert found.coverage is not None
    assert found.coverage.shared == 1
    assert "model.norm" in found.coverage.right_only


def test_a_self_test_that_fails_takes_the_verdict_away(
    model: LoadedModel, requests: tuple[Request, ...]
) -> None:
    options = Options(fault=Blind, coverage=0.0)
    found = run("paged", "packed", model, requests[:1], options=options)
    assert found.status == "INCONCLUSIVE"
    assert found.self_test is not None
    assert not found.self_test.passed
    assert "the comparison named nothing" in found.self_test.activation


def test_low_coverage_is_inconclusive(
    model: LoadedModel, requests: tuple[Request, ...]
) -> None:
    options = Options(causes=False, self_test=False, coverage=1.01)
    found = run("paged", "packed", model, requests[:1], options=options)
    assert found.status == "INCONCLUSIVE"
    assert "100% of the operators" in found.reason


def test_a_small_memory_budget_covers_less_and_says_so(
    model: LoadedModel, requests: tuple[Request, ...]
) -> None:
    options = Options(causes=False, self_test=False, memory_bytes=2_000_000)
    found = run("transformers:decode", "transformers:alone", model, requests, "stock", options)
    assert found.graft is not None
    assert found.graft.reference_bytes <= 2_000_000
    assert 0 < sum(found.graft.positions.values()) < found.graft.tokens_total
    assert found.status == "DIVERGENT"
    assert found.confirmation is not None
    assert found.confirmation.confirmed


def test_traces_are_kept_on_request_and_compared_again_from_disk(
    model: LoadedModel, requests: tuple[Request, ...], tmp_path: Path
) -> None:
    options = Options(causes=False, self_test=False, out=tmp_path / "run")
    found = run("paged", "packed", model, requests[:2], options=options)
    assert found.left.trace == str(tmp_path / "run" / "left")
    assert load_trace(tmp_path / "run" / "right").run == found.right.run
    left, right = (load_trace(tmp_path / "run" / side) for side in ("left", "right"))
    again = compare_traces(left, right)
    assert again.status == "EQUAL"
    assert (again.coverage, again.logprobs) == (found.coverage, found.logprobs)


def test_saved_traces_that_differ_name_the_first_operator(
    model: LoadedModel, requests: tuple[Request, ...], tmp_path: Path
) -> None:
    options = Options(causes=False, self_test=False, out=tmp_path)
    found = run("transformers:decode", "transformers:alone", model, requests[:2], "stock", options)
    left, right = (load_trace(tmp_path / side) for side in ("left", "right"))
    again = compare_traces(left, right)
    assert again.status == "DIVERGENT"
    assert again.first_divergence == found.first_divergence
    assert again.notes


def test_saved_traces_of_other_tokens_are_misaligned(
    model: LoadedModel, requests: tuple[Request, ...], tmp_path: Path
) -> None:
    traces = []
    for name, tokens in (("one", (5, 6, 7)), ("two", (5, 9, 7))):
        options = Options(causes=False, self_test=False, out=tmp_path / name)
        run("packed", "packed", model, (Request(id="a", tokens=tokens),), options=options)
        traces.append(load_trace(tmp_path / name / "left"))
    found = compare_traces(*traces)
    assert found.status == "MISALIGNED"
    assert found.anchor.misalignment is not None
    assert (found.anchor.misalignment.request, found.anchor.misalignment.position) == ("a", 1)
    assert found.logprobs is None


def test_a_trace_beyond_the_disk_budget_leaves_nothing(
    model: LoadedModel, requests: tuple[Request, ...], tmp_path: Path
) -> None:
    options = Options(causes=False, self_test=False, out=tmp_path / "run", disk_bytes=10_000)
    with pytest.raises(DiskError, match="disk budget is 0 MB"):
        run("paged", "packed", model, requests[:1], options=options)
    assert list((tmp_path / "run").iterdir()) == []
