"""The whole path of an agent, by a real client over stdio: from a planted fault to green gates.

The client reads and writes no file of the workspace itself: it has the tools, and nothing else.

The fault is a recipe's own norm whose sum is ordered by the number of rows. The fix, a verified
kernel for the package's contract and a plan that names it, is a patch to that recipe alone.
"""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcp import Client
from mcp.client.stdio import StdioServerParameters

from zeromismatch.model_recipes import ticks
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import aligned_plan
from zeromismatch.model_recipes.schema import Recipe, RecipeKernel, file_digest, save_recipe

from .conftest import ENTRY

pytestmark = [pytest.mark.anyio, pytest.mark.long]

MODEL, RECIPE = "tiny:qwen3", "model_recipes/tiny/qwen3"
CONTRACT = "rmsnorm.lanes16.float32.cpu.v1"
CANDIDATE = Path(__file__).parents[1] / "verify" / "candidates" / "norm.py"
PATIENCE = 900.0
HASTY = '''"""A norm that adds up the squares in two halves where there are few rows."""
import torch

CONTRACT = {"id": "hasty_norm.halves.float32.cpu.v1", "op": "hasty_norm", "dtype": "float32",
            "device": "cpu", "formula": "x w / sqrt(mean(x^2) + eps)", "order": "by rows",
            "rounding": "each operation", "functions": "rsqrt", "gradient_rtol": 1e-5}
MODULES = ("Qwen3RMSNorm",)


def forward(module, x):
    """x [..., H] -> [..., H]."""
    squares, half = x * x, x.shape[-1] // 2
    total = squares.sum(-1, keepdim=True)
    if x.numel() < 8 * x.shape[-1]:
        first, second = squares[..., :half], squares[..., half:]
        total = first.sum(-1, keepdim=True) + second.sum(-1, keepdim=True)
    return module.weight * (x * torch.rsqrt(total / x.shape[-1] + module.variance_epsilon))
'''


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    command = ["git", *identity, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def write_recipe(folder: Path, file: str, contract: str, rules: dict[str, str]) -> None:
    """A recipe for the model with one kernel, which is there already."""
    own = RecipeKernel(contract=contract, path=file, digest=file_digest(folder / file))
    loaded = load_model(MODEL)
    plan = aligned_plan(loaded.dtype, loaded.device)
    plan = plan.model_copy(update={"name": "tiny-qwen3", "rules": {**plan.rules, **rules}})
    save_recipe(
        Recipe(
            name="tiny-qwen3", model=loaded.identity, plan=plan, dtype="float32", device="cpu",
            kernels=(own,),
        ),
        folder,
    )  # fmt: skip


def change(path: str, old: str, new: str) -> str:
    """One file's part of a unified diff; an empty text is a file that is not there."""
    lines = [text.splitlines(keepends=True) for text in (old, new)]
    names = [f"{side}/{path}" if text else "/dev/null" for side, text in (("a", old), ("b", new))]
    return "".join(difflib.unified_diff(*lines, *names))


def fix(source: str, kernel: str, digest: str) -> str:
    """The diff that an agent writes: another kernel, and the plan without the hasty one.

    source: what recipe_show answers, from which it knows the files as they are.
    """
    names = re.findall(r"^--- (.+), as data ---$", source, re.MULTILINE)
    assert names == ["recipe.yaml", "kernels/hasty.py"]
    _, recipe, hasty = re.split(r"^--- .+, as data ---\n", source, flags=re.MULTILINE)
    recipe, hasty = recipe.removesuffix("\n"), f"{hasty.rstrip()}\n"
    after = yaml.safe_load(recipe)
    del after["plan"]["rules"]["hasty_norm"]
    after["kernels"] = [
        {**after["kernels"][0], "contract": CONTRACT, "path": "kernels/norm.py", "digest": digest}
    ]
    files = {"recipe.yaml": (recipe, yaml.safe_dump(after, sort_keys=False)),
             "kernels/hasty.py": (hasty, ""), "kernels/norm.py": ("", kernel)}  # fmt: skip
    return "".join(change(f"{RECIPE}/{name}", *texts) for name, texts in files.items())


@pytest.fixture
def faulty(workspace: Path) -> Path:
    """A repository whose recipe brings the hasty norm."""
    folder = workspace / RECIPE
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "hasty.py").write_text(HASTY)
    own = "hasty_norm.halves.float32.cpu.v1"
    write_recipe(folder, "kernels/hasty.py", own, {"hasty_norm": own})
    ticks.tick(folder, own, by="somebody who did not look")
    (workspace / ".gitignore").write_text("runs/\n")
    (workspace / "runs").mkdir()
    git(workspace, "init", "-q", "-b", "main")
    git(workspace, "add", "-A")
    git(workspace, "commit", "-q", "-m", "a recipe")
    return workspace


async def test_from_a_planted_fault_to_green_gates(faulty: Path):
    server = StdioServerParameters(
        command=sys.executable, args=["-c", ENTRY, "serve", "--workspace", str(faulty)],
        env=dict(os.environ), cwd=str(faulty),
    )  # fmt: skip

    async with Client(server, read_timeout_seconds=PATIENCE) as client:

        async def call(tool: str, **arguments: Any) -> dict[str, Any]:
            answer = await client.call_tool(tool, arguments)
            assert not answer.is_error, answer.content[0].text
            return answer.structured_content

        where = {"model": MODEL, "plan": RECIPE, "quick": True}
        found = await call("localize", left="paged:chunk:7", right="packed", **where)
        assert found["status"] == "DIVERGENT"
        assert found["first_divergence"]["op_class"] == "hasty_norm"
        assert {culprit["op_class"] for culprit in found["culprits"]} == {"hasty_norm"}
        repro = await call(
            "repro", divergence=found["call"]["folder"], whole=True, plan=RECIPE, seconds=10.0
        )
        assert repro["named"] == found["first_divergence"]["site"]
        red = await call("gate", only="C2,C3", **where)
        assert [gate["result"] for gate in red["gates"]] == ["pass", "fail"]

        kernel = await call("draft_write", file="runs/drafts/norm.py", text=CANDIDATE.read_text())
        verdict = await call("verify", file=kernel["file"], contract=CONTRACT, quick=True)
        assert verdict["status"] == "pass", verdict["reason"]
        shown = await client.call_tool("recipe_show", {"folder": RECIPE, "source": True})
        text = fix(shown.content[0].text, CANDIDATE.read_text(), kernel["digest"])
        diff = await call("draft_write", file="runs/drafts/fix.diff", text=text)
        await call("patch_propose", diff=diff["file"], run="runs/fix", purpose="an exact norm")
        admitted = await call(
            "patch_apply", run="runs/fix", gates=red["call"]["folder"], quick=True,
            repro=f"{repro['call']['folder']}/repro.py",
        )  # fmt: skip
        assert admitted["status"] == "admitted", admitted["reason"]
        assert [(check["name"], check["status"]) for check in admitted["checks"]] == [
            ("repro-before", "pass"), ("verify", "pass"), ("repro-after", "pass"),
            ("regress", "pass"),
        ]  # fmt: skip
        assert git(faulty, "status", "--porcelain") == ""

        git(faulty, "merge", "-q", admitted["branch"])  # what a person does
        after = await call("regress", report=red["call"]["folder"])
        assert (after["status"], after["won"], after["lost"]) == ("pass", ["C3"], [])
        green = after["report"]
        assert green["status"] == "pass"
        assert [gate["result"] for gate in green["gates"]] == ["pass", "pass"]
        assert "hasty_norm" not in green["plan"]["rules"]
        assert (faulty / after["call"]["folder"] / "gates.json").is_file()
