"""vLLM's asynchronous engine, its core in a process of its own, beside the packed trainer.

    python benchmarks/vllm_async.py --model /tmp/models/smollm2 --out OUT [--device cpu]

Nothing of ours but ``additional_config`` reaches the engine: the plug-in puts the plan on in the
other process. Requests arrive one after the other while earlier ones run; every sampled token's
logprob is compared with the trainer's forward.
"""

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any


async def sampled(args: argparse.Namespace, prompts: list[list[int]], config: Any) -> list[Any]:
    """(reply, logprob bits) of each prompt."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from zeromismatch.trainer.engines.vllm.parameters import as_bits

    place: dict[str, Any] = {}
    if args.device == "cuda":
        place = {"kv_cache_memory_bytes": 8 << 30, "gpu_memory_utilization": 0.1}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            args.model, dtype=args.dtype, skip_tokenizer_init=True, max_model_len=2048,
            enforce_eager=args.device == "cpu", additional_config=config,
            max_num_seqs=args.count, **place,
        )
    )  # fmt: skip

    async def one(index: int, prompt: list[int]) -> Any:
        await asyncio.sleep(0.01 * index)
        given = SamplingParams(
            max_tokens=args.new, ignore_eos=True, detokenize=False, logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        last: Any = None
        async for output in engine.generate({"prompt_token_ids": prompt}, given, f"r{index}"):
            last = output
        reply = last.outputs[0]
        tokens = list(reply.token_ids)
        entries = zip(tokens, reply.logprobs, strict=True)
        return tokens, [as_bits(entry[token].logprob) for token, entry in entries]

    try:
        return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
    finally:
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    args.dtype = "bfloat16" if args.device == "cuda" else "float32"
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    import numpy as np
    import torch

    from zeromismatch.model_recipes.models import load_model, torch_dtype
    from zeromismatch.model_recipes.plan import aligned_plan
    from zeromismatch.trainer.engines.base import Request
    from zeromismatch.trainer.engines.packed import PackedEngine
    from zeromismatch.trainer.engines.vllm.adoption import adoption

    plan = aligned_plan(torch_dtype(args.dtype), torch.device(args.device))
    draw = random.Random(7)
    top = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    prompts = [
        [draw.randrange(3, top) for _ in range(draw.randrange(20, args.longest))]
        for _ in range(args.count)
    ]
    began = time.perf_counter()
    replies = asyncio.run(sampled(args, prompts, adoption(plan)))
    seconds = time.perf_counter() - began
    model = load_model(args.model, dtype=args.dtype, device=args.device)
    trainer = PackedEngine(model, plan)
    tokens = differing = 0
    for prompt, (reply, theirs) in zip(prompts, replies, strict=True):
        mask = (False,) * len(prompt) + (True,) * len(reply)
        request = Request(id="r", tokens=(*prompt, *reply), sampled_mask=mask)
        with torch.no_grad():
            ours = trainer.logprobs([request]).cpu().numpy().view(np.int32)
        tokens += len(theirs)
        differing += int((ours != np.asarray(theirs, np.int32)).sum())
    found = {"requests": len(prompts), "tokens": tokens, "differing": differing,
             "seconds_with_start": seconds, "plan": plan.name}  # fmt: skip
    (args.out / "vllm_async.json").write_text(json.dumps(found, indent=1))
    print(found)


if __name__ == "__main__":
    main()
