"""The skill: valid for its validators, whole by itself, and in step with the code."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
import yaml

from zeromismatch.agent_tools.cli import app
from zeromismatch.agent_tools.playbooks import names, render
from zeromismatch.agent_tools.playbooks.pages import PAGE_OF_CAUSE
from zeromismatch.agent_tools.playbooks.skill import REFERENCES, references

ROOT = Path(__file__).resolve().parents[2]
SKILL = ROOT / "skill" / "skills" / "align-model"
TEXT = (SKILL / "SKILL.md").read_text()
FRONT, BODY = TEXT.split("---\n", 2)[1:]
SCRIPT = SKILL / "scripts" / "next_step.py"


def tool(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_agentskills_finds_the_skill_valid(record_property: Callable[[str, object], None]):
    done = tool("agentskills", "validate", str(SKILL))
    record_property("agentskills validate", done.stdout.replace(str(ROOT), "."))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """What an agent's host reads of this repository, and nothing else."""
    for name in ("skill", ".claude-plugin", ".agents"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("AGENTS.md", "CLAUDE.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_skillsaw_has_no_warnings(
    published: Path, record_property: Callable[[str, object], None]
):
    done = tool("skillsaw", "lint", ".", folder=published)
    record_property("skillsaw lint", done.stdout.replace(str(published), "."))
    assert done.returncode == 0, done.stdout
    assert re.search(r"Errors: +0\n +Warnings: 0", done.stdout), done.stdout


def test_skillsaw_turns_red_on_a_broken_skill(published: Path):
    file = published / "skill" / "skills" / "align-model" / "SKILL.md"
    file.write_text(TEXT.replace("name: align-model", "name: Another_Name"))
    assert tool("skillsaw", "lint", ".", folder=published).returncode != 0


def test_the_front_matter_says_what_and_when():
    front = yaml.safe_load(FRONT)
    assert front["name"] == SKILL.name
    assert len(front["description"]) <= 1024
    assert "Use when" in front["description"]
    assert {"license", "compatibility", "metadata", "allowed-tools"} <= set(front)
    assert len(BODY.splitlines()) < 500


def test_references_are_what_the_code_says_now():
    again = "run `python -m zeromismatch.agent_tools.playbooks.skill` and commit what it writes"
    wanted = references()
    assert sorted(path.name for path in REFERENCES.iterdir()) == sorted(wanted)
    for name, text in wanted.items():
        assert (REFERENCES / name).read_text() == text, f"{name}: {again}"


def test_every_reference_is_named_with_when_to_open_it():
    named = re.findall(r"^\| \[references/([\w-]+\.md)\]\([^)]+\) \| (.+) \|$", BODY, re.MULTILINE)
    assert sorted(name for name, _ in named) == sorted(path.name for path in REFERENCES.iterdir())
    targets = re.findall(r"\]\(([^)]+)\)", BODY)
    assert [target for target in targets if not (SKILL / target).is_file()] == []


def test_nothing_in_the_skill_points_out_of_it():
    for path in SKILL.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
            assert (path.parent / target).resolve().is_relative_to(SKILL), f"{path}: {target}"
    assert [path for path in (ROOT / "skill").rglob("*") if path.is_symlink()] == []


def test_every_command_of_the_skill_is_one_that_the_playbooks_test_runs():
    group = typer.main.get_command(app)
    run = "\n".join(render(name) for name in names())
    shown = [line for line in re.findall(r"`([a-z]+ [^`]*)`", BODY) if "--left" in line]
    shown = [line for line in shown if line.split()[0] in group.commands]
    assert shown
    for line in shown:
        assert f"zm {line.replace('MODEL', 'tiny:llama')}" in run, line


def test_plugin_files_agree():
    names = ("plugin.json", ".claude-plugin/plugin.json", ".codex-plugin/plugin.json")
    files = [ROOT / "skill" / name for name in names]
    manifests = [json.loads(file.read_text()) for file in files]
    for key in ("name", "version", "description", "license"):
        assert len({manifest[key] for manifest in manifests}) == 1, key
    servers = [json.loads((ROOT / "skill" / name).read_text())["mcpServers"]["zero-mismatch"]
               for name in ("mcp.json", ".mcp.json")]  # fmt: skip
    assert [[server["command"], *server["args"]] for server in servers] == [["zm", "serve"]] * 2
    group = typer.main.get_command(app)
    assert "serve" in group.commands


def script(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), *words], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_the_script_says_the_next_step(tmp_path: Path):
    assert script("--help")[0] == 0
    file = tmp_path / "d.json"
    group = {"cause": "reduction order", "op_class": "linear", "count": 14, "sites": ["q_proj"]}
    file.write_text(json.dumps({"status": "DIVERGENT", "reason": "r", "groups": [group]}))
    code, text = script(str(file))
    assert code == 1
    assert "14 x linear (reduction order), first q_proj: open references/batch-variance.md" in text
    for status, wanted in (("EQUAL", 0), ("MISALIGNED", 3), ("inconclusive", 3), ("odd", 2)):
        file.write_text(json.dumps({"status": status}))
        assert script(str(file))[0] == wanted
    for broken in ("no json", "[]", '"text"'):
        file.write_text(broken)
        assert script(str(file))[0] == 2
    assert script(str(tmp_path / "absent.json"))[0] == 2


def test_the_script_knows_the_pages_of_the_code():
    pages: dict[str, object] = {}
    text = SCRIPT.read_text()
    exec(re.search(r"^PAGES = \{.*?^\}", text, re.MULTILINE | re.DOTALL)[0], pages)
    assert pages["PAGES"] == PAGE_OF_CAUSE
