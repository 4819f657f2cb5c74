"""C6: the gradient is right, repeatable, complete, and does not depend on company.

The loss is a weighted sum of logprobs of sampled tokens, as in REINFORCE. Its gradient is compared
with transformers' own module in fp64 under autograd alone: per parameter, the norm of the error
over the norm of the gradient may be at most the sum of the operators' own tolerances on the way
(``Contract.gradient_rtol``), and what ``allowance.py`` makes of the error of the stock model at the
same dtype. The backward is repeated under load and must give the same bits; the gradient that
reaches each token's embedding must not depend on the micro-batch; the kernels that sum over tokens
must give the bits of the whole batch when their chains are continued at a cut.

What is claimed about micro-batches, and no more: autograd's own ``.grad +=`` adds finished sums and
therefore depends on the split: it is the red control here. A trainer that wants split-independent
weight gradients continues the chains (``kernels/accumulation.py``): the whole model's are compared
that way, and the kernels' own at cuts within a request.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...kernels import bits
from ...kernels.accumulation import Accumulators
from ...kernels.contract import contracts
from ...kernels.embedding import grad_weight as embedding_grad
from ...kernels.linear import grad_bias, grad_weight
from ...kernels.rmsnorm import rmsnorm_backward
from ...model_recipes.bindings import device_kind, dtype_name
from ...model_recipes.plan import stock_plan
from ...trainer.engines.base import Request
from ...trainer.engines.packed import PackedEngine
from ..accuracy import in_fp64
from ..routing import Replay, RoutingTrace, routers
from .allowance import Error, errors_of, mean, pooled, too_far
from .base import Findings, Gate
from .bench import Bench, cut, gradients
from .load import Load

STOCK_RTOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Allowed per operator where the plan is stock and no contract states a tolerance."""
REPEATED_TOKENS = 16
REPEATS = 4
"""Of the backward pass, at least."""
CUTS = (1, 7, 64)
ROWS = 130
GPU_BLOCK = 8192
"""Tokens whose products the GPU contract adds as one block: chains continue between two of them."""

Grads = dict[str, Tensor]


def check(bench: Bench, found: Findings) -> None:
    """See the module."""
    requests = bench.learned
    weights = loss_weights(requests, bench.seed)
    ours = of_packed(bench.on().packed, requests, weights)
    _complete(bench, found, ours)
    _against_fp64(bench, found, requests, weights, ours)
    _repeat(bench, found)
    _company(bench, found, requests, weights, ours)
    _chains(bench, found)


def loss_weights(requests: Sequence[Request], seed: int) -> Tensor:
    """fp32 weight per sampled token: an advantage of either sign, not the same for any two."""
    count = sum(sum(request.sampled_mask) for request in requests)
    generator = torch.Generator().manual_seed(seed)
    sign = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    return sign * (0.5 + torch.rand(count, generator=generator)) / count


def of_packed(engine: PackedEngine, requests: Sequence[Request], weights: Tensor) -> Grads:
    """Gradients of the weighted loss through the trainer's forward."""
    logprobs = engine.logprobs(requests)
    loss = -(logprobs * weights.to(logprobs.device)).sum()
    loss.backward()
    return gradients(engine.loaded)


def of_fp64(
    pristine: nn.Module,
    requests: Sequence[Request],
    weights: Tensor,
    replay: Replay | None = None,
) -> Grads:
    """The same loss through transformers' own module in fp64, request by request.

    replay: of a run whose experts every token goes to.
    """
    module = in_fp64(pristine)
    if replay is not None:
        replay.put_on(module)
    device = next(module.parameters()).device
    at = 0
    for request in requests:
        if replay is not None:
            replay.begin(request)
        positions = [p for p, sampled in enumerate(request.sampled_mask) if sampled]
        logits = module(
            input_ids=torch.tensor([request.tokens], device=device), use_cache=False
        ).logits[0]
        rows = logits[[p - 1 for p in positions]] / (request.sampling.temperature or 1.0)
        tokens = torch.tensor([request.tokens[p] for p in positions], device=device)
        lp = torch.log_softmax(rows, dim=-1).gather(1, tokens[:, None])[:, 0]
        share = weights[at : at + len(positions)].to(lp)
        (-(lp * share).sum()).backward()
        at += len(positions)
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def _complete(bench: Bench, found: Findings, ours: Grads) -> None:
    wanted = [n for n, p in bench.model.module.named_parameters() if p.requires_grad]
    dead = [
        name
        for name in wanted
        if name not in ours or bits.nonfinite(ours[name]) or not bool(ours[name].any())
    ]
    found.part("every parameter has a finite gradient that is not zero", len(wanted), len(dead),
               "parameters", ", ".join(dead[:3]))  # fmt: skip


def _against_fp64(
    bench: Bench, found: Findings, requests: Sequence[Request], weights: Tensor, ours: Grads
) -> None:
    bench.progress("C6: gradient of untouched transformers in fp64")
    exact, of_stock = _exact(bench, requests, weights)
    stock = errors_of(of_packed(bench.on(stock_plan()).packed, requests, weights), of_stock)
    errors = errors_of(ours, exact)
    bound = contract_bound(bench)
    verdict, worst = too_far(errors, stock, bound)
    detail = (
        f"error {pooled(errors.values()):.2e} (stock {pooled(stock.values()):.2e}), mean over "
        f"parameters {mean(errors):.2e} ({mean(stock):.2e}), largest {_largest(errors)} "
        f"({_largest(stock)}), worst class {worst:.2f} times stock's; contracts allow {bound:.2e}"
    )
    found.part("gradient against fp64", len(errors), len(verdict), "parameters",
               detail + ("; beyond: " + ", ".join(verdict[:3]) if verdict else ""))  # fmt: skip
    with torch.no_grad():
        pull = weights.abs() * (1 - bench.on().packed.logprobs(requests).cpu().exp())
    wrong = weights.clone()
    wrong[int(pull.argmax())] *= -1
    red = errors_of(of_packed(bench.on().packed, requests, wrong), exact)
    rows = sum(len(request.tokens) for request in requests)
    found.control("one token's advantage with the wrong sign", f"1 of {rows} rows", len(red),
                  len(too_far(red, stock, bound)[0]))  # fmt: skip
    usual = sorted(errors, key=lambda name: errors[name].relative)[len(errors) // 2]
    twice = errors_of(ours | {usual: 2 * ours[usual]}, exact)
    refused = too_far(twice, stock, bound)[0]
    found.control(f"the gradient of {usual} twice", f"1 of {len(twice)} parameters", len(twice),
                  len(refused), red=usual in refused)  # fmt: skip


def _largest(errors: Mapping[str, Error]) -> str:
    return f"{max(each.relative for each in errors.values()):.2e}"


def _exact(bench: Bench, requests: Sequence[Request], weights: Tensor) -> tuple[Grads, Grads]:
    """The fp64 gradient for the plan and for stock: two where experts are chosen."""
    pristine = bench.pristine.module
    if not routers(pristine):
        exact = of_fp64(pristine, requests, weights)
        return exact, exact
    found: list[Grads] = []
    for plan in (bench.plan, stock_plan()):
        trace = RoutingTrace()
        with torch.no_grad():
            bench.on(plan).pack(requests, trace)
        found.append(of_fp64(pristine, requests, weights, Replay(pristine, trace)))
    return found[0], found[1]


def contract_bound(bench: Bench) -> float:
    """Sum of the gradient tolerances of all operators that a gradient passes, at first order."""
    device, dtype = device_kind(bench.model.device), dtype_name(bench.model.dtype)
    stated = {
        contract.op.removesuffix("_grad"): contract.gradient_rtol
        for contract in contracts(device=device, dtype=dtype)
        if contract.op.endswith("_grad") or contract.op.startswith("linear")
    }
    default = STOCK_RTOL[bench.model.dtype]
    return sum(
        stated.get(site.op_class, 0.0 if site.op_class in ("add", "kv_write") else default)
        for site in bench.on().paged.instrument.sites
    )


def _repeat(bench: Bench, found: Findings) -> None:
    engine = bench.on().packed
    request = cut(bench.requests[0], min(REPEATED_TOKENS, len(bench.requests[0].tokens)))
    weights = loss_weights([request], bench.seed)
    wanted = of_packed(engine, [request], weights)
    compared = differing = 0
    with Load() as load:
        for turn in range(bench.size.backward):
            bench.progress(f"C6: backward under load, {turn + 1} of {bench.size.backward}")
            got = of_packed(engine, [request], weights)
            compared += len(wanted)
            differing += sum(not bits.equal(got[name], grad) for name, grad in wanted.items())
    found.require("the load really ran (rounds)", load.rounds)
    found.require("backward passes", bench.size.backward, bench.size.backward >= REPEATS)
    found.part(f"backward {bench.size.backward} times under load, full depth", compared, differing,
               "gradients", f"{len(request.tokens)} tokens")  # fmt: skip


def _company(
    bench: Bench, found: Findings, requests: Sequence[Request], weights: Tensor, ours: Grads
) -> None:
    """Rows' and weights' gradients: in one batch, and one request a micro-batch."""
    bench.progress("C6: micro-batches")
    engine = bench.on().packed
    table = cast(nn.Module, cast(Any, bench.model.module).get_input_embeddings())
    reached: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: reached.append(grad.flatten(0, -2).clone()))

    handle = table.register_forward_hook(keep)
    continues = not bench.plan.is_stock and bench.model.device.type == "cpu"
    named = dict(bench.model.module.named_parameters())
    totals: list[dict[str, Tensor]] = []
    by_autograd: list[str] = []
    try:
        for batches in ([requests], [[request] for request in requests]):
            bench.model.module.zero_grad(set_to_none=True)
            sums = Accumulators(named) if continues else None
            _backward(engine, batches, weights, sums)
            if sums is not None:
                by_autograd = [name for name, each in named.items() if each.grad is not None]
                found_sums = {name: sums.gradient(name) for name in named}
                totals.append({n: total for n, total in found_sums.items() if total is not None})
    finally:
        handle.remove()
    whole, split = reached[0], torch.cat(reached[1:])
    wrong = int((~bits.equal_rows(whole, split)).sum())
    found.part("gradient at every token's embedding, whole = one request a micro-batch",
               len(whole), wrong, "rows")  # fmt: skip
    if continues:
        first, second = totals
        moved = [name for name, total in first.items() if not bits.equal(total, second[name])]
        found.part("every weight's gradient, whole = continued over micro-batches", len(first),
                   len(moved), "tensors", ", ".join(moved[:3]))  # fmt: skip
        bench.model.module.zero_grad(set_to_none=True)
        _backward(engine, [[request] for request in requests], weights)
    if by_autograd:
        found.notes.append(f"{len(by_autograd)} weights are summed by autograd: {by_autograd[:3]}")
    summed = gradients(bench.model)
    odd = sum(not bits.equal(ours[name], grad) for name, grad in summed.items())
    found.control("autograd's own sum over micro-batches", "one stock operator", len(summed), odd)
    found.require("micro-batches", len(requests), len(requests) > 1)


def _backward(
    engine: PackedEngine,
    batches: Sequence[Sequence[Request]],
    weights: Tensor,
    sums: Accumulators | None = None,
) -> None:
    """Backward of the weighted loss in these micro-batches; sums: as one chain."""
    at = 0
    for batch in batches:
        count = sum(sum(request.sampled_mask) for request in batch)
        with contextlib.nullcontext() if sums is None else sums.micro_batch():
            logprobs = engine.logprobs(batch)
            (-(logprobs * weights[at : at + count].to(logprobs.device)).sum()).backward()
        at += count


def _chains(bench: Bench, found: Findings) -> None:
    """Chains over tokens, continued at a cut, against the whole, at the model's own widths."""
    if bench.plan.is_stock:
        found.not_applicable.append("continued chains: the stock plan makes no such claim")
        return
    bench.progress("C6: chains over tokens continued")
    config, dtype = bench.model.config, bench.model.dtype
    compared = differing = 0
    on_gpu = bench.model.device.type == "cuda"
    cuts, rows = ((GPU_BLOCK,), GPU_BLOCK + ROWS) if on_gpu else (CUTS, ROWS)
    for name, run in chains(config, dtype, rows, bench.model.device).items():
        whole = run(0, rows, None)
        for stop in cuts:
            halves = run(stop, rows, run(0, stop, torch.zeros_like(whole)))
            compared += 1
            differing += not bits.equal(whole, halves)
            if not bits.equal(whole, halves):
                found.notes.append(f"{name} cut at {stop} differs from the whole")
    where = f"between blocks of {GPU_BLOCK} tokens" if on_gpu else "at any token"
    found.part(f"weight gradients, continued {where} = whole", compared, differing, "tensors",
               "linear weight and bias, embedding, norm: accumulate_into=")  # fmt: skip


def chains(
    config: Any, dtype: torch.dtype, rows: int, device: torch.device
) -> dict[str, Callable[[int, int, Tensor | None], Tensor]]:
    """``run(start, stop, continued)`` per kind of weight, on fixed random rows."""
    width, inner = config.hidden_size, config.intermediate_size
    generator = torch.Generator().manual_seed(width)

    def noise(columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).to(device, dtype)

    x, grad, wide = noise(width), noise(width), noise(inner)
    ids = torch.randint(0, config.vocab_size, (rows,), generator=generator) % 97
    if rows > ROWS:  # an id's occurrences, too, are added in blocks
        ids = torch.arange(rows) // 64 % 97
    ids = ids.to(device)
    weight = noise(width)[0]

    def linear(start: int, stop: int, continued: Tensor | None) -> Tensor:
        rows = slice(start, stop)
        return grad_weight(wide[rows], x[rows], accumulate_into=continued)

    def bias(start: int, stop: int, continued: Tensor | None) -> Tensor:
        return grad_bias(wide[start:stop], accumulate_into=continued)

    def embedding(start: int, stop: int, continued: Tensor | None) -> Tensor:
        return embedding_grad(grad[start:stop], ids[start:stop], 97, accumulate_into=continued)

    def norm(start: int, stop: int, continued: Tensor | None) -> Tensor:
        rows = slice(start, stop)
        return rmsnorm_backward(grad[rows], x[rows], weight, 1e-5, accumulate_into=continued)[1]

    return {"linear weight": linear, "linear bias": bias, "embedding": embedding, "norm": norm}


GATE = Gate(
    id="C6",
    title="Gradient",
    claim="The gradient agrees with an independent fp64 reference, repeats bit for bit under load, "
    "reaches every parameter, and a token's share of it does not depend on the micro-batch.",
    check=check,
)
