"""Calls of the logprob contracts on prepared rows, and the checks that every entry shares.

Legend: T rows, V vocabulary.
"""

import torch
from torch import Tensor

from ..dispatch import choose
from ..errors import ContractError


def logprob_rows(
    logits_TV: Tensor, targets_T: Tensor, temperature_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(lp, row maximum, log of the row sum) of contiguous fp32 rows."""
    return choose("logprob.lanes16.float32.cpu.v1").run(logits_TV, targets_T, temperature_T)


def grad_rows(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature_T: Tensor,
    row_max_T: Tensor,
    log_sum_T: Tensor,
    grad_T: Tensor,
    out_TV: Tensor | None = None,
) -> Tensor:
    """d_logits of contiguous fp32 rows; ``out`` may be the logits themselves."""
    run = choose("logprob_grad.lanes16.float32.cpu.v1").run
    return run(logits_TV, targets_T, temperature_T, row_max_T, log_sum_T, grad_T, out_TV)


def targets_and_temperature(
    targets_T: Tensor, temperature: float | Tensor, rows: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Both as contiguous ``[T]`` tensors, or ContractError."""
    if (
        targets_T.dtype != torch.int64
        or targets_T.shape != (rows,)
        or targets_T.device.type != "cpu"
    ):
        raise ContractError(
            f"targets must be int64 [{rows}] on the CPU, one per row, not {targets_T.dtype} "
            f"{tuple(targets_T.shape)} on {targets_T.device}; several candidates of one position "
            "need one row each"
        )
    if rows and (int(targets_T.min()) < 0 or int(targets_T.max()) >= vocabulary):
        raise ContractError(
            f"targets reach from {int(targets_T.min())} to {int(targets_T.max())}, outside the "
            f"vocabulary of {vocabulary}; select the rows that have a target first"
        )
    if isinstance(temperature, Tensor):
        if temperature.requires_grad:
            raise ContractError("temperature has no gradient here; pass temperature.detach()")
        if temperature.dtype != torch.float32 or temperature.shape != (rows,):
            raise ContractError(
                f"temperature must be a number or float32 [{rows}], not {temperature.dtype} "
                f"{tuple(temperature.shape)}; pass one value per row"
            )
        temperature_T = temperature.contiguous()
    else:
        temperature_T = torch.full((rows,), temperature, dtype=torch.float32)
    if not bool(((temperature_T > 0) & torch.isfinite(temperature_T)).all()):
        raise ContractError(
            "temperatures must be finite and positive; score greedy tokens at the temperature that "
            "both sides agree on, usually 1"
        )
    return targets_T.contiguous(), temperature_T
