"""vLLM's mixtures of experts by contract: one block of router and experts becomes one operator.

vLLM splits a mixture over a gate, a runner, a router and fused experts, and which kernel serves
them depends on device, sizes and environment. Here the block itself is changed: its gate's weight
and the two stacks of its experts go to the contracts' router, choice, weights, grouped products and
combination. Weights stay as loaded, so that they can be read back and published in place.

Served: softmax routers without groups, bias or shared experts (Qwen3-MoE). Anything else is
refused by name. Nothing here is imported without vLLM.
"""

from typing import Any, cast

from torch import Tensor
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock

from .operators import OPERATORS

STACKS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
"""vLLM's stacked weights and transformers' names for them: the same rows in the same order."""
_INSIDE = ".routed_experts"


class AlignedExpertsMethod(UnquantizedFusedMoEMethod):
    """Weights as loaded: nothing is swapped or packed for a kernel of vLLM's."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing; see the module."""


class AlignedMoeBlock(Qwen3MoeSparseMoeBlock):
    """Router, choice, experts and combination of every row, in one operator."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        experts = self.experts.routed_experts
        return OPERATORS.experts(
            hidden_states,
            self.gate.weight,
            experts.w13_weight,
            experts.w2_weight,
            experts.top_k,
            experts.renormalize,
        )

    def unfit(self) -> str | None:
        """Why this block cannot be served, or None; its weights stay unpacked from here on."""
        from .layers import align

        experts = cast(Any, self.experts).routed_experts
        activation = getattr(experts.activation, "value", experts.activation)
        stacks = (experts.w13_weight.shape, experts.w2_weight.shape)
        hidden, inner = self.gate.weight.shape[1], experts.w2_weight.shape[-1]
        count = self.n_routed_experts
        unusual = [
            name
            for name, present in (
                ("shared experts", self.shared_expert is not None),
                ("redundant experts", bool(self.enable_eplb or self.n_redundant_experts)),
                ("rows spread over ranks", bool(self.is_sequence_parallel)),
                (f"{experts.scoring_func} scores", experts.scoring_func != "softmax"),
                ("groups of experts", bool(experts.use_grouped_topk)),
                ("a correction bias", experts.e_score_correction_bias is not None),
                ("a routing function", experts.custom_routing_function is not None),
                ("weights on the input", bool(experts.apply_router_weight_on_input)),
                (f"activation {activation}", activation != "silu"),
                ("weights of another shape",
                 stacks != ((count, 2 * inner, hidden), (count, hidden, inner))),
                (f"weights of {type(experts.quant_method).__name__}",
                 type(experts.quant_method) is not UnquantizedFusedMoEMethod),
            )
            if present
        ]  # fmt: skip
        packed = align(self.gate)
        unusual += [] if packed is None else [f"a router that is {packed}"]
        if unusual:
            return f"a mixture of experts with {', '.join(unusual)}"
        experts.quant_method.__class__ = AlignedExpertsMethod
        return None


def transformers_name(path: str, name: str) -> str | None:
    """The name that transformers gives to a stack of experts; None for any other parameter."""
    if not path.endswith(_INSIDE) or name not in STACKS:
        return None
    return f"{path.removesuffix(_INSIDE)}.{STACKS[name]}"
