"""vLLM's layers with their numbers by contract: one subclass each, put on a live instance.

``align`` changes the class of a layer that vLLM has built; parameters, weight loaders and names
stay its own. What a subclass does not understand (a quantised weight, a partial rotation, a second
shard) is refused when it is put on, by name.

Nothing here is imported without vLLM.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from ....model_recipes.bindings import kernel
from ....model_recipes.rope import frequencies
from .experts import AlignedMoeBlock, Qwen3MoeSparseMoeBlock
from .operators import OPERATORS


class AlignedRMSNorm(RMSNorm):
    """The norm, with the residual's addition in front of it where vLLM fuses the two."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return OPERATORS.rms_norm(x, self.weight, self.variance_epsilon)
        return OPERATORS.add_rms_norm(x, residual, self.weight, self.variance_epsilon)

    def unfit(self) -> str | None:
        plain = self.variance_size_override is None and isinstance(self.weight, nn.Parameter)
        return None if plain else "a norm over a part of its row, or without a weight"


class AlignedSiluAndMul(SiluAndMul):
    """Of the two halves of one row."""

    def forward(self, x: Tensor) -> Tensor:
        return OPERATORS.silu_mul(x)

    def unfit(self) -> str | None:
        return None


class AlignedRotary(RotaryEmbedding):
    """Rows of the fp64 table by position; queries and keys in one call."""

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert key is not None
        return self.turn(positions, query, key, None, None, 0.0)

    def turn(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """The same, behind the norms of each head where there are weights."""
        positions = positions.flatten()
        q, k = (x.view(positions.shape[0], -1, self.head_size) for x in (query, key))
        tables = (self.aligned_cos, self.aligned_sin)
        q, k = OPERATORS.rotary(q, k, positions, *tables, q_weight, k_weight, eps)
        return q.view(query.shape), k.view(key.shape)

    def unfit(self) -> str | None:
        whole = self.is_neox_style and self.rotary_dim == self.head_size
        return None if whole else "a rotation of a part of the head, or of neighbouring columns"

    def fill_table(self, parameters: Any) -> None:
        """The table as the trainer makes it, for every position that the model has."""
        with torch.device("cpu"):  # vLLM builds models under another default device
            inv_freq = frequencies(parameters, self.rotary_dim)
            assert inv_freq is not None
            table = kernel("rotary_table").rotary_table
            cos, sin = table(inv_freq, torch.arange(self.max_position_embeddings), 1.0)
        device = self.cos_sin_cache.device
        self.register_buffer("aligned_cos", cos.to(device), persistent=False)
        self.register_buffer("aligned_sin", sin.to(device), persistent=False)


class AlignedLogits(LogitsProcessor):
    """fp32 logits from the accumulator."""

    def _get_logits(
        self,
        hidden_states: Tensor,
        lm_head: VocabParallelEmbedding,
        embedding_bias: Tensor | None,
        skip_gather: bool = False,
    ) -> Tensor:
        logits = OPERATORS.lm_head(hidden_states, lm_head.weight, embedding_bias)
        return logits[..., : self.org_vocab_size]

    def unfit(self) -> str | None:
        if self.scale != 1.0 or self.soft_cap is not None:
            return "logits that are scaled or capped after the head"
        return "logits as its input" if self.logits_as_input else None


class AlignedLinearMethod(UnquantizedLinearMethod):
    """A chain per output; fused projections are the same chains side by side."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """The weight stays as loaded: nothing is packed behind a publication's back."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = OPERATORS.linear(rows, layer.weight, bias)
        return y.view(*x.shape[:-1], y.shape[-1])


class AlignedEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Looking rows up moves bits; the head's product is :class:`AlignedLogits`'s."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """As for linear layers."""


def _joined(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    weights = (self.q_norm.weight, self.k_norm.weight)
    eps = self.q_norm.variance_epsilon
    q, k = self.rotary_emb.turn(positions, q, k, *weights, eps)
    output, _ = self.o_proj(self.attn(q, k, v))
    return output


def join_heads(model: nn.Module) -> None:
    """Norms of queries and keys and their rotation as one operator, where a layer has all three.

    Their modules are then not called, so hooks on them see nothing: for compiled engines, where no
    hook is called anyway.
    """
    joined: dict[type[nn.Module], type[nn.Module]] = {}
    for module in model.modules():
        kind = type(module)
        if kind.__name__ not in ("Qwen3Attention", "Qwen3MoeAttention"):
            continue
        norms = (cast(Any, module).q_norm, cast(Any, module).k_norm)
        if norms[0].variance_epsilon == norms[1].variance_epsilon:
            made = type(f"Joined{kind.__name__}", (kind,), {"forward": _joined})
            module.__class__ = joined.setdefault(kind, made)


_SWAPS: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (RMSNorm, AlignedRMSNorm),
    (SiluAndMul, AlignedSiluAndMul),
    (RotaryEmbedding, AlignedRotary),
    (LogitsProcessor, AlignedLogits),
    (Qwen3MoeSparseMoeBlock, AlignedMoeBlock),
)
METHODS = (AlignedLinearMethod, AlignedEmbeddingMethod)
ALIGNED = tuple(aligned for _, aligned in _SWAPS)
BLOCKS = (Qwen3MoeSparseMoeBlock,)
"""Modules that are changed as a whole, with all that is in them."""


def align(layer: nn.Module) -> str | None:
    """Make ``layer`` compute by contract; returns why it cannot, or None."""
    if isinstance(layer, LinearBase | VocabParallelEmbedding):
        return _align_weights(layer)
    for stock, aligned in _SWAPS:
        if type(layer) is stock:
            layer.__class__ = aligned
            return cast(Any, layer).unfit()
    return f"{type(layer).__name__}, which no contract covers"


def _align_weights(layer: Any) -> str | None:
    own, ours = (
        (UnquantizedLinearMethod, AlignedLinearMethod)
        if isinstance(layer, LinearBase)
        else (UnquantizedEmbeddingMethod, AlignedEmbeddingMethod)
    )
    if type(layer.quant_method) is ours:
        return None  # a tied head is the embedding once more
    if type(layer.quant_method) is not own:
        return f"weights of {type(layer.quant_method).__name__}"
    layer.quant_method.__class__ = ours
    return None
