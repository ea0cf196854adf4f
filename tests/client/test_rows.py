"""Arguments of `send` and `send_many`: converted, or refused before they are sent."""

import pytest

from timeball import InvalidDelay, InvalidMessage
from timeball.client.rows import ROW_NAMES, body_bytes, outgoing, outgoing_row
from timeball.model.message import SEND_COLUMNS


def test_the_arguments_of_a_send_are_converted() -> None:
    message = outgoing("t", "x", "tag", ["a", "b"], {"p": "q"}, None, "5s", None)
    assert (message.body, message.keys, message.properties, message.delay_ms) == (
        b"x",
        "a b",
        "p\x01q\x02",
        5_000,
    )
    assert len(message.id) == 32
    for wrong in ({"tag": " a"}, {"keys": "a b"}, {"message_id": "a\x01"}, {"properties": {"": "x"}}):
        fields = {"tag": None, "keys": None, "properties": None, "message_id": None, **wrong}
        with pytest.raises(InvalidMessage):
            outgoing("t", "x", after=None, at=None, **fields)  # type: ignore[arg-type]


def test_a_row_names_its_fields() -> None:
    row = outgoing_row({"body": b"x", "unique_key": "a", "due_ms": 7}, 0, "t", ROW_NAMES)
    assert (row.topic, row.id, row.due_ms, row.delay_ms) == ("t", "a", 7, None)
    for wrong, kind in (
        ({"body": "x", "extra": 1}, InvalidMessage),
        ({"body": 5}, InvalidMessage),
        ({"body": "x", "at": None}, InvalidDelay),
        ({"body": "x", "after": "1s", "delay_ms": 5}, InvalidDelay),
    ):
        with pytest.raises(kind):
            outgoing_row(wrong, 0, "t", ROW_NAMES)
    with pytest.raises(InvalidMessage, match="row 3: topic"):
        outgoing_row({"body": "x"}, 3, None, ROW_NAMES)


def test_the_names_are_those_of_the_columns() -> None:
    assert set(ROW_NAMES) == {"after", "at", "message_id"} | (
        SEND_COLUMNS.keys() - {"born_host", "delay_level"}
    )


def test_a_body_is_bytes_or_text() -> None:
    assert [body_bytes(body) for body in ("é", b"x", bytearray(b"y"), memoryview(b"z"))] == [
        "é".encode(),
        b"x",
        b"y",
        b"z",
    ]
    with pytest.raises(InvalidMessage, match="not int"):
        body_bytes(5)  # type: ignore[arg-type]
