"""vLLM's logprobs by contract, for both of its model runners.

The first runner makes the logprobs of the whole vocabulary (``Sampler.compute_logprobs``), the
second those of chosen tokens (``compute_token_logprobs``). Both take a maximum and a log-sum per
row from the contract's kernel and subtract them in its order: the bits of
``kernels.logprob.logprob`` at temperature 1.

vLLM has no plug-in point here, so the functions are replaced where they live, once per process;
they do as before until a model with a plan is alive. A process that holds an engine with a plan and
one without gives both the contract's logprobs: keep baselines in a process of their own.

Legend: T rows, V vocabulary, N tokens per row.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....kernels.logprob.gpu import logprob_op
from ....kernels.logprob.rows import logprob_rows
from . import compat

_ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()
_REPLACED: list[str] = []


def whole_rows(logits: Tensor) -> Tensor:
    """fp32 ``[T, V]``: every token's logprob."""
    logits = logits.float()
    row_max, log_sum = row_statistics(logits)
    return (logits - row_max[:, None]).sub_(log_sum[:, None])


def of_tokens(logits: Tensor, token_ids: Tensor) -> Tensor:
    """fp32 ``[T, N]`` of ``token_ids [T, N]``."""
    logits = logits.float()
    row_max, log_sum = row_statistics(logits)
    chosen = logits.gather(1, token_ids.to(torch.int64))
    return (chosen - row_max[:, None]) - log_sum[:, None]


def row_statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(maximum, log of the sum of exponentials) of each fp32 row, by contract."""
    rows = logits.shape[0]
    targets = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    ones = torch.ones(rows, dtype=torch.float32, device=logits.device)
    rows_of = logprob_op if logits.is_cuda else logprob_rows
    _, row_max, log_sum = rows_of(logits.contiguous(), targets, ones)
    return row_max, log_sum


def serve(model: Any) -> None:
    """Logprobs by contract in this process for as long as ``model`` lives."""
    _ALIVE.add(model)
    if _REPLACED:
        return
    sampler = compat.sampler_class()
    own = sampler.compute_logprobs
    sampler.compute_logprobs = staticmethod(_choosing(whole_rows, own))
    _REPLACED.append(f"{sampler.__module__}.Sampler.compute_logprobs")
    for holder, name in compat.logprob_functions():
        setattr(holder, name, _choosing(of_tokens, getattr(holder, name)))
        _REPLACED.append(f"{holder.__name__}.{name}")


def replaced() -> tuple[str, ...]:
    """What was replaced in this process."""
    return tuple(_REPLACED)


def _choosing(ours: Callable[..., Tensor], own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(own)
    def compute(*arguments: Any, **keywords: Any) -> Tensor:
        return ours(*arguments, **keywords) if _ALIVE else own(*arguments, **keywords)

    return compute
