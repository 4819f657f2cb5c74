"""Documents are shortened to a bound, say what is missing, and can be read on from there."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromismatch.agent_tools.jobs.paging import MAX_BYTES, TABLE, bounded, page
from zeromismatch.kernels.errors import UsageError

LONG = {"status": "DIVERGENT", "culprits": [{"site": f"s{n}", "x": "y" * 800} for n in range(211)]}
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=30,
)


def test_a_short_document_is_left_alone():
    document = {"a": [1, 2, 3], "b": {"c": "text"}}
    assert bounded(document) == (document, ())


def test_a_long_document_says_what_it_leaves_out_and_where_to_read_on():
    shown, cuts = bounded(LONG)
    assert len(json.dumps(shown)) <= MAX_BYTES
    (cut,) = cuts
    assert (cut.at, cut.of) == ("/culprits", 211)
    assert shown["culprits"] == LONG["culprits"][: cut.shown]
    assert shown["status"] == "DIVERGENT"
    following = page(LONG, cut.at, cut.shown, 20)
    assert following.value == LONG["culprits"][cut.shown : cut.shown + 20]
    assert following.total == 211


def test_pages_joined_are_the_whole():
    read, at = [], 0
    while at < 211:
        part = page(LONG, "/culprits", at, 50)
        assert part.shown > 0
        read += part.value
        at += part.shown
    assert read == LONG["culprits"]


def test_a_large_mapping_is_cut_but_no_record_is():
    table = {f"k{n}": "v" * 600 for n in range(300)}
    shown, cuts = bounded({"table": table})
    assert (cuts[0].at, cuts[0].of) == ("/table", 300)
    assert list(shown["table"]) == list(table)[: cuts[0].shown]
    record = {f"field{n}": "v" * 3000 for n in range(TABLE)}
    assert set(bounded(record)[0]) == set(record)


def test_a_long_text_is_read_by_lines():
    text = "\n".join(f"line {n}" for n in range(3000))
    assert page({"log": text}, "/log", 2990, 50).value == [f"line {n}" for n in range(2990, 3000)]


@pytest.mark.parametrize("pointer", ["/nothing", "/culprits/999", "/culprits/-1", "culprits/x"])
def test_a_pointer_that_leads_nowhere_says_what_there_is(pointer: str):
    with pytest.raises(UsageError, match="there are"):
        page(LONG, pointer, 0, 10)


def test_names_with_slashes_can_be_pointed_at():
    document = {"a/b": {"c~d": [1, 2]}}
    assert page(document, "/a~1b/c~0d", 1, 5).value == [2]


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS, st.integers(20, 400))
def test_any_document_is_shortened_without_being_changed_elsewhere(document: object, limit: int):
    shown, cuts = bounded(document, limit)
    if not cuts:
        assert shown == document
    for cut in cuts:
        assert 0 <= cut.shown < cut.of
