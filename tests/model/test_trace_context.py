"""Trace context in properties: read, carried and left out, equally for rows and for columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.model.message import SEND_NAMES, decode_properties
from timeball.model.trace_context import (
    PROPERTIES_CHARACTERS_MAX,
    TRACEPARENT,
    context_from_headers,
    has_context,
    has_context_mask,
    with_contexts,
    without_context,
)

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CONTEXT = f"traceparent\x01{PARENT}\x02tracestate\x01a=1\x02"
OTHER = f"traceparent\x01{PARENT.replace('4b', '5c')}\x02"
LONG = "p\x01" + "x" * PROPERTIES_CHARACTERS_MAX + "\x02"

TEXTS = [
    None,
    "",
    "a\x01b\x02",
    "a\x01b",
    OTHER,
    f"a\x01b\x02{OTHER}c\x01d\x02",
    f"x{OTHER}",
    "a\x01traceparent\x02",
    LONG,
]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"traceparent": PARENT, "tracestate": "a=1"}, CONTEXT),
        ({"traceparent": PARENT}, f"traceparent\x01{PARENT}\x02"),
        ({"traceparent": PARENT, "tracestate": "a" * 513}, f"traceparent\x01{PARENT}\x02"),
        ({"traceparent": PARENT, "tracestate": "a\x02b"}, f"traceparent\x01{PARENT}\x02"),
        ({"tracestate": "a=1"}, ""),
        ({}, ""),
        ({"traceparent": PARENT.upper()}, ""),
        ({"traceparent": PARENT + "-more"}, ""),
        ({"traceparent": "ff" + PARENT[2:]}, ""),
        ({"traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"}, ""),
        ({"traceparent": f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01"}, ""),
        ({"traceparent": PARENT + "\x02a\x01b"}, ""),
    ],
)
def test_only_a_context_that_w3c_allows_is_taken_from_headers(headers: dict[str, str], expected: str) -> None:
    assert context_from_headers(headers) == expected


def test_has_context_looks_for_the_complete_property_name() -> None:
    expected = [TRACEPARENT in decode_properties(text or "") for text in TEXTS]
    assert [has_context(text) for text in TEXTS] == expected
    assert has_context_mask(pa.array(TEXTS, pa.string())).to_pylist() == expected


def rows_of(texts: list[str | None]) -> list[tuple[Any, ...]]:
    index = SEND_NAMES.index("properties")
    return [tuple(text if column == index else column for column in range(len(SEND_NAMES))) for text in texts]


def add_contexts(texts: list[str | None], contexts: list[str | None]) -> list[str | None]:
    """Add contexts to messages with these properties, as rows and as columns. Returns the equal results."""
    index = SEND_NAMES.index("properties")
    rows = with_contexts(rows_of(texts), contexts)
    assert isinstance(rows, list)
    columns = with_contexts(
        pa.record_batch({"topic": ["t"] * len(texts), "properties": pa.array(texts, pa.string())}), contexts
    )
    assert isinstance(columns, pa.RecordBatch)
    properties: list[str | None] = columns.column("properties").to_pylist()
    assert [row[index] for row in rows] == properties
    assert [row[:index] + row[index + 1 :] for row in rows] == [
        row[:index] + row[index + 1 :] for row in rows_of(texts)
    ]
    return properties


def test_a_message_with_a_context_or_long_properties_stays_unchanged() -> None:
    properties = add_contexts(TEXTS, [CONTEXT] * len(TEXTS))
    for text, after in zip(TEXTS, properties, strict=True):
        stays = has_context(text) or text == LONG
        assert after == (text if stays else CONTEXT + (text or ""))
    assert add_contexts(TEXTS, [None] * len(TEXTS)) == TEXTS


@given(st.lists(st.tuples(st.sampled_from(TEXTS), st.sampled_from([None, CONTEXT, OTHER])), min_size=1))
def test_without_context_undoes_with_contexts(
    messages: list[tuple[str | None, str | None]],
) -> None:
    texts, contexts = [text for text, _ in messages], [context for _, context in messages]
    for before, after in zip(texts, add_contexts(texts, contexts), strict=True):
        assert without_context(after) == without_context(before) or (
            before == "" and not without_context(after)
        )


def test_missing_properties_are_added_and_other_types_stay_unchanged() -> None:
    bare = pa.record_batch({"topic": ["a", "b"]})
    whole = with_contexts(bare, [None, CONTEXT])
    assert isinstance(whole, pa.RecordBatch) and whole.column("properties").to_pylist() == [None, CONTEXT]
    odd = pa.record_batch({"properties": pa.array([b"a"], pa.binary())})
    assert with_contexts(odd, [CONTEXT]) is odd


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("", ""),
        (CONTEXT, None),
        (f"a\x01b\x02{CONTEXT}c\x01d\x02", "a\x01b\x02c\x01d\x02"),
        (f"a\x01b\x02traceparent\x01{PARENT}", "a\x01b\x02"),
        ("a\x01traceparent\x02", "a\x01traceparent\x02"),
        (f"x{OTHER}", f"x{OTHER}"),
    ],
)
def test_without_context_removes_only_the_context(text: str | None, expected: str | None) -> None:
    assert without_context(text) == expected
