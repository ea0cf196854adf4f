"""Trace context in properties: read, carried and left out, equally for rows and for columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as some

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
def test_a_requests_context_is_what_w3c_allows_and_nothing_else(
    headers: dict[str, str], expected: str
) -> None:
    assert context_from_headers(headers) == expected


def test_a_context_is_told_by_its_whole_name() -> None:
    expected = [TRACEPARENT in decode_properties(text or "") for text in TEXTS]
    assert [has_context(text) for text in TEXTS] == expected
    assert has_context_mask(pa.array(TEXTS, pa.string())).to_pylist() == expected


def rows_of(texts: list[str | None]) -> list[tuple[Any, ...]]:
    at = SEND_NAMES.index("properties")
    return [tuple(text if i == at else i for i in range(len(SEND_NAMES))) for text in texts]


def carried(texts: list[str | None], contexts: list[str | None]) -> list[str | None]:
    """What becomes of properties, which is the same for rows and for columns."""
    at = SEND_NAMES.index("properties")
    rows = with_contexts(rows_of(texts), contexts)
    assert isinstance(rows, list)
    columns = with_contexts(
        pa.record_batch({"topic": ["t"] * len(texts), "properties": pa.array(texts, pa.string())}), contexts
    )
    assert isinstance(columns, pa.RecordBatch)
    found: list[str | None] = columns.column("properties").to_pylist()
    assert [row[at] for row in rows] == found
    assert [row[:at] + row[at + 1 :] for row in rows] == [row[:at] + row[at + 1 :] for row in rows_of(texts)]
    return found


def test_a_message_keeps_its_own_context_and_what_has_no_room_stays_as_it_is() -> None:
    found = carried(TEXTS, [CONTEXT] * len(TEXTS))
    for text, after in zip(TEXTS, found, strict=True):
        stays = has_context(text) or text == LONG
        assert after == (text if stays else CONTEXT + (text or ""))
    assert carried(TEXTS, [None] * len(TEXTS)) == TEXTS


@given(
    some.lists(some.tuples(some.sampled_from(TEXTS), some.sampled_from([None, CONTEXT, OTHER])), min_size=1)
)
def test_rows_and_columns_carry_alike_and_lose_it_alike(
    messages: list[tuple[str | None, str | None]],
) -> None:
    texts, contexts = [text for text, _ in messages], [context for _, context in messages]
    for before, after in zip(texts, carried(texts, contexts), strict=True):
        assert without_context(after) == without_context(before) or (
            before == "" and not without_context(after)
        )


def test_columns_without_properties_get_some_and_those_of_another_type_stay() -> None:
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
def test_properties_without_a_context_stay(text: str | None, expected: str | None) -> None:
    assert without_context(text) == expected
