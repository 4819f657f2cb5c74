"""A task by its name.

even                              tokens; a tiny model can learn it (tasks/even.py says what)
gym/DATASET                       any reasoning-gym dataset, one turn
tool/DATASET                      the same with a sandboxed Python, several turns
gym/DATASET,{"max_terms": 3}      with the dataset's own settings
module:function                   a user's (tasks/user.py)
"""

import json
from pathlib import Path
from typing import Any

from ...kernels.errors import UsageError
from ...model_recipes.models import LoadedModel
from ..loop.records import Task
from .codec import codec_of
from .even import Even
from .gym import gym_questions
from .sandbox import Sandbox
from .text import TextTask
from .tool import ToolTask
from .user import UserTask

FORMS = "`even`, `gym/DATASET`, `tool/DATASET` or `module:function`"


def task_named(name: str, model: LoadedModel, *, seed: int = 0) -> Task:
    """The task of that name for this model. seed: of a dataset's entries.

    Raises UsageError for an unknown name or setting, CapabilityError where something is missing.
    """
    kind, slash, rest = name.partition("/")
    if name == "even":
        return Even(vocabulary=model.config.vocab_size)
    if slash and kind in ("gym", "tool"):
        dataset, options = _split(rest)
        questions = gym_questions(dataset, seed=seed, options=options)
        codec = codec_of(model)
        if kind == "gym":
            return TextTask(name=name, codec=codec, questions=questions)
        sandbox = Sandbox()
        sandbox.check()
        return ToolTask(name=name, codec=codec, questions=questions, sandbox=sandbox)
    if ":" in name and not slash:
        return UserTask(name, codec_of(model), Path.cwd())
    raise UsageError(f"there is no task {name!r}; give {FORMS}")


def _split(rest: str) -> tuple[str, dict[str, Any]]:
    dataset, _, text = rest.partition(",")
    if not text:
        return dataset, {}
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"the settings {text!r} of dataset {dataset} are no JSON ({error}); write for example "
            f'{dataset},{{"size": 100}}'
        ) from error
    if not isinstance(options, dict):
        raise UsageError(f"the settings of dataset {dataset} must be a JSON object, not {text}")
    return dataset, options
