"""Queries for pending messages, and their answers."""

from __future__ import annotations

import msgspec
import pytest

from timeball.edges.http import answers_codec
from timeball.model.answers import PageRequest, PendingMessage, PendingPage
from timeball.model.errors import InvalidDelay, InvalidMessage, OutOfRange


def test_an_empty_query_asks_for_all_messages() -> None:
    assert answers_codec.parse_page_query({}) == PageRequest(100)


def test_each_parameter_is_parsed() -> None:
    query = {"topic": "a", "key": "k", "from": "2026-01-01T00:00:00Z", "to": "1767225600001", "max": "7"}
    assert answers_codec.parse_page_query(query) == PageRequest(
        7, "a", "k", 1_767_225_600_000, 1_767_225_600_001
    )


def test_the_next_page_of_an_answer_is_parsed_again() -> None:
    answer = answers_codec.page_answer(PendingPage([], (1_767_225_600_000, 12)))
    assert answer.next_page is not None
    assert answers_codec.parse_page_query({"page": answer.next_page}).after == (1_767_225_600_000, 12)
    assert answers_codec.page_answer(PendingPage([], None)).next_page is None


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({"page": "12"}, InvalidMessage),
        ({"page": "1-2-3"}, InvalidMessage),
        ({"page": "9" * 40 + "-1"}, InvalidMessage),
        ({"max": "-1"}, OutOfRange),
        ({"max": "9" * 40}, OutOfRange),
        ({"from": "yesterday"}, InvalidDelay),
    ],
)
def test_invalid_parameters_are_refused(query: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        answers_codec.parse_page_query(query)


def test_missing_fields_of_a_message_are_left_out() -> None:
    page = answers_codec.page_answer(
        PendingPage([PendingMessage(3, "a", 1_767_225_600_000, None, None, None, 5, None)], None)
    )
    assert msgspec.to_builtins(page) == {
        "messages": [
            {
                "topic": "a",
                "due": "2026-01-01T00:00:00.000Z",
                "due_ms": 1_767_225_600_000,
                "seq": 3,
                "size_bytes": 5,
            }
        ]
    }


def test_only_known_units_are_accepted() -> None:
    assert answers_codec.parse_unit("day") == "day"
    with pytest.raises(OutOfRange, match="second, minute, hour or day"):
        answers_codec.parse_unit("days")
