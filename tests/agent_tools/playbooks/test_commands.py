"""Commands inside sentences: each is run once, with something real for every word in capitals."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.eval.tasks import task
from zeromismatch.agent_tools.playbooks import names, render
from zeromismatch.model_recipes import extension

from ..patch.conftest import diff_of, make_repository
from ..patch.test_apply import NOTES, REPRO

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests" / "agent_tools"
OWN = "squared_rectifier.ieee.float32.cpu.v1"
BEFORE = (
    ("zm localize tiny:llama --left paged:chunk:7 --right packed:packed --plan stock --quick "
     "--out OUT/first", 1),
    ("zm gate tiny:llama --only C2 --quick --out OUT/gates", 0),
)  # fmt: skip
EXAMPLES = {
    "zm playbook NAME": ("zm playbook rocm", 0),
    "zm inspect MODEL": ("zm inspect tiny:llama", 0),
    "zm align MODEL": ("zm align tiny:llama --quick --out OUT/align", 0),
    "zm regress RUN": ("zm regress OUT/gates", 0),
    "zm repro DIVERGENCE --whole": ("zm repro OUT/first --whole --out OUT/whole", 0),
    "zm verify FILE --contract ID": (
        f"zm verify {TESTS}/verify/candidates/norm.py --contract rmsnorm.lanes16.float32.cpu.v1 "
        "--quick", 0),
    "zm verify FILE --contract ID --model MODEL": (
        f"zm verify OUT/draft/kernels/heron.py --contract {OWN} --model code:OUT/heron --quick", 3),
    "zm gate MODEL --plan DRAFT": (
        "zm gate code:OUT/heron --plan OUT/draft --only C3 --quick", 0),
    "zm patch propose DIFF --run DIR": (
        "zm patch propose OUT/fix.diff --run OUT/patch --repository OUT/repository", 0),
    "zm patch apply DIR --gates RUN": (
        "zm patch apply OUT/patch --gates OUT/gates --repro OUT/repro.py --quick", 0),
    "zm patch draft MODEL DRAFT": (
        "zm patch draft code:OUT/heron OUT/draft --only C3 --out OUT/run", 3),
}  # fmt: skip


def in_sentences() -> set[str]:
    """Every command that stands in a sentence and is not one of the fenced ones, or its start."""
    found: set[str] = set()
    for name in names():
        prose = re.sub(r"```.*?```", "", render(name), flags=re.DOTALL)
        found |= {" ".join(each.split()) for each in re.findall(r"`(zm [^`]+)`", prose)}
    fenced = {line for name in names() for line in re.findall(r"^ *(zm .*?)  # exit", render(name),
                                                              re.MULTILINE)}  # fmt: skip
    return {each for each in found if not any(line.startswith(each) for line in fenced)}


def test_every_command_in_a_sentence_has_an_example():
    assert in_sentences() == set(EXAMPLES)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_command_in_a_sentence_ends_as_it_should(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    task("heron").write(tmp_path / "heron")
    (tmp_path / "draft" / "kernels").mkdir(parents=True)
    shutil.copy(TESTS / "eval" / "solutions" / "heron.py", tmp_path / "draft" / "kernels")
    make_repository(tmp_path / "repository")
    (tmp_path / "fix.diff").write_text(diff_of(NOTES, "fixed\n"))
    (tmp_path / "repro.py").write_text(REPRO)
    wrong: list[str] = []
    for line, code in (*BEFORE, *EXAMPLES.values()):
        words = [word.replace("OUT", str(tmp_path)) for word in shlex.split(line)[1:]]
        extension.forget()
        ended = run(words)
        if ended != code:
            wrong.append(f"{line}: {ended}: {capsys.readouterr()}")
        capsys.readouterr()
    extension.forget()
    assert wrong == []
