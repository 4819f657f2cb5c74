"""Speed of the GPU operators beside their competitors, in one run; bits are proved in tests.

    python benchmarks/gpu.py                    # all, about 4 minutes: gpu_results.json and gpu.md
    python benchmarks/gpu.py --only gemm decode --out some.json

Medians of CUDA graph replays; weights are rotated so that no product finds its weights in L2.
Ratios are competitor time / our time (above 1: ours is faster), bandwidths are shares of a measured
large copy. Sections that fail are reported and the rest goes on.
"""

# ruff: noqa: E402  (its parts and the package are found beside it)

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import triton

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
sys.path.insert(0, str(HERE))

from gpu_attention import attention_backward, decode, prefill
from gpu_measure import copy_bandwidth
from gpu_products import gemm, gemm_summary, head
from gpu_report import refresh
from gpu_rows import embedding_backward, row_operators

SECTIONS = {
    "gemm": gemm,
    "prefill": prefill,
    "decode": decode,
    "attention_backward": attention_backward,
    "row_operators": row_operators,
    "embedding_backward": embedding_backward,
    "head": head,
}


def main() -> None:
    """Run the chosen sections; write JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "gpu_results.json")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "copy_gbps": copy_bandwidth(),
    }
    print(results, flush=True)
    for name in arguments.only:
        started = time.perf_counter()
        try:
            results[name] = SECTIONS[name](results["copy_gbps"])
            if name == "gemm":
                results["gemm_summary"] = gemm_summary(results["gemm"])
        except Exception as error:  # noqa: BLE001  (a long run on a lent machine keeps its other sections)
            traceback.print_exc()
            results[f"{name}_failed"] = repr(error)
        shown = results.get("gemm_summary" if name == "gemm" else name, ())
        for row in shown:
            print(
                name,
                {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()},
                flush=True,
            )
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        arguments.out.write_text(json.dumps(results, indent=1))
    if set(arguments.only) == set(SECTIONS):
        refresh(HERE / "gpu.md", results)


if __name__ == "__main__":
    main()
