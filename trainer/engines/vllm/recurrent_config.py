"""The config that vLLM sees of a model with recurrent layers: sizes, and our architecture.

vLLM chooses caches, attention kinds and its own config classes by a config's fields (a latent rank,
layer types, expert counts). :mod:`.recurrent_model` asks for none of that: what it computes stands
in the plan. So a format of our own (``register_config_parser``, a public plug-in point) shows vLLM
the sizes alone. Nothing here is imported without vLLM.
"""

from pathlib import Path
from typing import Any, cast

from transformers import CONFIG_MAPPING, PretrainedConfig
from vllm.transformers_utils.config import register_config_parser
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from ....kernels.errors import CapabilityError
from .recurrent_options import FORMAT, NAME

_SHOWN = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype"),
)


class SizesParser(ConfigParserBase):
    """``config_format="zero_mismatch"``."""

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **keywords: Any,
    ) -> tuple[dict[str, Any], PretrainedConfig]:
        """(what config.json says, the sizes of it under architecture :data:`NAME`)."""
        raw, _ = cast(Any, PretrainedConfig).get_config_dict(model, revision=revision)
        kind = raw.get("model_type")
        if kind not in CONFIG_MAPPING:
            raise CapabilityError(
                f"transformers has no model type {kind!r}; serve {model} by its own architecture"
            )
        own_class = CONFIG_MAPPING[kind]
        if own_class.__module__.startswith("vllm."):
            raise CapabilityError(
                f"an engine of this process made vLLM's own config class serve {kind} in all of "
                "transformers; start this one in a new process"
            )
        own = own_class.from_dict(raw)
        shown = PretrainedConfig(
            architectures=[NAME],
            **{name: getattr(own, name) for name in _SHOWN if hasattr(own, name)},
        )
        shown.model_type = kind
        return raw, shown


def register() -> None:
    """Make the format known to vLLM, once."""
    register_config_parser(FORMAT)(SizesParser)
