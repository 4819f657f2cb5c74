"""Each command on a tiny model or a file: its document, its exit code, what it leaves on disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.eval.tasks import task
from zeromismatch.kernels import contract as contracts
from zeromismatch.model_recipes.plan import Plan
from zeromismatch.model_recipes.schema import ModelIdentity, Recipe, save_recipe


def answer(
    capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0
) -> dict[str, Any]:
    """Run with ``--json`` and return the one document."""
    assert run([*arguments, "--json"]) == code, capsys.readouterr().err
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    return document


def test_inspect_lists_every_site_with_its_contract(capsys: pytest.CaptureFixture[str]):
    document = answer(capsys, "inspect", "tiny:llama")
    assert document["aligned"] is True
    sites = {site["site"]: site for site in document["sites"]}
    assert sites["model.layers.1.self_attn.q_proj"]["contract"] == "linear.chain.float32.cpu.v1"
    assert {"lm_head", "logprob", "model.layers.0#add_0"} <= set(sites)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["inspect", "tiny:nonsense"], "tiny:llama"),
        (["inspect", "/nowhere"], "checkpoint"),
        (["inspect", "tiny:llama", "--dtype", "float64"], "bfloat16"),
        (["fetch", "llama-9"], "smollm2-135m"),
        (["localize", "tiny:llama", "--left", "vllama", "--right", "packed"], "paged"),
        (["localize", "tiny:llama", "--left", "paged:chunk:x", "--right", "packed"], "chunk:7"),
        (["localize", "tiny:llama", "--left=paged", "--right=packed", "--plan=x"], "recipe"),
        (["recipe", "show", "/nowhere"], "recipe"),
        (["report", "/nowhere"], "does not exist"),
        (["kernels", "certify", "linear.v9"], "zm kernels list"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_unusable_arguments_say_what_would_be_usable(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
):
    error = answer(capsys, *arguments, code=2)["error"]
    assert word in error["message"]


def test_a_rollout_engine_that_is_not_there_is_a_missing_capability(
    capsys: pytest.CaptureFixture[str],
):
    error = answer(capsys, "align", "tiny:llama", "--rollout", "vllm", code=4)["error"]
    assert "--rollout paged" in error["message"]


def test_kernels_list_shows_contracts_and_who_may_serve(capsys: pytest.CaptureFixture[str]):
    document = answer(capsys, "kernels", "list")
    listed = {entry["id"]: entry for entry in document["contracts"]}
    assert set(listed) == {contract.id for contract in contracts.contracts()}
    linear = listed["linear.chain.float32.cpu.v1"]
    assert linear["order"]
    assert any(name.startswith("core-") for name in linear["implementations"])


def test_kernels_certify_admits_the_core_and_stores_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    document = answer(capsys, "kernels", "certify", "activation.silu.float32.cpu.v1", "--quick")
    assert document["refused"] == 0
    assert document["admitted"] >= 1
    assert all(entry["differing"] == 0 for entry in document["certificates"])
    assert list(tmp_path.rglob("activation.silu.float32.cpu.v1--*.json"))


@pytest.mark.slow
def test_kernels_bench_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = tmp_path / "cpu.md"
    document = answer(capsys, "kernels", "bench", "--quick", "--out", str(table))
    assert {"linear", "attention decode", "rmsnorm"} <= {row["op"] for row in document["rows"]}
    assert all(row["ours_us"] > 0 for row in document["rows"])
    assert "| linear | float32 | 1 row, 576 to 576 |" in table.read_text()


def test_recipe_show_reads_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = Recipe(
        name="tiny",
        model=ModelIdentity(
            spec="tiny:llama", model_type="llama", config_digest="c0", weights_root="d0"
        ),
        plan=Plan(name="aligned", rules={"linear": "linear.chain.float32.cpu.v1"}),
        dtype="float32",
        device="cpu",
        not_covered=("GPUs",),
        cost={"slowdown": 1.25},
    )
    save_recipe(recipe, tmp_path)
    assert answer(capsys, "recipe", "show", str(tmp_path))["plan"]["name"] == "aligned"
    assert run(["recipe", "show", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Not covered: GPUs" in text
    assert "linear.chain.float32.cpu.v1" in text
    file = tmp_path / "recipe.yaml"
    file.write_text(f"{file.read_text()}# {'long ' * 60}\n#\t[tab]\n")  # nothing may be wrapped
    assert run(["recipe", "show", str(tmp_path), "--source"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"--- recipe.yaml, as data ---\n{file.read_text()}\n"


def test_inspect_shows_the_code_of_a_model_that_brings_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, outside = task("heron").write(tmp_path / "heron"), tmp_path / "secret.py"
    outside.write_text("secret = 1")
    (folder / "link.py").symlink_to(outside)
    found = answer(capsys, "inspect", f"code:{folder}", "--source", code=4)
    assert found["sources"] == {"modeling_heron.py": task("heron").code}
    assert "sources" not in answer(capsys, "inspect", "tiny:llama")


@pytest.mark.slow
def test_localize_leaves_traces_verdict_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "run"
    sides = ("--left", "transformers:decode", "--right", "transformers:alone")
    document = answer(
        capsys, "localize", "tiny:llama", *sides, "--quick", "--out", str(out), code=1
    )
    assert document["status"] == "DIVERGENT"
    assert "attention" in {group["op_class"] for group in document["groups"]}
    assert document["confirmation"]["confirmed"] is True
    names = {entry.name for entry in out.iterdir()}
    assert names == {"left", "right", "divergence.json", "report.html", "report.json"}
    assert json.loads((out / "divergence.json").read_text())["status"] == "DIVERGENT"
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "zm localize tiny:llama --left transformers:decode" in page
    redrawn = tmp_path / "again.html"
    answer(capsys, "report", str(out), "--out", str(redrawn))
    assert redrawn.read_text() == page


@pytest.mark.slow
def test_localize_of_an_engine_against_itself_is_equal(capsys: pytest.CaptureFixture[str]):
    sides = ("--left", "transformers:alone", "--right", "transformers:alone")
    document = answer(capsys, "localize", "tiny:llama", *sides, "--quick")
    assert document["status"] == "EQUAL"
    assert document["logprobs"]["compared"] > 0
    assert document["logprobs"]["differing"] == 0
