"""Routing, grouped linear layers and combining: bits, ties, gradients, refusals."""

import pytest
import torch

from zeromismatch.kernels import adversarial, bits, certify, moe
from zeromismatch.kernels.accumulation import Accumulators
from zeromismatch.kernels.contract import contracts
from zeromismatch.kernels.errors import ContractError, NonFiniteError

OPS = (
    "router", "topk", "topk_weights", "topk_weights_grad", "grouped_linear", "grouped_linear_grad",
    "combine", "combine_grad",
)  # fmt: skip
SOFTMAX = moe.Routing(num_experts=16, top_k=4, scoring="softmax", normed=True)
GROUPED = moe.Routing(
    num_experts=16, top_k=4, scoring="sigmoid", normed=True, eps=1e-20, scale=2.5, groups=4,
    groups_kept=2,
)  # fmt: skip


def logits(tokens: int, seed: int = 0) -> torch.Tensor:
    return adversarial.rows(tokens, 16, seed=seed, kind="plain")


@pytest.mark.parametrize("op", OPS)
def test_every_variant_of_the_core_equals_the_reference(op):
    ids = [contract.id for contract in contracts(op=op, device="cpu")]
    assert ids
    certificates = certify.certify(ids, quick=True)
    assert certificates
    for certificate in certificates:
        assert certificate.admitted, certificate.reason


@pytest.mark.parametrize("routing", [SOFTMAX, GROUPED], ids=["softmax", "groups"])
def test_ties_go_to_the_lower_expert(routing):
    chosen = moe.topk(torch.full((3, 16), 0.25), routing)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 3


def test_a_tie_at_the_border_is_decided_by_index():
    z = torch.zeros(1, 16)
    z[0, [9, 3, 12]] = 5.0  # three are clear, the fourth is one of thirteen equal ones
    assert moe.topk(z, SOFTMAX).tolist() == [[3, 9, 12, 0]]


def test_the_correction_bias_moves_the_choice_and_not_the_weights():
    z, bias = logits(9), torch.zeros(16)
    bias[5] = 9.0
    chosen = moe.topk(z, GROUPED, bias)
    assert (chosen == 5).any(dim=1).all()
    weights = moe.topk_weights(z, chosen, GROUPED)
    assert float(weights.sum(dim=1).max()) < 2.6  # normed to 1, times 2.5; the bias would be 9


def test_only_the_best_groups_are_chosen_from():
    chosen = moe.topk(logits(64), GROUPED)
    assert max(len(set((row // 4).tolist())) for row in chosen) <= GROUPED.groups_kept


@pytest.mark.parametrize("load", ["one expert", "one token", "4,097 tokens"])
def test_a_row_does_not_depend_on_who_shares_its_expert(load):
    tokens = {"one expert": 70, "one token": 1, "4,097 tokens": 4097}[load]
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(16, 24, 40, generator=generator)
    x = torch.randn(tokens, 40, generator=generator)
    chosen = moe.topk(logits(tokens), SOFTMAX)
    if load == "one expert":
        chosen = torch.tensor([[7, 0, 1, 2]]).repeat(tokens, 1)
    whole = moe.grouped_linear(x, chosen, weight)
    for rows in (slice(0, 1), slice(tokens // 2, tokens), torch.arange(tokens - 1, -1, -1)):
        part = moe.grouped_linear(x[rows], chosen[rows], weight)
        assert bits.equal(part, whole[rows].contiguous())


@pytest.mark.parametrize("routing", [SOFTMAX, GROUPED], ids=["softmax", "groups"])
def test_gradients_against_an_independent_fp64_graph(routing):
    generator = torch.Generator().manual_seed(2)

    def leaf(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).requires_grad_()

    tensors = leaf(11, 40), leaf(16, 40, scale=0.3), leaf(16, 24, 40, scale=0.2)
    x, router, weight = tensors
    z = moe.router_logits(x, router)
    chosen = moe.topk(z, routing)
    out = moe.combine(
        moe.grouped_linear(x, chosen, weight), moe.topk_weights(z, chosen, routing)
    )
    up = torch.randn(out.shape, generator=generator)
    got = torch.autograd.grad(out, tensors, up)

    x64, router64, weight64 = (each.detach().double().requires_grad_() for each in tensors)
    z64 = x64 @ router64.T
    scores = z64.sigmoid() if routing.sigmoid else z64.softmax(-1)
    picked = scores.gather(1, chosen)
    weights = picked / picked.sum(-1, keepdim=True) * routing.scale
    out64 = torch.einsum("tk,tkni,ti->tn", weights, weight64[chosen], x64)
    wanted = torch.autograd.grad(out64, (x64, router64, weight64), up.double())
    assert torch.allclose(out.double(), out64, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(got, wanted, strict=True):
        assert float((mine.double() - theirs).abs().max() / theirs.abs().max()) < 1e-5


def test_the_gradient_of_an_expert_does_not_depend_on_the_order_of_others():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50, 40, generator=generator)
    weight = torch.randn(16, 24, 40, generator=generator).requires_grad_()
    up = torch.randn(50, 4, 24, generator=generator)
    chosen = moe.topk(logits(50), SOFTMAX)
    (whole,) = torch.autograd.grad(moe.grouped_linear(x, chosen, weight), weight, up)
    flipped = chosen.flip(1)
    (other,) = torch.autograd.grad(moe.grouped_linear(x, flipped, weight), weight, up.flip(1))
    assert bits.equal(whole, other)


def test_micro_batches_continue_the_chains_of_every_expert():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(50, 40, generator=generator)
    weight = torch.randn(16, 24, 40, generator=generator).requires_grad_()
    up = torch.randn(50, 4, 24, generator=generator)
    chosen = moe.topk(logits(50), SOFTMAX)
    (whole,) = torch.autograd.grad(moe.grouped_linear(x, chosen, weight), weight, up)
    sums, plain = Accumulators({"w": weight}), torch.zeros_like(weight)
    for part in (slice(0, 1), slice(1, 30), slice(30, 50)):
        with sums.micro_batch():
            moe.grouped_linear(x[part], chosen[part], weight).backward(up[part])
        plain += torch.autograd.grad(
            moe.grouped_linear(x[part], chosen[part], weight), weight, up[part]
        )[0]
    assert bits.equal(sums.gradient("w"), whole)
    assert not bits.equal(plain, whole)  # autograd's own sums depend on the split


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_router_that_is_not_finite_is_refused_by_name(bad):
    z = logits(4)
    z[2, 5] = bad
    with pytest.raises(NonFiniteError, match="expert 5 for row 2"):
        moe.topk(z, SOFTMAX)


def test_impossible_routings_are_refused():
    plain = {"num_experts": 16, "scoring": "softmax", "normed": True}
    with pytest.raises(ContractError, match="top-k 17 of 16"):
        moe.Routing(top_k=17, **plain)
    with pytest.raises(ContractError, match="top-k 5 of 4"):
        moe.Routing(top_k=5, groups=4, groups_kept=1, **plain)
    with pytest.raises(ContractError, match="equal groups"):
        moe.Routing(top_k=2, groups=3, **plain)


def test_a_replayed_routing_must_fit():
    x, weight = torch.randn(5, 8), torch.randn(16, 4, 8)
    good = moe.topk(logits(5), SOFTMAX)
    with pytest.raises(ContractError, match="4 rows for 5 tokens"):
        moe.grouped_linear(x, good[:4], weight)
    with pytest.raises(ContractError, match="expert 16"):
        moe.grouped_linear(x, good.index_fill(1, torch.tensor([0]), 16), weight)
    with pytest.raises(ContractError, match="twice"):
        moe.grouped_linear(x, good.index_fill(1, torch.tensor([0, 1]), 3), weight)
