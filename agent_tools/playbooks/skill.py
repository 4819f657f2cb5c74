"""The parts of the skill that come from the code: tool list, rules, and the playbooks' copies.

A skill is installed by copying its folder, so links out of it would break: the pages are copied,
and a test compares. After an edit of a playbook, a command or a rule:

    python -m zeromismatch.agent_tools.playbooks.skill

Left out: ``SKILL.md`` itself, which is written by hand.
"""

from pathlib import Path
from typing import get_args

from ...kernels.files import replace_whole
from .pages import OVERVIEW, names, render

REFERENCES = Path(__file__).parents[2] / "skill" / "skills" / "align-model" / "references"
GENERATED = (
    "<!-- Generated; `python -m zeromismatch.agent_tools.playbooks.skill` makes it again. -->"
)


def references() -> dict[str, str]:
    """File name -> content of every generated reference."""
    pages = {f"{name}.md": render(name) for name in names() if name != OVERVIEW}
    return {**pages, "tools.md": tools_text(), "rules.md": rules_text()}


def tools_text() -> str:
    """Every tool with its arguments."""
    from ..jobs.operations import OPERATIONS

    lines = ["# Tools", "", GENERATED, "",
             "Each is a tool of the MCP server (`zm serve`) and a command: `recipe_show` is "
             "`zm recipe show`.", "Arguments without a default are required. Paths are relative to "
             "the workspace; output goes below `runs/`.", ""]  # fmt: skip
    for operation in OPERATIONS.values():
        lines += [f"## {operation.name}", "", operation.description(), ""]
        lines += ["| argument | default | meaning |", "|---|---|---|"]
        for name, (annotation, default) in operation.parameters().items():
            shown = "required" if default is ... else f"`{default}`"
            about = next(
                (str(entry.description) for entry in get_args(annotation)[1:]
                 if getattr(entry, "description", None)), "",
            )  # fmt: skip
            lines.append(f"| `{name}` | {shown} | {' '.join(about.split())} |")
        lines.append("")
    lines += ["## job_start, job_status", "",
              "`job_start(tool, arguments, key)` begins a long call and returns at once; the same "
              "key gives the same job.", "`job_status(job, wait_seconds)` waits at most 55 s; "
              "`job_result(job)` has the answer.", ""]  # fmt: skip
    return "\n".join(lines)


def rules_text() -> str:
    """What a kernel is held to."""
    from ..verify.rules import RULES

    watched = {
        "static": "Read off the file before anything runs",
        "sandbox": "Enforced while it runs",
        "compared": "Decided from raw tensors by another process",
    }
    lines = ["# What a kernel is held to", "", GENERATED, "",
             "Each line is a rule, by the id under which reports name it. A kernel that breaks one "
             "is refused; change the kernel.", ""]  # fmt: skip
    for kind, title in watched.items():
        lines += [f"## {title}", "", "| rule | a kernel |", "|---|---|"]
        lines += [f"| {rule.id} | {rule.text} |" for rule in RULES.values() if rule.watched == kind]
        lines.append("")
    return "\n".join(lines)


def write(folder: Path = REFERENCES) -> list[Path]:
    """Write all of them."""
    return [replace_whole(folder / name, text) for name, text in references().items()]


if __name__ == "__main__":
    print(f"{len(write())} files in {REFERENCES}")
