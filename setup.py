"""Builds the CPU core. Everything else about the package is in pyproject.toml.

The extension is optional: without a compiler the install still succeeds, and ``zm doctor`` says
what is missing. No -march flag: each source names its own target, so one build serves every x86-64.
"""

from pathlib import Path

from setuptools import Extension, setup

VARIANTS = ("avx512", "avx2", "portable")
HEADERS = (
    "all", "simd", "gemm", "gemm_tiles", "head", "digest", "sampling", "rows", "moe",
    "attention", "attention_blocks", "attention_backward", "recurrence",
    "recurrence_backward", "convolution", "gates", "gated_norm",
)
FLAGS = ["-O3", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno"]


def refuse_links_as_text() -> None:
    """Stop where a check-out turned the links in src/zeromismatch into text files."""
    package = Path(__file__).resolve().parent / "src" / "zeromismatch"
    broken = [entry.name for entry in package.iterdir() if entry.is_file() and not entry.suffix]
    if broken:
        raise SystemExit(
            f"src/zeromismatch/{broken[0]} should be a symbolic link but is a text file: run "
            "`git config core.symlinks true && git checkout -- src`, then install again"
        )


refuse_links_as_text()
setup(
    ext_modules=[
        Extension(
            "zeromismatch.kernels.cpu._core",
            sources=[f"kernels/cpu/core_{variant}.cpp" for variant in VARIANTS],
            depends=[str(header) for header in sorted(Path("kernels/cpu").glob("*.h"))],
            extra_compile_args=[*FLAGS, "-fvisibility=default"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]
)
