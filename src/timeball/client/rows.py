"""Conversion of the arguments of `send` and the dicts of `send_many` to messages to send. Needs no Arrow."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

from timeball.client.identifiers import IDENTIFIERS
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.time_parsing import After, At, local_due_ms, stored_local_time, when
from timeball.model.values import Keys, check_label, keys_text, properties_text, valid

Body: TypeAlias = bytes | bytearray | memoryview | str

# The names that a dict may have: the arguments of `send`, and the names of columns for the id and the times.
ROW_NAMES = (
    "after", "at", "zone", "message_id", "topic", "body", "tag", "keys", "unique_key", "properties", "due_ms",
    "delay_ms",
)  # fmt: skip
TIME_NAMES = ("after", "at", "delay_ms", "due_ms")


class ArrowColumns(Protocol):
    """A table, a record batch or a record batch reader of pyarrow, which has no types."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> object: ...


class Outgoing(NamedTuple):
    """One message to send. At most one of `delay_ms`, `due_ms` and `local` is set."""

    topic: str
    body: bytes
    tag: str | None
    keys: str | None  # in their stored form: one text, separated by blanks
    properties: str | None  # in their stored form (values.properties_text)
    id: str
    delay_ms: int | None
    due_ms: int | None
    # A local time and its zone, which the broker converts by its own tzdata.
    local: tuple[str, str] | None = None
    # Fields of http_api.Message that most messages do not have.
    options: Mapping[str, Any] = MappingProxyType({})


def build_message(
    topic: str,
    body: Body,
    tag: str | None,
    keys: Keys | None,
    properties: Mapping[str, str] | None,
    message_id: str | None,
    after: After | None,
    at: At | None,
    zone: str | None = None,
    **options: Any,
) -> Outgoing:
    """Build a message from the arguments of `Timeball.send`, with a new id if none is given.

    `options`: fields of http_api.Message. Those that are None are left out. Raises InvalidMessage and InvalidDelay.
    """
    local = None if zone is None else _local_time(after, at, zone)
    delay_ms, due_ms = when(after, at) if local is None else (None, None)
    return Outgoing(
        topic,
        body_bytes(body),
        check_label("tag", tag),
        keys_text(keys),
        properties_text(properties),
        IDENTIFIERS.next_id() if message_id is None else check_label("message_id", message_id) or message_id,
        delay_ms,
        due_ms,
        local,
        {name: value for name, value in options.items() if value is not None},
    )


def _local_time(after: After | None, at: At | None, zone: str) -> tuple[str, str]:
    """Convert a local time and its zone to the two texts that the broker stores. Raises InvalidDelay."""
    if after is not None or not isinstance(at, str | datetime):
        raise InvalidDelay(f"zone={zone!r}: needs at=, a local time such as '2030-01-31T09:00'")
    return stored_local_time(local_due_ms(at, zone)[1])


def build_row_message(row: Mapping[str, Any], row_number: int, topic: str | None) -> Outgoing:
    """Build a message from a dict of `Timeball.send_many`, with a new id if it has none.

    `row_number` is the number of the row in the call, for error texts. `topic`: the topic of rows that name none.
    Raises InvalidMessage and InvalidDelay.
    """
    _check_names(row, row_number)
    after, at, zone = row.get("after"), row.get("at"), row.get("zone")
    local = None if zone is None else _local_time(after, at, zone)
    delay_ms, due_ms = when(after, at) if local is None else (None, None)
    row_topic, properties = row.get("topic", topic), row.get("properties")
    if not isinstance(row_topic, str):
        raise InvalidMessage(f"row {row_number}: topic is text; name it in the row, or as an argument")
    message_id = row.get("unique_key", row.get("message_id"))
    return Outgoing(
        row_topic,
        body_bytes(row.get("body", b"")),
        check_label("tag", row.get("tag")),
        keys_text(row.get("keys")),
        properties if isinstance(properties, str) else properties_text(properties),
        IDENTIFIERS.next_id() if message_id is None else check_label("message_id", message_id) or "",
        _single_time(row, "delay_ms", delay_ms),
        _single_time(row, "due_ms", due_ms),
        local,
    )


def _check_names(row: Mapping[str, Any], row_number: int) -> None:
    """Raise InvalidMessage for an unknown name of a dict, and InvalidDelay for a time that is None."""
    for name in row:
        if name not in ROW_NAMES:
            raise InvalidMessage(f"unknown column {name!r} of a row; {valid(str(name), ROW_NAMES)}")
    for name in TIME_NAMES:
        if name in row and row[name] is None:
            raise InvalidDelay(f"{name} of row {row_number} is None; leave it out to deliver at once")


def _single_time(row: Mapping[str, Any], name: str, value: int | None) -> int | None:
    """Choose between the row's `name` (delay_ms or due_ms) and `value`, the converted `after` or `at`.

    Raises InvalidDelay if both are given.
    """
    row_value: int | None = row.get(name)
    if row_value is not None and value is not None:
        raise InvalidDelay(f"a message with two due times: {name}={row_value} and {value}")
    return value if row_value is None else row_value


def body_bytes(body: Body) -> bytes:
    """Convert a body to bytes, a str as UTF-8. Raises InvalidMessage for any other type."""
    if isinstance(body, bytes):
        return body
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, (bytearray, memoryview)):
        return bytes(body)
    raise InvalidMessage(f"a body is bytes or str, not {type(body).__name__}; encode it first")


def is_arrow(rows: object) -> bool:
    """Check whether rows are columns of Arrow, by the name of their class's module: pyarrow may not be installed."""
    return type(rows).__module__.startswith("pyarrow")
