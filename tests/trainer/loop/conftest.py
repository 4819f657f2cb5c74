"""One tiny model for all tests of the loop, copied for each; runs as small as they can be."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest

from zeromismatch.model_recipes.apply import find_sites
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import Plan, plan_from
from zeromismatch.trainer.loop.config import TrainConfig
from zeromismatch.trainer.loop.run import Setup
from zeromismatch.trainer.tasks.even import Even

SPEC = "tiny:qwen3"
SMALL = {
    "recipe": "-",
    "task": "even",
    "groups": 2,
    "group_size": 2,
    "max_new_tokens": 3,
    "learning_rate": 1e-3,
    "checkpoint_every": 2,
    "wait_seconds": 120.0,
    "task_seconds": 30.0,
}


@pytest.fixture(scope="session")
def base() -> LoadedModel:
    return load_model(SPEC)


@pytest.fixture(scope="session")
def plan(base: LoadedModel) -> Plan:
    sites = find_sites(base.module)
    return plan_from("aligned", sites, base.dtype, base.device, base.identity)


@pytest.fixture
def fresh(base: LoadedModel) -> Callable[[], LoadedModel]:
    """A copy that the caller may train and put a plan on."""

    def make() -> LoadedModel:
        module = copy.deepcopy(base.module)
        return replace(base, module=module, config=module.config)

    return make


@pytest.fixture
def setup_of(plan: Plan) -> Callable[..., Setup]:
    """A small run; keywords are settings."""

    def make(task: object = None, **settings: object) -> Setup:
        config = TrainConfig.model_validate(SMALL | settings)
        return Setup(model=SPEC, plan=plan, task=task or Even(vocabulary=3011), config=config)

    return make
