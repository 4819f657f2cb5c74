"""The tasks: what an agent gets, as a folder that a hub could have given.

    task("heron").write(Path("bench/heron/model"))     # config.json, modeling_heron.py, README.md

All models are reduced (two layers, hidden 360, seeded weights), so that a full set of quick gates
takes about a minute. Left out on purpose: anything about how a task is solved.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from ...kernels.errors import UsageError
from ...kernels.files import replace_whole

FOLDER = Path(__file__).with_name("tasks")
REDUCED: dict[str, Any] = {
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
    "seeded_weights": True,
}


class Task(BaseModel):
    """One task. kind: a missing operator, or a fault in the model's own code."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    kind: Literal["operator", "fault"]
    model_class: str
    about: str
    code: str
    config: dict[str, Any] = {}

    def write(self, folder: Path) -> Path:
        """Write the model's folder; returns it."""
        module = f"modeling_{self.name}"
        config = (
            REDUCED
            | self.config
            | {
                "model_type": self.name,
                "architectures": [f"{self.model_class}ForCausalLM"],
                "auto_map": {
                    "AutoConfig": f"{module}.{self.model_class}Config",
                    "AutoModelForCausalLM": f"{module}.{self.model_class}ForCausalLM",
                },
            }
        )
        replace_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
        replace_whole(folder / f"{module}.py", self.code)
        replace_whole(folder / "README.md", self.about)
        return folder


@cache
def tasks() -> tuple[Task, ...]:
    """All tasks, by name."""
    return tuple(
        Task(name=path.stem, **yaml.safe_load(path.read_text()))
        for path in sorted(FOLDER.glob("*.yaml"))
    )


def task(name: str) -> Task:
    """One task; UsageError lists them."""
    known = {each.name: each for each in tasks()}
    if name not in known:
        raise UsageError(f"there is no task {name[:80]!r}; use one of {', '.join(known)}")
    return known[name]
