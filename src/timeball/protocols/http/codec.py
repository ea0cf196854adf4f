"""JSON to columns of a send, rows to JSON. No I/O.

    application/json        one message, or an array of them
    application/x-ndjson    one message a line
    ce-specversion: 1.0     a CloudEvent in binary mode, of any type: the body as it is, its attributes as properties

A body is given as text (`body`), as a JSON value (`json`, stored as its text stands), or as `base64`. Instants and
delays are read by instants.py, as those of the Python client are; a bare number is milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
import pyarrow as pa

from timeball import instants, limits
from timeball.errors import InvalidDelay, InvalidMessage, OutOfRange, OverLimit
from timeball.message import SEND_COLUMNS, decode_properties
from timeball.protocols.error_codes import Refused
from timeball.rules import keys_text, properties_text

JSON, NDJSON = "application/json", "application/x-ndjson"
# They become columns in a thread of their own, which shares the interpreter with the loop.
MESSAGES_MAX = 10_000

Span = int | str
_NAMES = ("topic", "body", "tag", "keys", "unique_key", "properties", "due_ms", "delay_ms")
_SCHEMA = pa.schema([(name, SEND_COLUMNS[name]) for name in _NAMES])
_SCHEMA_WITHOUT_DELAY = pa.schema(list(_SCHEMA)[:-1])
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CHARSET = re.compile(r';\s*charset="?utf-?8"?\s*', re.IGNORECASE)


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message to send: one of body, json and base64; at most one of deliver_at and delay."""

    body: str | None = None
    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    base64: bytes | None = None
    id: str | None = None
    key: str | None = None
    keys: list[str] = []
    tag: str | None = None
    properties: dict[str, str] = {}
    deliver_at: Span | None = None
    delay: Span | None = None


class Sent(msgspec.Struct, omit_defaults=True):
    """The answer to a message that was taken. Without `due` it is in its queue already."""

    id: str
    seq: int
    durable: bool
    due: str | None = None
    due_ms: int | None = None


class SentMany(msgspec.Struct):
    """The answers to many messages, in their order."""

    messages: list[Sent]


class Leased(msgspec.Struct, omit_defaults=True):
    """A message handed out to a group, with the receipt to answer it by. `base64`: a body that is no UTF-8."""

    receipt: str
    topic: str
    attempt: int
    seq: int
    queue: int
    offset: int
    released: str
    id: str | None = None
    body: str | None = None
    base64: bytes | None = None
    tag: str | None = None
    keys: list[str] = []
    properties: dict[str, str] = {}
    due: str | None = None
    lateness_ms: int | None = None


class LeasedMany(msgspec.Struct):
    """What a receive got, which may be nothing."""

    messages: list[Leased]


class Answering(msgspec.Struct, forbid_unknown_fields=True):
    """Receipts to acknowledge."""

    receipts: list[str]


class GivingBack(msgspec.Struct, forbid_unknown_fields=True):
    """Receipts of attempts that failed. Without `delay` the group's retry policy says when they come again."""

    receipts: list[str]
    delay: Span | None = None


class Extending(msgspec.Struct, forbid_unknown_fields=True):
    """Receipts whose leases shall end so far from now."""

    receipts: list[str]
    lease: Span


class Answered(msgspec.Struct):
    """A receipt, good from now on, and whether its lease had not ended before."""

    receipt: str
    valid: bool


class AnsweredMany(msgspec.Struct):
    """The outcomes for these receipts, in their order."""

    results: list[Answered]


class Moving(msgspec.Struct, forbid_unknown_fields=True):
    """Another instant for a scheduled message: exactly one of these."""

    deliver_at: Span | None = None
    delay: Span | None = None


class Columns(NamedTuple):
    """Messages as a batch of SEND_COLUMNS; `is_one`: the answer is one object and no list."""

    batch: pa.RecordBatch
    is_one: bool


_MESSAGE = msgspec.json.Decoder(Message)
_MESSAGES = msgspec.json.Decoder(list[Message])
encode = msgspec.json.Encoder().encode


def check_type(content_type: str, *known: str) -> str:
    """Return the media type of a request's body; raise Refused (415) for one that is not known."""
    name, semicolon, rest = content_type.partition(";")
    name = name.strip().lower()
    if name not in known or (semicolon and not _CHARSET.fullmatch(semicolon + rest)):
        raise Refused(415, f"content-type {content_type[:80]!r}: send {' or '.join(known)}")
    return name


def decode(kind: type[Any], data: bytes) -> Any:
    """Return a request's body as a struct of this type; raise InvalidMessage."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidMessage(f"body: {error}") from error


def columns(topic: str, content_type: str, data: bytes, ids: IdSource, now_ms: int | None = None) -> Columns:
    """Return the messages of a send; raise InvalidMessage, InvalidDelay, OverLimit.

    `now_ms`: delays become instants counted from it; None: they stay delays, alike in a send that is repeated.
    """
    is_one = content_type == JSON and data.lstrip()[:1] != b"["
    try:
        if content_type == NDJSON:
            messages = _MESSAGE.decode_lines(data)
        else:
            messages = [_MESSAGE.decode(data)] if is_one else _MESSAGES.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidMessage(f"body: {error}") from error
    if not messages:
        raise InvalidMessage("no message: send at least one")
    if len(messages) > MESSAGES_MAX:
        raise OverLimit(
            f"{len(messages)} messages in one request; at most {MESSAGES_MAX}: send fewer at once"
        )
    return _columns(topic, messages, ids, now_ms, is_one=is_one)


def _columns(
    topic: str, messages: Sequence[Message], ids: IdSource, now_ms: int | None, *, is_one: bool
) -> Columns:
    rows = [_row(at, topic, message, ids) for at, message in enumerate(messages)]
    schema, count = _SCHEMA, len(rows)
    if now_ms is not None:
        # Few messages without a delay go row by row, which costs a third of the way of columns.
        rows = [(*row[:6], row[6] if row[7] is None else now_ms + row[7]) for row in rows]
        schema = _SCHEMA_WITHOUT_DELAY
    try:
        arrays = [
            # An array costs a microsecond or ten for one value, too: most columns of most sends are empty.
            pa.nulls(count, kind) if values.count(None) == count else pa.array(values, kind)
            for values, kind in zip(zip(*rows, strict=True), schema.types, strict=True)
        ]
    except (pa.ArrowException, UnicodeError, OverflowError) as error:
        raise InvalidMessage(f"not to be stored: {error}") from error
    return Columns(pa.RecordBatch.from_arrays(arrays, schema=schema), is_one)


def cloud_event(
    topic: str, headers: Mapping[str, str], data: bytes, ids: IdSource, now_ms: int | None = None
) -> Columns:
    """Return the message of a CloudEvent in binary mode; raise InvalidMessage, InvalidDelay.

    HTTP Protocol Binding for CloudEvents 1.0.2, section 3.1. Its id becomes that of the message.
    """
    attributes = {name: unquote(value) for name, value in headers.items() if name.startswith("ce-")}
    if attributes["ce-specversion"] != "1.0":
        raise InvalidMessage(f"ce-specversion {attributes['ce-specversion'][:20]!r}: 1.0 is known")
    for name in ("ce-id", "ce-source", "ce-type"):
        if not attributes.get(name):
            raise InvalidMessage(f"{name} is missing: a CloudEvent has an id, a source and a type")
    properties = {**attributes, "content-type": headers.get("content-type", "")}
    message = Message(
        base64=data,
        id=attributes["ce-id"],
        key=headers.get("timeball-key"),
        tag=headers.get("timeball-tag"),
        properties={name: value for name, value in properties.items() if value},
        deliver_at=_number_or_text(headers.get("timeball-deliver-at")),
        delay=headers.get("timeball-delay"),
    )
    return _columns(topic, [message], ids, now_ms, is_one=True)


def _number_or_text(text: str | None) -> Span | None:
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) < 20
    return int(text) if is_number and text is not None else text


class IdSource:
    """Gives a message its id where it has none: the nth of a request."""

    def id_of(self, at: int) -> str:
        """Return an id of 32 hexadecimal characters."""
        raise NotImplementedError


def _row(at: int, topic: str, message: Message, ids: IdSource) -> tuple[Any, ...]:
    body = _body(at, message)
    due_ms, delay_ms = when(message.deliver_at, message.delay)
    if message.id == "":
        raise InvalidMessage(f"message {at}: id is empty; leave it out to be given one")
    if message.key is not None and message.keys:
        raise InvalidMessage(f"message {at}: key and keys; give one of them")
    keys = keys_text([message.key] if message.key is not None else message.keys) or None
    properties = properties_text(message.properties)
    return topic, body, message.tag, keys, message.id or ids.id_of(at), properties, due_ms, delay_ms


def _body(at: int, message: Message) -> bytes:
    given = (message.body is not None) + bool(message.json) + (message.base64 is not None)
    if given != 1:
        raise InvalidMessage(f"message {at}: give one of body (text), json and base64; this has {given}")
    if message.body is not None:
        return message.body.encode("utf-8", "strict")
    return message.base64 if message.base64 is not None else bytes(message.json)


# ---- instants ---------------------------------------------------------------------------------------------------


def when(deliver_at: Span | None, delay: Span | None) -> tuple[int | None, int | None]:
    """Return (due_ms, delay_ms), of which at most one is there; raise InvalidDelay."""
    if deliver_at is not None and delay is not None:
        raise InvalidDelay("deliver_at and delay name two instants; give one of them")
    return (
        None if deliver_at is None else instants.due_ms(deliver_at),
        None if delay is None else span_ms(delay),
    )


def span_ms(span: Span) -> int:
    """Return the milliseconds of "30m", "PT30M", or of a number of them; raise InvalidDelay."""
    if isinstance(span, str) and not (span.isascii() and span.isdecimal()):
        return instants.delay_ms(span)
    try:
        return instants.delay_ms(timedelta(milliseconds=int(span)))
    except (ValueError, OverflowError) as error:
        raise InvalidDelay("a number of milliseconds beyond what can be waited for") from error


def instant_text(instant_ms: int) -> str:
    """Return an instant as RFC 3339 in UTC, with milliseconds."""
    text = (_EPOCH + timedelta(milliseconds=instant_ms)).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"


def lease_ms(span: Span) -> int:
    """Return the milliseconds of a lease; raise OutOfRange for one that no group may have."""
    found = span_ms(span)
    if not limits.SECOND_MS <= found <= limits.INVISIBLE_MS_MAX:
        raise OutOfRange(f"a lease of {found} ms: {limits.SECOND_MS} to {limits.INVISIBLE_MS_MAX} ms")
    return found


# ---- answers ----------------------------------------------------------------------------------------------------


def sent(messages: Columns, first_seq: int, store_ms: int, *, durable: bool) -> Sent | SentMany:
    """Return the answer to messages that stand in the log from `first_seq` on."""
    batch = messages.batch
    ids, due = (batch.column(name).to_pylist() for name in ("unique_key", "due_ms"))
    delays: list[int | None] = (
        batch.column("delay_ms").to_pylist() if "delay_ms" in batch.schema.names else [None] * len(ids)
    )
    answers = []
    for at, message_id in enumerate(ids):
        delay_ms = delays[at]
        due_ms = due[at] if delay_ms is None else store_ms + delay_ms
        text = None if due_ms is None else instant_text(due_ms)
        answers.append(Sent(message_id, first_seq + at, durable, text, due_ms))
    return answers[0] if messages.is_one else SentMany(answers)


def leased(rows: pa.RecordBatch, topic: str, handles: Sequence[str]) -> LeasedMany:
    """Return what was handed out, under the topic that was asked for: some of it may come from a retry topic."""
    names = (
        "seq", "queue_id", "queue_offset", "store_ms", "reconsume_times", "unique_key", "body", "tag", "keys",
        "properties", "due_ms",
    )  # fmt: skip
    values = zip(*(rows.column(name).to_pylist() for name in names), strict=True)
    found = []
    for handle, row in zip(handles, values, strict=True):
        seq, queue, offset, store_ms, times, unique_key, body, tag, keys, properties, due_ms = row
        text, raw = _shown(body or b"")
        one = Leased(
            handle, topic, 1 + (times or 0), seq, queue, offset, instant_text(store_ms), unique_key, text, raw,
            tag, (keys or "").split(), decode_properties(properties or ""),
        )  # fmt: skip
        if due_ms is not None:
            one.due, one.lateness_ms = instant_text(due_ms), store_ms - due_ms
        found.append(one)
    return LeasedMany(found)


def _shown(body: bytes) -> tuple[str | None, bytes | None]:
    try:
        return body.decode(), None
    except UnicodeDecodeError:
        return None, body
