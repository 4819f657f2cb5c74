"""Sampling a token from each row of logits, the same token on every engine and in every batch.

    token = the lowest v with the largest  logit[v] / T + gumbel(seed, position, v)

The noise is an integer hash of (seed, position, token id), so it does not depend on the batch, the
row or what else is being generated; replaying a request with its seed gives the same tokens. Adding
Gumbel noise and taking the maximum draws exactly from softmax(logits / T). Temperature 0 is greedy.
The contract ``sampling.gumbel.float32.cpu.v1`` is written out in ``kernels/reference/sampling.py``.
Not differentiable.
Logits on a GPU are copied to the CPU first. ``pytest tests/kernels/sampling`` exercises it.

Legend: T rows (one per request), V vocabulary.
"""

import torch
from torch import Tensor

from ..dispatch import choose
from ..errors import ContractError, NonFiniteError, UsageError
from ..reference.sampling import NAN, NOTHING, OVERFLOW, POSITIVE_INFINITY
from .cpu import CONTRACT

__all__ = ["CONTRACT", "sample"]

_REASONS = {
    NAN: "hold NaN; find the first bad site with `zm localize`",
    POSITIVE_INFINITY: "hold +inf; find the first bad site with `zm localize`",
    NOTHING: "are all -inf: every token is masked; allow at least one",
    OVERFLOW: "overflow fp32 when divided by the temperature; raise it, or use 0 for greedy",
}


def sample(
    logits_TV: Tensor, seeds_T: Tensor, positions_T: Tensor, temperature_T: Tensor
) -> Tensor:
    """Draw one token per row: int64 [T].

    logits: fp32 [T, V]; -inf masks a token. seeds, positions: int64 [T]. temperature: fp32 [T], 0
    is greedy with the lowest id on ties. Rows that hold NaN or +inf, or nothing but -inf, raise
    NonFiniteError naming the row; tensors of another dtype, shape or device raise ContractError.
    """
    if logits_TV.is_cuda:  # the CPU's contract: the same token wherever the logits were made
        arguments = (each.cpu() for each in (logits_TV, seeds_T, positions_T, temperature_T))
        return sample(*arguments).to(logits_TV.device)
    _check(logits_TV, seeds_T, positions_T, temperature_T)
    run = choose(CONTRACT.id).run
    tokens = run(
        logits_TV.detach().contiguous(),
        seeds_T.contiguous(),
        positions_T.contiguous(),
        temperature_T.detach().contiguous(),
    )
    if tokens.numel() and int(tokens.min()) < 0:
        row = int((tokens < 0).to(torch.uint8).argmax())
        raise NonFiniteError(f"logits of row {row} {_REASONS[int(tokens[row])]}")
    return tokens


def _check(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.device.type != "cpu":
        raise ContractError(
            f"sample takes fp32 CPU logits [T, V], not {logits.dtype} {tuple(logits.shape)} on "
            f"{logits.device}; use kernels.logprob.lm_head, which returns fp32, and .cpu()"
        )
    rows = logits.shape[:1]
    named = (
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
        ("temperature", temperature, torch.float32),
    )
    for name, tensor, dtype in named:
        if tensor.shape != rows or tensor.dtype != dtype or tensor.device.type != "cpu":
            raise ContractError(
                f"{name} must be {dtype} [{rows[0]}] on the CPU, not {tensor.dtype} "
                f"{tuple(tensor.shape)} on {tensor.device}; convert it first"
            )
    if rows[0] and logits.shape[1] == 0:
        raise ContractError("logits have no columns; pass at least one token to choose from")
    if not bool(((temperature >= 0) & (temperature < float("inf"))).all()):
        raise UsageError(
            "temperatures must be finite and at least 0 (0 is greedy); correct the request"
        )
