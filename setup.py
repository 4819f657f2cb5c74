"""Builds the CPU core. Everything else about the package is in pyproject.toml.

The extension is optional: without a compiler the install still succeeds, and ``zm doctor`` says
what is missing. No -march flag: each source names its own target, so one build serves every x86-64.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "zeromismatch.kernels.cpu._core",
            sources=[f"kernels/cpu/core_{variant}.cpp" for variant in ("avx512", "avx2", "portable")],
            depends=[
                f"kernels/cpu/{name}.h"
                for name in ("all", "simd", "gemm", "head", "digest", "rows", "attention")
            ],
            extra_compile_args=[
                "-O3", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno",
                "-fvisibility=default",
            ],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]
)
