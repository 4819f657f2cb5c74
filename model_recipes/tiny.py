"""Small models with seeded random weights, built offline from transformers' own config classes.

    tiny:llama                          grouped-query attention, tied head
    tiny:llama+attention_bias+mlp_bias  the same with biases
    tiny:llama+untied                   its own LM head
    tiny:qwen3+yarn                     scaled rotary frequencies (linear, dynamic, yarn, llama3)
    tiny:gemma3_text+softcap            final logits bent by a tanh
    tiny:gpt_oss+dense                  gpt_oss with Llama's MLP for its experts: what is left are
                                        sinks, biases, alternating windows and YaRN
    tiny:qwen3_next, tiny:nemotron_h, tiny:kimi_linear       recurrent layers beside attention

They are small but big enough to tell the truth: hidden size 360 (no power of two, no multiple of
16), two layers, at least three tiles on every reduced axis, a vocabulary of odd size, and weights
scaled so that the next-token distribution has at most 70 % of a uniform one's entropy: with
near-uniform logits equality would be vacuous. A new ``model_type`` is one entry in ``_ENTRIES``.

Weights are integers times a scale, rounded once to bf16, drawn from a seed that depends on the
tensor's name: the same on every machine, and float32 is the exact widening of bfloat16.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..kernels.errors import UsageError

PREFIX = "tiny:"

_COMMON: dict[str, Any] = {
    "vocab_size": 3011,
    "hidden_size": 360,
    "intermediate_size": 920,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_UNTIED = {"untied": {"tie_word_embeddings": False}}
DENSE = "dense"
_SHORT = {"original_max_position_embeddings": 64}
_ROPES: dict[str, dict[str, Any]] = {
    name: {"rope_parameters": {"rope_type": name, "rope_theta": 10000.0, "factor": 32.0, **more}}
    for name, more in {
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "yarn": _SHORT,
        "llama3": _SHORT | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One architecture: fields beyond the common ones, and what a ``+feature`` changes.

    norm_centres: mean norm weight by a prefix of the norm's name (with its parent's in front, where
    the prefix has a dot), longest prefix first: 1 where the norm multiplies by its weight, 0 where
    by 1 + weight (Gemma, whose norms after a block must also outweigh its scaled embedding, or
    every token would predict itself).
    """

    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    norm_centres: dict[str, float] = field(default_factory=lambda: {"": 1.0})
    features: dict[str, dict[str, Any]] = field(default_factory=lambda: dict(_UNTIED))


_ENTRIES: dict[str, Entry] = {
    "llama": Entry(
        features=_UNTIED
        | _ROPES
        | {"attention_bias": {"attention_bias": True}, "mlp_bias": {"mlp_bias": True}}
    ),
    "qwen2": Entry(
        features=_UNTIED
        | {"window": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}}
    ),
    "qwen3": Entry(features=_UNTIED | _ROPES),
    "mistral": Entry(
        fields={"sliding_window": 40}, features=_UNTIED | {"full": {"sliding_window": None}}
    ),
    "gemma3_text": Entry(
        norm_centres={"post_": 11.0, "": 0.0},
        fields={
            "sliding_window": 40,
            "query_pre_attn_scalar": 48,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        features=_UNTIED | {"softcap": {"final_logit_softcapping": 15.0}},
    ),
    "gemma2": Entry(
        norm_centres={"post_": 11.0, "": 0.0},
        fields={
            "sliding_window": 40,
            "query_pre_attn_scalar": 48,
            "final_logit_softcapping": 15.0,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "gpt_oss": Entry(
        fields={
            "intermediate_size": 184,
            "sliding_window": 40,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
        features=_UNTIED
        | {DENSE: {"dense_blocks": True, "intermediate_size": 920, "mlp_bias": False}},
    ),
    "qwen3_moe": Entry(
        fields={
            "num_hidden_layers": 2,
            "moe_intermediate_size": 184,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
        features=_UNTIED | {"unnormed": {"norm_topk_prob": False}},
    ),
    "deepseek_v3": Entry(
        fields={
            "num_hidden_layers": 3,
            "num_key_value_heads": 6,
            "moe_intermediate_size": 184,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 104,
            "kv_lora_rank": 72,
            "head_dim": 16,  # of the rotary part
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 40,
        },
    ),
    "qwen3_next": Entry(
        norm_centres={"linear_attn.norm": 1.0, "": 0.0},
        fields={
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 48,
            "linear_value_head_dim": 56,
            "moe_intermediate_size": 184,
            "shared_expert_intermediate_size": 200,
            "num_experts": 16,
            "num_experts_per_tok": 4,
        },
    ),
    "nemotron_h": Entry(
        fields={
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
            "tie_word_embeddings": False,  # this class cannot tie
            "mamba_num_heads": 6,
            "mamba_head_dim": 40,
            "n_groups": 2,
            "ssm_state_size": 48,
            "chunk_size": 32,
            "time_step_min": 0.05,  # now and then in force
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 184,
            "moe_shared_expert_intermediate_size": 200,
            "moe_latent_size": 120,
        },
    ),
    "kimi_linear": Entry(
        fields={
            "num_hidden_layers": 4,
            "num_key_value_heads": 6,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_heads": 6,
            "linear_head_dim": 40,
            "kv_lora_rank": 72,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 40,
            "moe_intermediate_size": 184,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "granite": Entry(
        fields={
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.8,
            "attention_multiplier": 0.11,
            "logits_scaling": 1.3,
        },
    ),
}

# Standard deviations. Linear weights: gain / sqrt(fan_in). q and k make attention uneven, the
# embedding (which is also the tied head) sets the spread of the logits, norms and biases are
# visible.
_GAINS = {"q_proj": 1.5, "k_proj": 1.5, "gate_proj": 1.5, "up_proj": 1.5}
_LOGIT_SPREAD = 3.0
_NORM_SPREAD = 0.25
_BIAS_SPREAD = 0.3
# Mean and spread. With them a recurrent head forgets within 10 to 1000 tokens: no state is vacuous.
_DECAYS = {"A_log": (-2.0, 1.0), "dt_bias": (-2.0, 0.5), "D": (0.3, 0.1)}


def model_types() -> tuple[str, ...]:
    """Architectures that can be built."""
    return tuple(_ENTRIES)


def config_for(spec: str) -> Any:
    """The transformers config that ``tiny:<model_type>[+feature...]`` names."""
    from transformers import CONFIG_MAPPING

    model_type, *features = spec.removeprefix(PREFIX).split("+")
    if model_type not in _ENTRIES:
        known = ", ".join(f"{PREFIX}{name}" for name in _ENTRIES)
        raise UsageError(f"{spec!r} is not known; use one of {known}")
    entry = _ENTRIES[model_type]
    fields = _COMMON | entry.fields
    for feature in features:
        if feature not in entry.features:
            raise UsageError(
                f"{PREFIX}{model_type} has no feature {feature!r}; it has "
                f"{', '.join(entry.features)}"
            )
        fields |= entry.features[feature]
    return CONFIG_MAPPING[model_type](**fields)


def build(spec: str, *, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Build a tiny model in eval mode."""
    from transformers import AutoModelForCausalLM

    config = config_for(spec)
    centres = _ENTRIES[config.model_type].norm_centres

    def make() -> nn.Module:
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if getattr(config, "dense_blocks", False):
            _make_dense(module, dtype)
        return module

    with torch.device("meta"):
        skeleton = make()
    weights = {
        name: draw(seed, name, tuple(parameter.shape), config.hidden_size, centres).to(dtype)
        for name, parameter in skeleton.named_parameters()
    }
    module = make()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
    _keep_fp32(module)
    return module.eval()


def _keep_fp32(module: nn.Module) -> None:
    """What transformers keeps in fp32 when it loads a checkpoint (routers' correction biases)."""
    kept = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name in kept:
                setattr(child, name, buffer.float())


class DenseBlock(nn.Module):
    """Llama's MLP where a layer expects a mixture of experts; there is no routing to report."""

    def __init__(self, config: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaMLP

        super().__init__()
        self.mlp = LlamaMLP(config)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """``(mlp(hidden_states), no router scores)``."""
        return self.mlp(hidden_states), None


def _make_dense(module: nn.Module, dtype: torch.dtype) -> None:
    for layer in cast(Any, module).model.layers:
        layer.mlp = DenseBlock(cast(Any, module).config).to(dtype)


def draw(
    seed: int, name: str, shape: tuple[int, ...], hidden_size: int, norm_centres: dict[str, float]
) -> Tensor:
    """The bf16 tensor of one parameter; depends on the arguments only."""
    parent, owner, kind = ("", *name.split("."))[-3:]
    # numpy's legacy generator: its stream is frozen. A sum of four uniform integers is bell-shaped,
    # has at most 8 bits, and is exact everywhere.
    generator = np.random.RandomState(_tensor_seed(seed, name))
    steps = generator.randint(-32, 32, (4, *shape), dtype=np.int16).sum(0, dtype=np.int16) + 2
    unit = steps.astype(np.float64) / 36.95  # standard deviation of the sum
    if kind == "bias":
        values = _BIAS_SPREAD * unit
    elif kind in _DECAYS:
        centre, spread = _DECAYS[kind]
        values = centre + spread * unit
    elif len(shape) == 1:
        centre = next(
            value
            for prefix, value in norm_centres.items()
            if (f"{parent}.{owner}" if "." in prefix else owner).startswith(prefix)
        )
        values = centre + _NORM_SPREAD * unit
    elif owner in ("embed_tokens", "embeddings", "lm_head"):
        values = _LOGIT_SPREAD / hidden_size**0.5 * unit
    else:
        values = _GAINS.get(owner, 1.0) / shape[-1] ** 0.5 * unit
    return torch.from_numpy(values).to(torch.bfloat16)


def _tensor_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
