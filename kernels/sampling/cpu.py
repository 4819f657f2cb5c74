"""Sampling on the CPU: the contract, and the compiled core's three variants as implementations."""

from functools import partial

import torch
from torch import Tensor

from ..contract import Contract, Implementation, register_contract, register_implementation
from ..cpu.load import VARIANTS, core, missing

CONTRACT = register_contract(
    Contract(
        id="sampling.gumbel.float32.cpu.v1",
        op="sampling",
        dtype="float32",
        device="cpu",
        formula="argmax over v of logit[v] / T - log(-log(u(seed, position, v))); T = 0: greedy",
        order="none: a maximum, lowest id on ties",
        rounding="logit / T in fp32, widened; noise and sum in fp64, each step rounded, none fused",
        functions="log.fp64.v1 (fdlibm polynomial), splitmix64 hash, true division",
        reference="zeromismatch.kernels.reference.sampling:sample",
        gradient_rtol=0.0,
    )
)


def _sample(
    variant: str, logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor
) -> Tensor:
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    core(variant).call("sample", logits, seeds, positions, temperature, rows, vocabulary, tokens)
    return tokens


for _variant in VARIANTS:
    register_implementation(
        Implementation(
            contract=CONTRACT.id,
            name=f"core-{_variant}",
            run=partial(_sample, _variant),
            missing=partial(missing, _variant),
        )
    )
