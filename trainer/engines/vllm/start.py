"""How vLLM is started here: its settings, its environment, its checkpoint.

The engine core lives in this process, so that its scheduler and its tensors can be read. Nothing
imports vLLM before :func:`construct`.
"""

import os
from dataclasses import dataclass
from typing import Any, cast

import torch

from ....kernels.attention import PAGE
from ....model_recipes import smollm2, tiny
from ....model_recipes.models import LoadedModel
from ....model_recipes.plan import Plan
from . import compat
from .adoption import adoption
from .record import Recorder, recording_scheduler
from .recurrent_options import options as recurrent_options

STOCK_CPU_BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the engine is built; everything that may change a number is described by it.

    eager: no compilation, no CUDA graphs; needed for tracing. runner: vLLM's first or second model
    runner; None leaves the choice to vLLM. blocks: cache blocks, cache_gib: their size; None takes
    a quarter of what the GPU has free, 6 GiB at most: other engines and the trainer need room.
    """

    eager: bool = False
    runner: int | None = None
    max_len: int | None = None
    max_rows: int = 2048
    max_running: int = 256
    blocks: int | None = None
    prefix_cache: bool = True
    cache_gib: int | None = None
    taps: bool = False


def prepare_process(device: torch.device, settings: Settings) -> None:
    """Environment variables that vLLM reads when it is first imported or an engine is built."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the core in this process
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if settings.runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(settings.runner - 1)
    else:
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    compat.read_environment_again()
    if device.type == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def construct(
    loaded: LoadedModel, plan: Plan, settings: Settings, recorder: Recorder, folder: str
) -> Any:
    from vllm import LLM

    on_cpu = loaded.device.type == "cpu"
    options: dict[str, Any] = {}
    if not plan.is_stock:
        compat.require_plugin()
        options["additional_config"] = adoption(plan)
    if settings.runner == 1:
        from .forced import ForcedTokens

        options["logits_processors"] = [ForcedTokens]
    if not on_cpu:
        free = torch.cuda.mem_get_info(loaded.device)[0]
        asked = None if settings.cache_gib is None else settings.cache_gib << 30
        options["kv_cache_memory_bytes"] = asked or min(free // 4, 6 << 30)
        options["gpu_memory_utilization"] = 0.1  # what must be free at least
        compat.allow_graph_capture()
    if settings.blocks is not None:
        options["num_gpu_blocks_override"] = settings.blocks
    if on_cpu:  # a prefix is hit in whole blocks: as small as the backend allows
        options["block_size"] = STOCK_CPU_BLOCK if plan.is_stock else PAGE
    options |= recurrent_options(loaded, plan)
    limit = int(loaded.config.max_position_embeddings)
    return LLM(
        checkpoint(loaded, folder),
        skip_tokenizer_init=True,
        dtype=str(loaded.dtype).removeprefix("torch."),
        enforce_eager=settings.eager,
        max_model_len=min(limit, settings.max_len or limit),
        max_num_seqs=settings.max_running,
        max_num_batched_tokens=settings.max_rows,
        enable_prefix_caching=settings.prefix_cache,
        enable_chunked_prefill=True,
        logprobs_mode="raw_logprobs",
        scheduler_cls=recording_scheduler(recorder, asynchronous=not on_cpu),
        seed=0,
        **options,
    )


def checkpoint(loaded: LoadedModel, folder: str) -> str:
    """A folder with the model that vLLM can read."""
    if loaded.spec == smollm2.NAME:
        return str(smollm2.fetch(loaded.spec))
    if not loaded.spec.startswith(tiny.PREFIX):
        return loaded.spec
    cast(Any, loaded.module).save_pretrained(folder)
    return folder
