"""Is it still the right model? The error of a plan's logprobs against the untouched model in fp64.

Equal bits on both sides prove nothing if both compute another model. So the logprobs of a run are
compared with transformers' own module, untouched, cast to fp64; the allowance is twice the error
that the stock model itself has at the run's dtype. Transformers keeps norms and rotary tables in
fp32 even then, which costs about 8e-7 in a logprob: far below what is judged here. In a mixture,
each side has a reference of its own that takes every token through the experts which that side
chose, and the choices are judged apart (``routing.py``).

    reference = reference_logprobs(pristine, run.requests)
    accuracy = measure_accuracy(reference, ours=run, stock=stock_run)

This is the only place outside gradients where numbers are compared by size; it never says "equal".
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..kernels.errors import InconclusiveError
from ..model_recipes.models import LoadedModel
from ..trainer.engines.base import Request, Run
from .records import Record
from .rollouts import logprob_values
from .routing import Replay

ALLOWANCE = 2.0
Token = tuple[str, int]


class ErrorSize(Record):
    """Absolute errors of logprobs over the compared tokens."""

    mean: float
    largest: float


class Accuracy(Record):
    """Errors against fp64. ``beyond``: tokens whose error exceeds twice stock's largest."""

    compared: int
    ours: ErrorSize
    stock: ErrorSize
    beyond: int
    allowance: float = ALLOWANCE

    @property
    def passed(self) -> bool:
        """Mean and largest error within the allowance."""
        return self.beyond == 0 and self.ours.mean <= self.allowance * self.stock.mean


def in_fp64(module: nn.Module) -> Any:
    """A copy of transformers' own module in fp64; the copied one is not changed.

    Experts then run in transformers' plain loop: its grouped product has no fp64.
    """
    copied = cast(Any, copy.deepcopy(module)).double().eval()
    if getattr(copied.config, "_experts_implementation", None) is not None:
        copied.config._experts_implementation = "eager"
    forward = copied.forward

    def wide(*arguments: Any, **keywords: Any) -> Any:
        with _KeepDouble():
            return forward(*arguments, **keywords)

    copied.forward = wide
    return copied


_PRODUCTS = (
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    torch.mm,
    Tensor.mm,
)


class _KeepDouble(TorchFunctionMode):
    """Casts to fp32 in a model's code leave fp64 tensors as they are: norms, states, routers.

    A product of an fp64 tensor with one that was cast to fp32 (integers: positions) is in fp64.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and torch.float64 in {each.dtype for each in args[:2]}:
            args = tuple(each.double() for each in args[:2]) + args[2:]
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is Tensor.float:
                return first
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def reference_logprobs(
    pristine: LoadedModel,
    requests: Sequence[Request],
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    *,
    replay: Replay | None = None,
) -> dict[Token, float]:
    """fp64 logprob of every sampled token, from transformers' own module, untouched, cast to fp64.

    pristine: a freshly loaded model that no plan was ever applied to (it is copied, not changed).
    replay: of a run whose experts every token goes to.
    """
    module = in_fp64(pristine.module)
    if replay is not None:
        replay.put_on(module)
    found: dict[Token, float] = {}
    with torch.no_grad():
        for index, request in enumerate(requests):
            progress(index, len(requests), f"fp64 {request.id}")
            if replay is not None:
                replay.begin(request)
            ids = torch.tensor([request.tokens], device=pristine.device)
            temperature = request.sampling.temperature or 1.0
            rows = module(input_ids=ids, use_cache=False).logits[0].double() / temperature
            logprobs = torch.log_softmax(rows, dim=-1)
            for position, sampled in enumerate(request.sampled_mask):
                if sampled and position:
                    token = request.tokens[position]
                    found[request.id, position] = float(logprobs[position - 1, token])
    return found


def measure_accuracy(
    reference: Mapping[Token, float],
    *,
    ours: Run,
    stock: Run,
    of_stock: Mapping[Token, float] | None = None,
) -> Accuracy:
    """Errors of both runs over the sampled tokens that all three have.

    of_stock: stock's own reference, where choices of experts make the two differ.
    """
    of_stock = reference if of_stock is None else of_stock
    our_values, stock_values = logprob_values(ours), logprob_values(stock)
    tokens = sorted(reference.keys() & our_values.keys() & stock_values.keys())
    if not tokens:
        raise InconclusiveError("no token has a logprob on all sides; run with sampled tokens")
    our_errors = [abs(our_values[token] - reference[token]) for token in tokens]
    stock_errors = [abs(stock_values[token] - of_stock[token]) for token in tokens]
    worst = max(stock_errors)
    return Accuracy(
        compared=len(tokens),
        ours=ErrorSize(mean=math.fsum(our_errors) / len(tokens), largest=max(our_errors)),
        stock=ErrorSize(mean=math.fsum(stock_errors) / len(tokens), largest=worst),
        beyond=sum(error > ALLOWANCE * worst for error in our_errors),
    )
