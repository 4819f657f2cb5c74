"""Log-probabilities on the CPU: contracts and the compiled core's variants as implementations.

    lm_head.chain           fp32 logits: the linear chain, not rounded to the weights' dtype
    logprob.lanes16         lp of one target per row, with the row's maximum and log-sum for the
    gradient logprob_grad.lanes16    d_logits from those two, repeating the forward's exp

Signatures are those of ``kernels/reference/logprob.py``. Rows are independent; threads share them
out.
"""

from functools import partial

import torch
from torch import Tensor

from ..contract import Contract, Implementation, register_contract, register_implementation
from ..cpu.load import VARIANTS, core, missing
from ..linear.cpu import linear


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


_HEAD = {
    "formula": "logits = sum_k h[t, k] W[v, k] + b[v]",
    "order": "one fp32 FMA chain per output, k ascending from +0",
    "rounding": "operands widened exactly, chain and bias in fp32, no further rounding",
    "functions": "fma",
}
_LANES = (
    "16 lanes over the vocabulary ascending, then the lanes16.tree.v1; lanes beyond it add nothing"
)
_LOGPROB = {
    "formula": "z = logit / T; lp = (z_target - max z) - log(sum exp(z - max z))",
    "order": _LANES,
    "rounding": "every operation in fp32; the log in fp64, rounded once",
    "functions": "exp.cpu.v1 (0 below -87.33654), log.series.v1, IEEE division",
}
_LOGPROB_GRAD = {
    "formula": "d_logit = (grad * (onehot - exp((z - max) - log_sum))) / T",
    "order": "elementwise",
    "rounding": "every operation in fp32",
    "functions": "exp.cpu.v1 (0 below -87.33654), IEEE division",
}
_CONTRACTS = [
    ("lm_head.chain", "float32", lm_head, _HEAD),
    ("lm_head.chain", "bfloat16", lm_head, _HEAD),
    ("logprob.lanes16", "float32", logprob, _LOGPROB),
    ("logprob_grad.lanes16", "float32", grad_logits, _LOGPROB_GRAD),
]

for _name, _dtype, _function, _words in _CONTRACTS:
    _contract = register_contract(
        Contract(
            id=f"{_name}.{_dtype}.cpu.v1",
            op=_name.partition(".")[0],
            dtype=_dtype,
            device="cpu",
            reference=f"zeromismatch.kernels.reference.logprob:{_function.__name__}",
            gradient_rtol=1e-4 if _dtype == "float32" else 2e-2,
            **_words,
        )
    )
    for _variant in VARIANTS:
        register_implementation(
            Implementation(
                contract=_contract.id,
                name=f"core-{_variant}",
                run=partial(_function, _variant),
                missing=partial(missing, _variant),
            )
        )
