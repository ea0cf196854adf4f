"""Messages of a send request to rows, and the outcome to an answer. No I/O.

    application/json                        one message, or an array of messages
    application/x-ndjson                    one message per line
    application/vnd.apache.arrow.stream     columns of SEND_SCHEMA without `topic`, which the path names
    ce-specversion: 1.0                     a CloudEvent in binary mode, of any type: the body becomes the body of the
                                            message, and the attributes become its properties
    timeball-…, or another type             one message with this body; the headers contain its other fields

A body in JSON is given as text (`body`), as a JSON value (`json`, whose text is stored unchanged), or as `base64`. Due
times and delays are parsed by time_parsing.py, as in the Python client. A number without a unit is a due time in
milliseconds since 1970.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
import pyarrow as pa

from timeball.edges.http.codec import JSON, NDJSON, At, instant_text, refused, when
from timeball.edges.shared import arrow_ipc
from timeball.edges.shared.arrow_columns import SendColumns, check_bytes
from timeball.model import limits
from timeball.model.answers import SentState
from timeball.model.errors import InvalidDelay, InvalidMessage, OverLimit
from timeball.model.message import SEND_COLUMNS, SendBatch, SendRow
from timeball.model.rules import (
    TIMES,
    check_key,
    check_label,
    check_no_nulls,
    key_faults,
    keys_text,
    past_due,
    properties_text,
)

ARROW = "application/vnd.apache.arrow.stream"
# The limit on messages, because a thread converts them to columns, and it shares the interpreter with the event loop.
MESSAGES_MAX = 10_000
FEW = 256  # up to this number, messages are sent as rows, which costs a third of the conversion to columns

HEADER, PROPERTY_HEADER = "timeball-", "timeball-property-"
RAW_HEADERS = ("id", "key", "tag", "after", "at", "raw")
_OLD_HEADERS = {f"{HEADER}delay": f"{HEADER}after", f"{HEADER}deliver-at": f"{HEADER}at"}
_TYPE = re.compile(r"[!#$&^_.+a-z0-9-]+/[!#$&^_.+a-z0-9-]+")
# Types that a page of another site may send without a preflight request (CORS-safelisted ones of the fetch standard).
_OF_ANY_PAGE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")

_NAMES = ("topic", "body", "tag", "keys", "unique_key", "properties", "due_ms", "delay_ms")
_SCHEMA = pa.schema([(name, SEND_COLUMNS[name]) for name in _NAMES])


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message to send: exactly one of body, json and base64, and at most one of at and after."""

    body: str | None = None
    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    base64: bytes | None = None
    id: str | None = None
    key: str | None = None
    keys: list[str] = []
    tag: str | None = None
    properties: dict[str, str] = {}
    at: At | msgspec.UnsetType = msgspec.UNSET
    after: str | msgspec.UnsetType = msgspec.UNSET


class Sent(msgspec.Struct, omit_defaults=True):
    """The answer to an accepted message. Without `due`, the message is already in its queue.

    With an idempotency key, `outcome` is "created", or "exists" if the message was sent before. For a message that was
    sent before, `state` and `due` are its current state and due time. `past_ms` is the time by which `due` had passed
    when the message was accepted.
    """

    id: str
    seq: int
    durable: bool
    due: str | None = None
    due_ms: int | None = None
    outcome: str | None = None
    state: str | None = None
    past_ms: int = 0


class SentMany(msgspec.Struct):
    """The answers to many messages, in their order."""

    messages: list[Sent]


class SentRows(msgspec.Struct, omit_defaults=True):
    """The answer to columns: their rows have the sequence numbers from `first_seq` on, without gaps.

    `states` counts the rows that were sent before, by their current state. `past_rows` is the number of rows whose due
    time had passed when they were accepted. `past_ms` is the largest time by which a due time had passed.
    """

    first_seq: int
    rows: int
    durable: bool
    outcome: str | None = None
    states: dict[str, int] = {}
    past_rows: int = 0
    past_ms: int = 0


class Place(NamedTuple):
    """The id of a message and its time: due_ms or delay_ms, or neither.

    `is_relative` means that due_ms was computed from a delay, which cannot lie in the past.
    """

    message_id: str
    due_ms: int | None
    delay_ms: int | None
    is_relative: bool = False


class Sending(NamedTuple):
    """The messages of one request: a row for each, or columns of SEND_COLUMNS."""

    rows: SendBatch
    row_count: int
    size_bytes: int
    places: list[Place] | None  # None for columns, whose answer contains no ids
    is_one: bool = False  # the answer is one object and not a list


class IdSource:
    """Makes the ids of the messages in a request that have none. `id_of` receives the index of the message."""

    def id_of(self, at: int) -> str:
        """Make an id of 32 hexadecimal characters."""
        raise NotImplementedError


_MESSAGE = msgspec.json.Decoder(Message)
_MESSAGES = msgspec.json.Decoder(list[Message])


def read(topic: str, content_type: str, data: bytes, ids: IdSource, now_ms: int | None = None) -> Sending:
    """Decode the messages of a send. Raises InvalidMessage, InvalidDelay and OverLimit.

    With `now_ms`, delays may become due times counted from it. With None they stay delays, so that a repeated send has
    the same content.
    """
    if content_type == ARROW:
        return _arrow(topic, data)
    is_one = content_type == JSON and data.lstrip()[:1] != b"["
    try:
        if content_type == NDJSON:
            messages = _MESSAGE.decode_lines(data)
        else:
            messages = [_MESSAGE.decode(data)] if is_one else _MESSAGES.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise refused(error, Message) from error
    if not messages:
        raise InvalidMessage("no message: send at least one")
    if len(messages) > MESSAGES_MAX:
        raise OverLimit(
            f"{len(messages)} messages in one request; at most {MESSAGES_MAX}: send fewer at once"
        )
    return _sending(topic, messages, ids, now_ms, is_one=is_one)


def cloud_event(
    topic: str, headers: Mapping[str, str], data: bytes, ids: IdSource, now_ms: int | None = None
) -> Sending:
    """Decode the message of a CloudEvent in binary mode. Raises InvalidMessage and InvalidDelay.

    HTTP Protocol Binding for CloudEvents 1.0.2, section 3.1. The id of the event becomes the id of the message.
    """
    attributes = {name: unquote(value) for name, value in headers.items() if name.startswith("ce-")}
    if attributes["ce-specversion"] != "1.0":
        raise InvalidMessage(f"ce-specversion {attributes['ce-specversion'][:20]!r}: 1.0 is known")
    for name in ("ce-id", "ce-source", "ce-type"):
        if not attributes.get(name):
            raise InvalidMessage(f"{name} is missing: a CloudEvent has an id, a source and a type")
    message = _of_headers(headers, data, attributes["ce-id"], attributes)
    return _sending(topic, [message], ids, now_ms, is_one=True)


def is_raw(headers: Mapping[str, str]) -> bool:
    """True if the body of a send is the body of one message.

    This is the case if a header of Timeball is present, or if the content type is none of the types in the module
    docstring. Types that any web page may send are excluded: otherwise a browser on this machine could be made to send
    messages for another site.
    """
    if any(name.startswith(HEADER) for name in headers):
        return True
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return _TYPE.fullmatch(kind) is not None and kind not in (JSON, NDJSON, ARROW, *_OF_ANY_PAGE)


def raw(
    topic: str, headers: Mapping[str, str], data: bytes, ids: IdSource, now_ms: int | None = None
) -> Sending:
    """Build the message of a raw body and its headers. Raises InvalidMessage and InvalidDelay."""
    properties = {}
    for name, value in headers.items():
        if name.startswith(PROPERTY_HEADER):
            properties[unquote(name.removeprefix(PROPERTY_HEADER))] = unquote(value)
    if headers.get(f"{HEADER}raw", "true") != "true":
        raise InvalidMessage(f"{HEADER}raw: 'true', or leave it out")
    given = headers.get(f"{HEADER}id")
    message = _of_headers(headers, data, None if given is None else unquote(given), properties)
    return _sending(topic, [message], ids, now_ms, is_one=True)


def _check_names(headers: Mapping[str, str]) -> None:
    """Raise an error for an unknown header of Timeball. With a misspelled delay, the message would be sent at once."""
    for name in headers:
        if name in _OLD_HEADERS:
            raise InvalidDelay(f"header {name!r} is called {_OLD_HEADERS[name]!r}")
        is_ours = name.startswith(HEADER) and not name.startswith(PROPERTY_HEADER)
        if is_ours and name.removeprefix(HEADER) not in RAW_HEADERS:
            known = ", ".join(HEADER + one for one in (*RAW_HEADERS, "property-…"))
            raise InvalidMessage(f"header {name[:80]!r}; known are {known}")


def _of_headers(
    headers: Mapping[str, str], data: bytes, message_id: str | None, properties: dict[str, str]
) -> Message:
    """Build a message from headers that correspond to the fields of a JSON message."""
    _check_names(headers)
    key, tag = headers.get(f"{HEADER}key"), headers.get(f"{HEADER}tag")
    said = {**properties, "content-type": headers.get("content-type", "")}
    return Message(
        base64=data,
        id=message_id,
        key=None if key is None else unquote(key),
        tag=None if tag is None else unquote(tag),
        properties={name: value for name, value in said.items() if value},
        at=headers.get(f"{HEADER}at", msgspec.UNSET),
        after=headers.get(f"{HEADER}after", msgspec.UNSET),
    )


def sent(
    sending: Sending,
    first_seq: int,
    store_ms: int,
    keyed: tuple[str, list[SentState]] | None = None,
    *,
    durable: bool,
) -> Sent | SentMany | SentRows:
    """Build the answer to messages that are in the log from `first_seq` on.

    `keyed`: for a send with an idempotency key, its outcome and the states of messages that were sent before.
    """
    outcome, states = keyed or (None, ())
    if sending.places is None:
        counts = Counter(each.state for each in states)
        past = (0, 0) if states else _past_due(sending.rows, store_ms)
        return SentRows(first_seq, sending.row_count, durable, outcome, counts, *past)
    answers = []
    for at, (message_id, due_ms, delay_ms, is_relative) in enumerate(sending.places):
        state, past_ms = None, 0
        if states:
            state, due_ms = states[at].state, states[at].due_ms
        elif delay_ms is not None:
            due_ms = store_ms + delay_ms
        elif due_ms is not None and not is_relative:
            past_ms = max(0, store_ms - due_ms)
        text = None if due_ms is None else instant_text(due_ms)
        answers.append(Sent(message_id, first_seq + at, durable, text, due_ms, outcome, state, past_ms))
    return answers[0] if sending.is_one else SentMany(answers)


def _past_due(rows: SendBatch, store_ms: int) -> tuple[int, int]:
    """Compute `past_rows` and `past_ms` of columns that the broker has accepted."""
    if not isinstance(rows, pa.RecordBatch) or "due_ms" not in rows.schema.names:
        return 0, 0
    return past_due(rows.column("due_ms"), store_ms)


# ---- JSON -------------------------------------------------------------------------------------------------------


def _sending(
    topic: str, messages: Sequence[Message], ids: IdSource, now_ms: int | None, *, is_one: bool
) -> Sending:
    rows, places, size_bytes = [], [], 0
    for at, message in enumerate(messages):
        body, place = _body(at, message), _place(at, message, ids)
        properties = properties_text(message.properties)
        size_bytes += len(body) + len(properties or "")
        rows.append((body, check_label("tag", message.tag), _keys(at, message), properties))
        places.append(place)
    if now_ms is None or len(rows) > FEW:
        return Sending(_columns(topic, rows, places), len(rows), size_bytes, places, is_one)
    places = [
        place if place.delay_ms is None else Place(place.message_id, now_ms + place.delay_ms, None, True)
        for place in places
    ]
    few: list[SendRow] = [
        (topic, body, tag, keys, place.message_id, properties, None, None, None, None, None, None, place.due_ms, None)
        for (body, tag, keys, properties), place in zip(rows, places, strict=True)
    ]  # fmt: skip
    return Sending(few, len(few), size_bytes, places, is_one)


def _columns(
    topic: str,
    rows: Sequence[tuple[bytes, str | None, str | None, str | None]],
    places: Sequence[Place],
) -> pa.RecordBatch:
    values = [
        (topic, body, tag, keys, place.message_id, properties, place.due_ms, place.delay_ms)
        for (body, tag, keys, properties), place in zip(rows, places, strict=True)
    ]
    try:
        arrays = [
            pa.array(column, kind)
            for column, kind in zip(zip(*values, strict=True), _SCHEMA.types, strict=True)
        ]
    except (pa.ArrowException, UnicodeError, OverflowError) as error:
        raise InvalidMessage(f"not to be stored: {error}") from error
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def _place(at: int, message: Message, ids: IdSource) -> Place:
    if message.id == "":
        raise InvalidMessage(f"message {at}: id is empty; leave it out to be given one")
    return Place(check_label("id", message.id) or ids.id_of(at), *when(message.at, message.after))


def _keys(at: int, message: Message) -> str | None:
    if message.key is not None and message.keys:
        raise InvalidMessage(f"message {at}: key and keys; give one of them")
    return check_key(message.key) if message.key is not None else keys_text(message.keys)


def _body(at: int, message: Message) -> bytes:
    given = (message.body is not None) + bool(message.json) + (message.base64 is not None)
    if given != 1:
        raise InvalidMessage(f"message {at}: give one of body (text), json and base64; this has {given}")
    if message.body is not None:
        return message.body.encode("utf-8", "strict")
    return message.base64 if message.base64 is not None else bytes(message.json)


# ---- Arrow ------------------------------------------------------------------------------------------------------


def _arrow(topic: str, data: bytes) -> Sending:
    messages = arrow_ipc.messages(data)
    header, _ = next(messages, (memoryview(b""), memoryview(b"")))
    given = arrow_ipc.schema(header)
    if "topic" in given.names:
        raise InvalidMessage("column 'topic': the path names the topic; leave the column out")
    schema = given.append(pa.field("topic", pa.string()))
    columns, batches, rows = SendColumns(schema), [], 0
    for header, body in messages:
        batch = arrow_ipc.batch(header, body, given)
        # Check the number before using the rows: a column without values takes no bytes, so few bytes can claim many
        # rows.
        rows += batch.num_rows
        if rows > limits.ROWS_PER_REQUEST_MAX:
            raise OverLimit(
                f"more than {limits.ROWS_PER_REQUEST_MAX} rows in one request: send fewer at once"
            )
        # The columns need no further topic check, because the policy has already decided on the topic of the path.
        batches.append(columns.adopt(_with_topic(batch, topic, schema), None))
    if not batches:
        raise InvalidMessage("no record batch: send at least one row")
    whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    check_bytes(whole.nbytes)
    _check_keys(whole)
    check_no_nulls(dict(zip(whole.schema.names, whole.columns, strict=True)), TIMES)
    return Sending(whole, rows, whole.nbytes, None)


def _check_keys(rows: pa.RecordBatch) -> None:
    """Raise InvalidMessage for a text in the column `keys` that is not one key."""
    if "keys" in rows.schema.names and (wrong := key_faults(rows.column("keys"))).any():
        row = int(wrong.argmax())
        try:
            check_key(rows.column("keys")[row].as_py())
        except InvalidMessage as error:
            raise InvalidMessage(f"row {row}: {error}; send messages with several keys as JSON") from error


def _with_topic(batch: pa.RecordBatch, topic: str, schema: pa.Schema) -> pa.RecordBatch:
    topics = pa.repeat(pa.scalar(topic, pa.string()), batch.num_rows)
    try:
        return pa.RecordBatch.from_arrays([*batch.columns, topics], schema=schema)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidMessage(f"not a sound record batch: {error}") from error
