"""Encoding visible rows as server-sent events, and parsing event ids."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from timeball.edges.http import answers_codec
from timeball.model.errors import InvalidMessage
from timeball.model.limits import DAY_MS
from timeball.model.message import READ_SCHEMA


def rows(*values: dict[str, object]) -> pa.RecordBatch:
    """Return rows as a read returns them: messages of one store time, with null in columns that are not given."""
    complete = [{"kind": 0, "store_ms": 1_767_225_600_005, **item} for item in values]
    return pa.RecordBatch.from_pylist(
        [{name: item.get(name) for name in READ_SCHEMA.names} for item in complete], READ_SCHEMA
    )


def test_each_event_has_the_position_after_it_as_its_id() -> None:
    result = rows(
        {"seq": 5, "queue_id": 1, "queue_offset": 7, "body": b"line\nline", "due_ms": 1_767_225_600_000},
        {"seq": 6, "queue_id": 0, "queue_offset": 3, "body": b"\xff", "tag": "t", "keys": "a b"},
    )
    first, second, after_last = answers_codec.encode_events(result, (3, 7))[0].decode().split("\n\n")
    assert after_last == ""
    assert first.split("\n")[0] == "id: 3-8"
    assert second.split("\n")[0] == "id: 4-8"
    (data,) = first.split("\n")[1:]  # one line, whatever the body
    assert json.loads(data.removeprefix("data: ")) == {
        "seq": 5, "queue": 1, "offset": 7, "released": "2026-01-01T00:00:00.005Z", "body": "line\nline",
        "due": "2026-01-01T00:00:00.000Z", "lateness_ms": 5,
    }  # fmt: skip
    assert json.loads(second.split("data: ")[1])["base64"] == "/w=="


def test_lateness_counts_from_the_acceptance_of_overdue_messages() -> None:
    now_ms = 1_767_225_600_005
    result = rows(
        {"seq": 5, "queue_id": 0, "queue_offset": 0, "due_ms": now_ms - DAY_MS, "accepted_ms": now_ms - 3}
    )
    event = json.loads(answers_codec.encode_events(result, (0,))[0].decode().split("data: ")[1])
    assert (event["due"], event["lateness_ms"]) == ("2025-12-31T00:00:00.005Z", 3)


def test_rows_behind_the_event_that_exceeds_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    result = rows(*({"seq": seq, "queue_id": seq % 2, "queue_offset": seq, "body": b"x"} for seq in range(4)))
    data, position = answers_codec.encode_events(result, (0, 0))
    assert data.count(b"id: ") == 4 and position is None
    monkeypatch.setattr(answers_codec, "EVENTS_BYTES_MAX", len(data) // 2)
    data, position = answers_codec.encode_events(result, (0, 0))
    assert data.count(b"id: ") == 3 and position == (3, 2)


def test_a_formatted_event_id_is_parsed_to_the_same_offsets() -> None:
    assert answers_codec.parse_event_id(answers_codec.format_event_id((3, 0, 12)).decode()) == [3, 0, 12]
    assert answers_codec.stream_start((3, 0)).endswith(b"id: 3-0\n\n")


@pytest.mark.parametrize("text", ["-", "1-", "a", "1--2", "-1", "9" * 40, "1-" * 100_000 + "1"])
def test_an_invalid_event_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessage, match="Last-Event-ID"):
        answers_codec.parse_event_id(text)
