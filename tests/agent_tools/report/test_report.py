"""The HTML page: self-contained, escaped, complete, and written whole or not at all."""

import html.parser
import json
from pathlib import Path

import pytest

from zeromismatch.agent_tools import report
from zeromismatch.agent_tools.plots import HeatMap
from zeromismatch.agent_tools.records import (
    Anchor,
    BitDifference,
    Cause,
    Coverage,
    Culprit,
    CulpritGroup,
    Divergence,
    LogprobReport,
    Pattern,
    RowRef,
    SideRecord,
)
from zeromismatch.agent_tools.report import (
    Claim,
    Command,
    Comparison,
    ReportData,
    Speed,
    from_divergence,
    read_report,
    render,
    write_report,
)
from zeromismatch.kernels.errors import DiskError, UsageError
from zeromismatch.model_recipes.schema import Evidence

HOSTILE = "<script>alert('x')</script> & \"quoted\""


def side(name: str) -> SideRecord:
    engine = name.partition(":")[0]
    return SideRecord(
        side=name, engine=engine, plan="stock", run="a1", steps=3, rows=9, samples=4, seconds=0.5
    )


def culprit(site: str) -> Culprit:
    return Culprit(
        site=site,
        op_class="linear",
        contract_left=None,
        contract_right=None,
        affected=3,
        compared=9,
        first=RowRef(step=1, request="chat-00", position=7, row=0, rows=1),
        left_digest="0" * 32,
        right_digest="1" * 32,
        difference=BitDifference(
            coordinate=(17,),
            left_bits="3f800001",
            right_bits="3f800000",
            left=1.0000001,
            right=1.0,
            ulp=1,
            differing=2,
            elements=576,
        ),
        ulp_histogram={"0": 500, "1": 7, "2-3": 2},
        pattern=Pattern(by_rows={}, by_row_index={}, by_tile_offset={}, lowest_position=7),
        cause=Cause(name="reduction order"),
    )


def divergence(num_culprits: int = 2) -> Divergence:
    sites = tuple(f"model.layers.{index}.mlp.down_proj" for index in range(num_culprits))
    return Divergence(
        status="DIVERGENT",
        reason="3 of 4 tokens differ; see `zm playbook`",
        model="tiny:llama",
        dtype="float32",
        left=side("transformers:decode"),
        right=side("transformers:alone"),
        anchor=Anchor(requests=1, tokens=9, weights=5, embedding_rows=9),
        coverage=Coverage(
            share=1.0,
            threshold=0.99,
            shared=12,
            left_only=(),
            right_only=(),
            rows=108,
            differing_rows=33,
            inputs=200,
            differing_inputs=40,
        ),
        logprobs=LogprobReport(
            compared=4,
            differing=3,
            sampled_compared=2,
            sampled_differing=1,
            left_only=0,
            right_only=0,
            max_abs=1e-6,
            mean=0,
            std=0,
            k3=0,
        ),
        culprits=tuple(culprit(site) for site in sites),
        groups=(
            CulpritGroup(
                op_class="linear",
                cause="reduction order",
                count=num_culprits,
                affected=6,
                compared=18,
                sites=sites,
            ),
        ),
    )


def full_report(text: str = "all is well") -> ReportData:
    heat = HeatMap(rows=("embed", "layer 0"), spans=(("a", 3),), cells=((0, 0, 0), (0, 2, -1)))
    return ReportData(
        title=f"title {text}",
        verdict="DIVERGENT",
        headline=f"headline {text}",
        model=f"model {text}",
        plan="stock",
        dtype="float32",
        compared=1234,
        differing=3,
        comparisons=(Comparison(title=text, note=text, divergence=divergence(), heat=heat),),
        claims=(
            Claim(name=text, status="pass", compared=7, differing=0, control=text, detail=text),
        ),
        speeds=(Speed(name=text, value=12.34, unit="tokens/s", relative=0.9, against=text),),
        digests={"weights": text},
        environment={"torch": text},
        commands=(Command(label=text, command=f"zm doctor {text}"),),
        notes=(text,),
    )


class Page(html.parser.HTMLParser):
    """Collects tags, attributes and text; complains about unbalanced tags."""

    VOID = frozenset({"meta", "br", "rect", "line", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_loads_nothing_and_needs_no_script():
    page = Page(render(full_report()))
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "http" not in render(full_report())
    assert "url(" not in page.text


def test_page_follows_the_readers_theme():
    page = render(full_report())
    assert "@media (prefers-color-scheme: dark)" in page
    assert '<meta name="color-scheme" content="light dark">' in page


def test_every_text_is_escaped():
    page = render(full_report(HOSTILE))
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 12
    assert Page(page).text.count("<script>alert('x')</script>") >= 12


def test_page_shows_verdict_counts_culprits_claims_speeds_and_commands():
    text = " ".join(Page(render(full_report())).text.split())
    for expected in (
        "DIVERGENT",
        "1,234 ",
        "linear",
        "reduction order",
        "model.layers.0.mlp.down_proj and 1 more",
        "2-3 ulp",
        "12.3 tokens/s",
        "0.90×",
        "zm doctor all is well",
        "3f800001",
        "1 of 5 cells differ",
    ):
        assert expected in text


def test_backticks_become_code_and_an_odd_one_stays():
    page = render(full_report("run `zm doctor` now"))
    assert "<code>zm doctor</code>" in page
    assert "run `zm" in render(full_report("run `zm"))


def test_long_culprit_lists_are_cut_and_the_page_says_so():
    data = from_divergence(divergence(report.MAX_CULPRITS_SHOWN + 7))
    assert "7 more are in the JSON beside this page" in " ".join(Page(render(data)).text.split())


def test_size_stays_bounded_for_a_big_model():
    heat = HeatMap(
        rows=tuple(f"layer {index}" for index in range(80)),
        spans=tuple((f"chat-{index}", 500) for index in range(40)),
        cells=tuple(tuple((i * j) % 7 for i in range(20_000)) for j in range(80)),
    )
    data = from_divergence(divergence(2_000), heat=heat)
    assert len(render(data)) < 5_000_000


def test_data_lies_beside_the_page_and_draws_it_again(tmp_path: Path):
    page = write_report(tmp_path / "run" / "report.html", full_report())
    again = read_report(page.parent)
    assert again == full_report()
    assert render(again) == page.read_text(encoding="utf-8")
    assert sorted(entry.name for entry in page.parent.iterdir()) == ["report.html", "report.json"]


def test_a_divergence_document_makes_a_page(tmp_path: Path):
    document = tmp_path / "divergence.json"
    document.write_text(divergence().model_dump_json())
    data = read_report(document)
    assert (data.verdict, data.compared, data.differing) == ("DIVERGENT", 4, 3)


def test_documents_of_another_kind_are_refused_with_the_next_step(tmp_path: Path):
    document = tmp_path / "other.json"
    document.write_text(json.dumps({"schema_version": 1, "kind": "recipe"}))
    with pytest.raises(UsageError, match="neither a report nor a divergence"):
        read_report(document)
    with pytest.raises(UsageError, match="does not exist"):
        read_report(tmp_path / "nothing")


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "report.json").mkdir()
    with pytest.raises(DiskError, match="cannot write"):
        write_report(tmp_path / "report.html", full_report())
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_evidence_becomes_a_claim():
    evidence = Evidence(
        claim="paged = packed",
        command="zm localize tiny:llama",
        verdict="pass",
        compared_tokens=5,
        differing_tokens=0,
        digest="00",
        environment_digest="11",
        seconds=1.0,
    )
    claim = Claim.from_evidence(evidence, control="stock differs")
    assert (claim.name, claim.status, claim.compared) == ("paged = packed", "pass", 5)
