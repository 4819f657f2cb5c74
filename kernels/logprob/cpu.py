"""Log-probabilities on the CPU: contracts and the compiled core's variants as implementations.

    lm_head.chain           fp32 logits: the linear chain, not rounded to the weights' dtype
    logprob.lanes16         lp of one target per row, with the row's maximum and log-sum for the
    gradient logprob_grad.lanes16    d_logits from those two, repeating the forward's exp

Signatures are those of ``kernels/reference/logprob.py``. Rows are independent; threads share them
out.
"""

import torch
from torch import Tensor

from ..cpu.load import core
from ..cpu.register import register_core
from ..linear.cpu import SHORT_CHAINS, forward_variants, linear


def lm_head(variant: str, h_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """fp32 logits [T, V]."""
    return linear(variant, h_TH, weight_VH, bias_V, torch.float32)


def logprob(
    variant: str, logits_TV: Tensor, targets_T: Tensor, temperature_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(lp, row maximum, log of the row sum), each fp32 [T]."""
    rows, vocabulary = logits_TV.shape
    lp, row_max, log_sum = (torch.empty(rows, dtype=torch.float32) for _ in range(3))
    core(variant).call(
        "logprob", logits_TV, targets_T, temperature_T, lp, row_max, log_sum, rows, vocabulary,
        torch.get_num_threads(),
    )  # fmt: skip
    return lp, row_max, log_sum


def grad_logits(
    variant: str,
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature_T: Tensor,
    row_max_T: Tensor,
    log_sum_T: Tensor,
    grad_T: Tensor,
    out_TV: Tensor | None = None,
) -> Tensor:
    """d_logits fp32 [T, V]; ``out`` may be the logits themselves."""
    rows, vocabulary = logits_TV.shape
    if out_TV is None:
        out_TV = torch.empty(rows, vocabulary, dtype=torch.float32)
    core(variant).call(
        "logprob_grad", logits_TV, targets_T, temperature_T, row_max_T, log_sum_T, grad_T,
        out_TV, rows, vocabulary, torch.get_num_threads(),
    )  # fmt: skip
    return out_TV


_LANES = "16 lanes over the vocabulary ascending, then lanes16.tree.v1; lanes beyond it add nothing"

for _storage, _rtol in (("float32", 1e-4), ("bfloat16", 2e-2)):
    register_core(
        lm_head,
        name="lm_head.chain",
        storages=(_storage,),
        variants=forward_variants(_storage),
        op="lm_head",
        formula="logits = sum_k h[t, k] W[v, k] + b[v]",
        order=SHORT_CHAINS.format(axis="inputs k"),
        rounding="operands widened exactly, chain and bias in fp32, no further rounding",
        functions="fma",
        reference="zeromismatch.kernels.reference.logprob:lm_head",
        gradient_rtol=_rtol,
    )
register_core(
    logprob,
    name="logprob.lanes16",
    storages=("float32",),
    op="logprob",
    formula="z = logit / T; lp = (z_target - max z) - log(sum exp(z - max z))",
    order=_LANES,
    rounding="every operation in fp32; the log in fp64, rounded once",
    functions="exp.cpu.v1 (0 below -87.33654), log.series.v1, IEEE division",
    reference="zeromismatch.kernels.reference.logprob:logprob",
    gradient_rtol=1e-5,
)
register_core(
    grad_logits,
    name="logprob_grad.lanes16",
    storages=("float32",),
    op="logprob_grad",
    formula="d_logit = (grad * (onehot - exp((z - max) - log_sum))) / T",
    order="elementwise",
    rounding="every operation in fp32",
    functions="exp.cpu.v1 (0 below -87.33654), IEEE division",
    reference="zeromismatch.kernels.reference.logprob:grad_logits",
    gradient_rtol=1e-5,
)
