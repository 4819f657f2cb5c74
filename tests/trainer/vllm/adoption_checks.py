"""Questions for a real vLLM about recipes that a trainer hands over, or that do not fit; asked
through ``checks.py``.
"""

import json
import os
from typing import Any

import torch

from zeromismatch.kernels.errors import ZeroMismatchError
from zeromismatch.model_recipes.apply import identify
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import aligned_plan
from zeromismatch.model_recipes.schema import Recipe, save_recipe


def adopted(path: str, folder: str) -> dict[str, Any]:
    """Two lines around a trainer that builds its own engine, and the same bits on both sides."""
    model = load_model(path)
    plan = aligned_plan("float32", "cpu")
    identity = identify(model.module, "this test")
    recipe = Recipe(name="test", model=identity, plan=plan, dtype="float32", device="cpu")
    save_recipe(recipe, folder)

    import zeromismatch
    from zeromismatch.trainer.engines.vllm.parameters import as_bits
    from zeromismatch.trainer.engines.vllm.start import Settings, prepare_process

    prepare_process(torch.device("cpu"), Settings(runner=1))
    from vllm import LLM, SamplingParams

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(free_port())}  # fmt: skip
    with zeromismatch.rollouts(folder):
        # As TRL 1.16 does (trl/generation/vllm_generation.py); here in fp32, eagerly, and without a
        # tokenizer, which this checkpoint does not have.
        llm = LLM(
            model=path, tensor_parallel_size=1, gpu_memory_utilization=0.9, max_model_len=256,
            max_num_seqs=8, enable_sleep_mode=False, model_impl="auto", dtype="float32",
            distributed_executor_backend="external_launcher", seed=0, max_num_batched_tokens=4096,
            logprobs_mode="processed_logprobs", quantization=None, trust_remote_code=False,
            enforce_eager=True, skip_tokenizer_init=True,
        )  # fmt: skip
    zeromismatch.apply(model.module, folder)
    warm = SamplingParams(max_tokens=2, temperature=0.7, top_p=0.9)
    try:
        llm.generate([{"prompt_token_ids": [5, 6]}], warm, use_tqdm=False)
        unplain = "sampled"
    except ZeroMismatchError as error:
        unplain = str(error)

    prompts = [list(range(3, 40)), list(range(50, 200, 3)), [7, 8, 9]]
    given = SamplingParams(max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], given, use_tqdm=False)
    tokens = differing = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        reply = output.outputs[0]
        ids = torch.tensor([prompt + list(reply.token_ids)])
        with torch.no_grad():
            logits = model.module(
                ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False
            ).logits[0]
        from zeromismatch.kernels.logprob import logprob

        ours = logprob(logits[len(prompt) - 1 : -1].contiguous(), ids[0, len(prompt) :])
        for index, token in enumerate(reply.token_ids):
            tokens += 1
            theirs = as_bits(reply.logprobs[index][token].logprob)
            differing += int(ours[index].view(torch.int32)) != theirs
    return {"tokens": tokens, "differing": differing, "unplain": unplain}


def free_port() -> int:
    import socket

    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def told(path: str, folder: str) -> dict[str, Any]:
    """What engines are told: verl's way, by options; another recipe; and a block without engine."""
    from argparse import ArgumentParser

    model = load_model(path)
    plan = aligned_plan("float32", "cpu")
    recipe = Recipe(
        name="r", model=identify(model.module), plan=plan, dtype="float32", device="cpu"
    )
    save_recipe(recipe, folder)
    import zeromismatch
    from zeromismatch.trainer.engines.vllm.start import Settings, prepare_process

    prepare_process(torch.device("cpu"), Settings(runner=1))
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    # verl writes rollout.engine_kwargs.vllm into options of `vllm serve`, dicts as JSON
    engine_kwargs = {"additional_config": {"zero_mismatch": folder}}
    options = ["--model", path, "--skip_tokenizer_init", "--max_model_len", "256"]
    for name, value in engine_kwargs.items():
        options += [f"--{name}", json.dumps(value)]
    options = [o.replace("_", "-") if o.startswith("--") else o for o in options]
    given = AsyncEngineArgs.add_cli_args(ArgumentParser()).parse_args(options)
    config = AsyncEngineArgs.from_cli_args(given).create_engine_config()
    found: dict[str, Any] = {"verl": config.additional_config}
    errors = []
    other = {"zero_mismatch": "elsewhere"}
    for arguments in (None, {"additional_config": other}):
        try:
            with zeromismatch.rollouts(folder):
                if arguments is not None:
                    EngineArgs(path, skip_tokenizer_init=True, **arguments).create_engine_config()
        except ZeroMismatchError as error:
            errors.append(str(error))
    outside = EngineArgs(path, skip_tokenizer_init=True).create_engine_config()
    return found | {"errors": errors, "outside": outside.additional_config}


def refused(path: str) -> dict[str, Any]:
    """What a recipe does not cover, all of it at once, from vLLM's real configuration."""
    from zeromismatch.trainer.engines.vllm.admission import violations
    from zeromismatch.trainer.engines.vllm.adoption import Adopted
    from zeromismatch.trainer.engines.vllm.start import Settings, prepare_process

    prepare_process(torch.device("cpu"), Settings(runner=1))
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        path, dtype="bfloat16", tensor_parallel_size=2, kv_cache_dtype="fp8_e5m2",
        skip_tokenizer_init=True, logprobs_mode="processed_logprobs", max_model_len=256,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    )  # fmt: skip
    config = arguments.create_engine_config()
    model = load_model(path)
    plan = aligned_plan("float32", "cpu")
    recipe = Recipe(
        name="r", model=identify(model.module), plan=plan, dtype="float32", device="cpu"
    )
    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # read by vLLM before; a CPU has no such mode
    return {"violations": violations(config, Adopted(plan=plan, recipe=recipe))}


def unloaded(path: str) -> dict[str, Any]:
    """Errors of a release without a name that is needed, and of an engine without the plug-in."""
    from zeromismatch.trainer.engines.build import make_engine
    from zeromismatch.trainer.engines.vllm import compat

    os.environ["VLLM_PLUGINS"] = "another"
    errors = []
    for attempt in (
        lambda: compat.need("vllm.config", "of_another_release"),
        lambda: make_engine("vllm", load_model(path), "aligned"),
    ):
        try:
            attempt()
        except ZeroMismatchError as error:
            errors.append(str(error))
    return {"errors": errors}
