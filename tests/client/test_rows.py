"""Arguments of `send` and `send_many`: converted, or refused before they are sent."""

from datetime import datetime
from zoneinfo import ZoneInfo

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
    row = outgoing_row({"body": b"x", "unique_key": "a", "due_ms": 7}, 0, "t")
    assert (row.topic, row.id, row.due_ms, row.delay_ms) == ("t", "a", 7, None)
    for wrong, kind in (
        ({"body": "x", "extra": 1}, InvalidMessage),
        ({"body": 5}, InvalidMessage),
        ({"body": "x", "at": None}, InvalidDelay),
        ({"body": "x", "after": "1s", "delay_ms": 5}, InvalidDelay),
        ({"body": "x", "after": "1s", "at": 2**40}, InvalidDelay),
    ):
        with pytest.raises(kind):
            outgoing_row(wrong, 0, "t")
    with pytest.raises(InvalidMessage, match="row 3: topic"):
        outgoing_row({"body": "x"}, 3, None)


def test_the_names_are_those_of_columns() -> None:
    assert set(ROW_NAMES) - {"after", "at", "zone", "message_id"} < SEND_COLUMNS.keys()


def test_a_body_is_bytes_or_text() -> None:
    assert [body_bytes(body) for body in ("é", b"x", bytearray(b"y"), memoryview(b"z"))] == [
        "é".encode(),
        b"x",
        b"y",
        b"z",
    ]
    with pytest.raises(InvalidMessage, match="not int"):
        body_bytes(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"body": 5},
        {"body": None},
        {"tag": 5},
        {"keys": ["a b"]},
        {"keys": [""]},
        {"keys": [5]},
        {"properties": {"a": 5}},
        {"properties": {"": "x"}},
        {"properties": {"a": "x\x02b\x01c"}},
    ],
)
def test_messages_are_refused(fields: dict[str, object]) -> None:
    given = {"body": b"x", "tag": None, "keys": None, "properties": None, **fields}
    with pytest.raises(InvalidMessage):
        outgoing("t", message_id="id", after=None, at=1_800_000_000_000, **given)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage):
        outgoing_row({"body": b"x", **fields}, 0, "t")


def test_empty_properties_are_none() -> None:
    assert outgoing("t", "x", None, None, {}, "id", None, None).properties is None


@pytest.mark.parametrize("name", ["after", "at", "delay_ms", "due_ms"])
def test_a_time_that_is_none_is_refused_and_the_row_named(name: str) -> None:
    """A time that was lost on the way would be delivered at once; a dict without the name is."""
    with pytest.raises(InvalidDelay, match=f"{name} of row 2 is None"):
        outgoing_row({"body": "c", name: None}, 2, "t")


def test_both_passes_of_a_repeated_hour_are_sent() -> None:
    """Python compares and hashes them as equal, so a set or a cache by datetime would lose one."""
    zone = ZoneInfo("Europe/Berlin")
    first, second = (datetime(2040, 10, 28, 2, 30, tzinfo=zone, fold=fold) for fold in (0, 1))
    assert len({first, second}) == 1
    one, other = (outgoing_row({"body": "a", "at": at}, 0, "t").due_ms for at in (first, second))
    assert one is not None and other is not None and other - one == 3_600_000


def test_a_datetime_without_a_zone_is_refused() -> None:
    with pytest.raises(InvalidDelay, match="without a time zone"):
        outgoing_row({"body": "a", "at": datetime(2040, 1, 1, 9)}, 0, "t")  # noqa: DTZ001
