"""Loading: whatever is wrong with a checkpoint is said, with what to do about it."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import (
    CapabilityError,
    CheckpointError,
    NonFiniteError,
    UsageError,
)
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.state import aliases, named_state, state_digest, weights_root

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    """A good checkpoint: tiny:llama in bf16."""
    model.to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_a_checkpoint_loads_exactly_in_both_dtypes(folder: Path) -> None:
    wide = load_model(str(folder))
    narrow = load_model(str(folder), dtype="bfloat16")
    made = load_model("tiny:llama")
    assert wide.state_digest == made.state_digest
    assert wide.tokenizer is None
    assert narrow.dtype == torch.bfloat16
    for name, tensor in named_state(narrow.module).items():
        assert bits.equal(tensor.float(), named_state(wide.module)[name])
    assert not wide.module.training


def test_tied_tensors_are_listed_once_with_their_aliases() -> None:
    tied, untied = load_model("tiny:llama"), load_model("tiny:llama+untied")
    assert "lm_head.weight" not in tied.state_digest
    assert tied.aliases == {"model.embed_tokens.weight": ("lm_head.weight",)}
    assert "lm_head.weight" in untied.state_digest
    assert untied.aliases == aliases(untied.module) == {}


def test_one_flipped_weight_bit_changes_exactly_its_digest(model: Any) -> None:
    before = state_digest(model)
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.view(torch.int32)[7, 11] ^= 1
    after = state_digest(model)
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["model.layers.1.mlp.up_proj.weight"]
    assert weights_root(before) != weights_root(after)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_weight_is_named_with_its_index(folder: Path, value: float) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value

    edit_weights(folder, poison)
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.down_proj\.weight\[3, 5\] is"):
        load_model(str(folder))


def cut(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def cut_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:20])


def garbage(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 8) + b"not json")


def lose_shard(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def only_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def transpose(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, "is truncated: .* bytes, its header promises"),
        (cut_header, "truncated inside its header"),
        (garbage, "no safetensors file"),
        (lose_shard, "model-00001-of-00002.safetensors missing"),
        (only_pickle, "pytorch_model.bin is not read: convert to safetensors"),
        (lambda f: (f / WEIGHTS).unlink(), "has no model.safetensors;"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "holds no JSON object"),
        (lambda f: edit_weights(f, transpose), r"wrong shape: .*up_proj.weight \[360, 920\]"),
        (
            lambda f: edit_weights(f, lambda t: t.pop("model.norm.weight")),
            "missing tensors: model.norm.weight",
        ),
        (
            lambda f: edit_weights(f, lambda t: t.update(extra=torch.zeros(1))),
            "unexpected tensors: extra",
        ),
        (lambda f: edit_config(f, model_type="llamma"), "'llamma' is unknown"),
        (lambda f: edit_config(f, model_type=None), "None is unknown"),
        (lambda f: edit_config(f, model_type="clip"), "not a causal language model"),
        (
            lambda f: edit_config(f, architectures=["LlamaForTokenClassification"]),
            "LlamaForTokenClassification is not a causal",
        ),
        (lambda f: edit_config(f, auto_map={"AutoModel": "x.y"}), "code from the checkpoint"),
        (lambda f: edit_config(f, quantization_config={"bits": 4}), "weights are quantised"),
        (lambda f: edit_config(f, num_attention_heads=7), "does not make a llama config"),
        (lambda f: edit_config(f, num_hidden_layers=1), "unexpected tensors: .* and 6 more"),
    ],
)
def test_a_spoiled_checkpoint_says_what_is_wrong(
    folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(str(folder))
    assert str(folder) in str(caught.value)


def test_what_does_not_exist_is_said_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="is not a folder; give a checkpoint folder"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="hf download some-org/no-such-model"):
        load_model("some-org/no-such-model")


def test_unusable_dtypes_and_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="float32 or bfloat16"):
        load_model("tiny:llama", dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no device name"):
        load_model("tiny:llama", device="abacus")
    with pytest.raises(UsageError, match="not supported"):
        load_model("tiny:llama", device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(CapabilityError, match="no CUDA device"):
            load_model("tiny:llama", device="cuda")
