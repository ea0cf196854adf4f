"""Arguments of `send` and `send_many`: converted, or refused before they are sent."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from timeball import InvalidDelay, InvalidMessage
from timeball.client.rows import ROW_NAMES, body_bytes, build_message, build_row_message
from timeball.model.message import SEND_COLUMNS


def test_the_arguments_of_a_send_are_converted_and_wrong_ones_refused() -> None:
    message = build_message("t", "x", "tag", ["a", "b"], {"p": "q"}, None, "5s", None)
    assert (message.body, message.keys, message.delay_ms) == (b"x", "a b", 5_000)
    assert message.properties == "p\x01q\x02"
    assert len(message.id) == 32
    for wrong in ({"tag": " a"}, {"keys": "a b"}, {"message_id": "a\x01"}, {"properties": {"": "x"}}):
        fields = {"tag": None, "keys": None, "properties": None, "message_id": None, **wrong}
        with pytest.raises(InvalidMessage):
            build_message("t", "x", after=None, at=None, **fields)  # type: ignore[arg-type]


def test_a_dict_becomes_a_message_and_a_wrong_one_is_refused() -> None:
    row = build_row_message({"body": b"x", "unique_key": "a", "due_ms": 7}, 0, "t")
    assert (row.topic, row.id, row.due_ms, row.delay_ms) == ("t", "a", 7, None)
    for wrong, error_class in (
        ({"body": "x", "extra": 1}, InvalidMessage),
        ({"body": 5}, InvalidMessage),
        ({"body": "x", "at": None}, InvalidDelay),
        ({"body": "x", "after": "1s", "delay_ms": 5}, InvalidDelay),
        ({"body": "x", "after": "1s", "at": 2**40}, InvalidDelay),
    ):
        with pytest.raises(error_class):
            build_row_message(wrong, 0, "t")
    with pytest.raises(InvalidMessage, match="row 3: topic"):
        build_row_message({"body": "x"}, 3, None)


def test_all_names_of_a_dict_except_four_are_columns_of_a_send() -> None:
    assert set(ROW_NAMES) - {"after", "at", "zone", "message_id"} < SEND_COLUMNS.keys()


def test_a_body_of_bytes_or_text_is_converted_to_bytes() -> None:
    for body, expected in (
        ("é", b"\xc3\xa9"),
        (b"x", b"x"),
        (bytearray(b"y"), b"y"),
        (memoryview(b"z"), b"z"),
    ):
        assert body_bytes(body) == expected
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
def test_a_wrong_field_is_refused_in_a_send_and_in_a_dict(fields: dict[str, object]) -> None:
    arguments = {"body": b"x", "tag": None, "keys": None, "properties": None, **fields}
    with pytest.raises(InvalidMessage):
        build_message("t", message_id="id", after=None, at=1_800_000_000_000, **arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage):
        build_row_message({"body": b"x", **fields}, 0, "t")


def test_empty_properties_are_none() -> None:
    assert build_message("t", "x", None, None, {}, "id", None, None).properties is None


@pytest.mark.parametrize("name", ["after", "at", "delay_ms", "due_ms"])
def test_a_dict_with_a_time_of_none_is_refused_with_the_number_of_its_row(name: str) -> None:
    """A dict without the name would be delivered at once. A None is more likely a mistake."""
    with pytest.raises(InvalidDelay, match=f"{name} of row 2 is None"):
        build_row_message({"body": "c", name: None}, 2, "t")


def test_both_occurrences_of_a_repeated_local_time_get_their_own_due_times() -> None:
    """Python takes the two datetimes for equal, so a set or a cache of datetimes would lose one of them."""
    zone = ZoneInfo("Europe/Berlin")
    first, second = (datetime(2040, 10, 28, 2, 30, tzinfo=zone, fold=fold) for fold in (0, 1))
    assert len({first, second}) == 1
    first_ms, second_ms = (
        build_row_message({"body": "a", "at": at}, 0, "t").due_ms for at in (first, second)
    )
    assert first_ms is not None and second_ms is not None and second_ms - first_ms == 3_600_000


def test_a_datetime_without_a_zone_is_refused() -> None:
    with pytest.raises(InvalidDelay, match="without a time zone"):
        build_row_message({"body": "a", "at": datetime(2040, 1, 1, 9)}, 0, "t")  # noqa: DTZ001
