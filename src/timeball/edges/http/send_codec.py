"""Decodes the messages of a send request, and builds its answer. No I/O.

    application/json                        one message, or an array of messages
    application/x-ndjson                    one message per line
    application/vnd.apache.arrow.stream     columns of SEND_SCHEMA without `topic`, which the path names
    ce-specversion: 1.0                     a CloudEvent in binary mode, of any type: the body becomes the body of the
                                            message, and the attributes become its properties
    timeball-…, or another type             a raw body: it is the body of one message, whose other fields are in headers

A body in JSON is given as text (`body`), as a JSON value (`json`, whose text is stored unchanged), or as `base64`. Due
times and delays are parsed by time_parsing.py, as in the Python client. A number without a unit is a due time in
milliseconds since 1970. A local time and its zone become a due time and the property `LOCAL_TIME`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, cast, get_args
from urllib.parse import unquote

import msgspec
import pyarrow as pa
from msgspec import UNSET

from timeball.edges.http.codec import JSON, NDJSON, decoding_error, due_and_delay_ms, format_time
from timeball.edges.shared import arrow_ipc
from timeball.edges.shared.arrow_ipc import SendColumns, check_bytes
from timeball.edges.shared.error_codes import Refused
from timeball.model import limits, time_parsing
from timeball.model.answers import KEPT, SentState, UniqueMessage
from timeball.model.errors import UNDECODABLE, InvalidDelay, InvalidMessage, OverLimit
from timeball.model.http_api import Message, Replaced, Sent, SentMany
from timeball.model.message import SEND_COLUMNS, SEND_NAMES, SendBatch, SendRow, send_row
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
from timeball.model.send_options import (
    EXPIRY_NAMES,
    OnExpiry,
    OnPending,
    Spread,
    UniqueKey,
    check_expiry,
    even_offset_ms,
    expiry_properties,
    last_offset_ms,
    unique_key,
    with_unique_key,
)
from timeball.model.time_parsing import LOCAL_TIME, local_due_ms
from timeball.model.values import encode_properties

ARROW = "application/vnd.apache.arrow.stream"
# A thread converts the messages to columns. The limit exists because it shares the interpreter with the event loop.
MESSAGES_MAX = 10_000
# up to this number, messages are passed on as rows, which costs a third of the conversion to columns
SMALL_BATCH_ROWS = 256

HEADER, PROPERTY_HEADER = "timeball-", "timeball-property-"
RAW_HEADERS = (
    "id", "key", "tag", "after", "at", "zone", "unique-key", "on-pending", "expires-at", "expires-in", "on-expiry",
    "window", "spread", "raw",
)  # fmt: skip
_RENAMED_HEADERS = {f"{HEADER}delay": f"{HEADER}after", f"{HEADER}deliver-at": f"{HEADER}at"}
_TYPE = re.compile(r"[!#$&^_.+a-z0-9-]+/[!#$&^_.+a-z0-9-]+")
# media types that a page of another site may send without a preflight request (CORS-safelisted by the Fetch standard)
_TYPES_WITHOUT_PREFLIGHT = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")

_DUE_MS = SEND_NAMES.index("due_ms")
_NAMES = ("topic", "body", "tag", "keys", "unique_key", "properties", "due_ms", "delay_ms")
_SCHEMA = pa.schema([(name, SEND_COLUMNS[name]) for name in _NAMES])


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


class IdAndTime(NamedTuple):
    """The id of a message, and its due time or delay. Both are None for a message that is due at once.

    `is_relative` means that `due_ms` was computed from a delay, so it is never in the past.
    """

    message_id: str
    due_ms: int | None
    delay_ms: int | None
    is_relative: bool = False


class DecodedSend(NamedTuple):
    """The decoded messages of one request, as a list of rows or as columns of SEND_COLUMNS."""

    rows: SendBatch
    row_count: int
    size_bytes: int
    ids_and_times: list[IdAndTime] | None  # None for Arrow, whose answer contains no ids
    is_single: bool = False  # the answer is a single object, and not a list
    unique: UniqueKey | None = None  # of the only message
    # The delivery windows with the spread `level` in ms, by the index of their message.
    level_windows_ms: Mapping[int, int] = MappingProxyType({})


class IdSource:
    """Makes ids for the messages of a request that have no id. `index` is the index of the message in the request."""

    def id_of(self, index: int) -> str:
        """Make an id of 32 hexadecimal characters."""
        raise NotImplementedError


_MESSAGE = msgspec.json.Decoder(Message)
_MESSAGES = msgspec.json.Decoder(list[Message])


def decode_messages(
    topic: str,
    content_type: str,
    data: bytes,
    ids: IdSource,
    now_ms: int | None = None,
    keeps_delays: bool = False,
    *,
    may_use_rows: bool = True,
) -> DecodedSend:
    """Decode the messages of a send. Raises InvalidMessage, InvalidDelay and Refused (413).

    `ids` makes the missing ids. The messages become rows if `may_use_rows`, `now_ms` is given, and they are at most
    SMALL_BATCH_ROWS, else columns. In rows, delays become due times that are counted from `now_ms`. With
    `keeps_delays`, delays stay delays, so that a repeated send has the same content: messages with a delay then become
    columns. The other `decode_…` functions have the same parameters.
    """
    if content_type == ARROW:
        try:
            return _decode_arrow(topic, data)
        except OverLimit as error:  # of its rows or bytes: the same request can never succeed
            raise Refused(413, str(error)) from error
    is_single = content_type == JSON and data.lstrip()[:1] != b"["
    try:
        # Only a body with as many braces can have too many messages. Braces within messages count, too.
        if not is_single and data.count(b"{") > MESSAGES_MAX:
            _check_message_count(data, is_ndjson=content_type == NDJSON)
        if content_type == NDJSON:
            messages = _MESSAGE.decode_lines(data)
        else:
            messages = [_MESSAGE.decode(data)] if is_single else _MESSAGES.decode(data)
    except UNDECODABLE as error:
        raise decoding_error(error, Message) from error
    if not messages:
        raise InvalidMessage("no message: send at least one")
    return _convert_messages(
        topic, messages, ids, now_ms, keeps_delays, is_single=is_single, may_use_rows=may_use_rows
    )


def _check_message_count(data: bytes, *, is_ndjson: bool) -> None:
    """Raise Refused (413) for more than MESSAGES_MAX messages, before any of them is decoded.

    Decoding keeps the interpreter's lock, so all other threads wait: seconds for 8 MiB of `{}`. This pass skips the
    fields of each message, and ends at the first message beyond the limit. Raises the errors of msgspec.
    """
    numbers = iter(range(MESSAGES_MAX))

    class Counted(msgspec.Struct, gc=False):
        def __post_init__(self) -> None:
            if next(numbers, None) is None:
                raise Refused(413, f"more than {MESSAGES_MAX} messages in one request: send fewer at once")

    if is_ndjson:
        msgspec.json.Decoder(Counted).decode_lines(data)
    else:
        msgspec.json.decode(data, type=list[Counted])


def decode_cloud_event(
    topic: str,
    headers: Mapping[str, str],
    data: bytes,
    ids: IdSource,
    now_ms: int | None = None,
    keeps_delays: bool = False,
    *,
    may_use_rows: bool = True,
) -> DecodedSend:
    """Decode the message of a CloudEvent in binary mode. Raises InvalidMessage and InvalidDelay.

    HTTP Protocol Binding for CloudEvents 1.0.2, section 3.1. The id of the event becomes the id of the message.
    """
    attributes = {name: unquote(value) for name, value in headers.items() if name.startswith("ce-")}
    if attributes["ce-specversion"] != "1.0":
        raise InvalidMessage(f"ce-specversion {attributes['ce-specversion'][:20]!r}: 1.0 is known")
    for name in ("ce-id", "ce-source", "ce-type"):
        if not attributes.get(name):
            raise InvalidMessage(f"{name} is missing: a CloudEvent has an id, a source and a type")
    # One of two values of an id or an attribute would be lost.
    if f"{HEADER}id" in headers:
        raise InvalidMessage(f"header '{HEADER}id': the id of a CloudEvent is its ce-id")
    properties = _properties_from_headers(headers)
    for name in attributes.keys() & properties.keys():
        raise InvalidMessage(
            f"header '{PROPERTY_HEADER}{name[:80]}': also the attribute {name[:80]!r} of the CloudEvent"
        )
    message = _message_from_headers(headers, data, attributes["ce-id"], {**attributes, **properties})
    return _convert_messages(
        topic, [message], ids, now_ms, keeps_delays, is_single=True, may_use_rows=may_use_rows
    )


def is_raw(headers: Mapping[str, str]) -> bool:
    """True if the body of a send is the body of one message.

    This is the case if a header `timeball-…` is present, or if the content type is not JSON, NDJSON or Arrow. Types
    that any web page may send are excluded: otherwise a page of another site could make a browser send messages.
    """
    for name in headers:  # a generator would cost more than the comparisons
        if name.startswith(HEADER):
            return True
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    return _TYPE.fullmatch(media_type) is not None and media_type not in (
        JSON,
        NDJSON,
        ARROW,
        *_TYPES_WITHOUT_PREFLIGHT,
    )


def decode_raw(
    topic: str,
    headers: Mapping[str, str],
    data: bytes,
    ids: IdSource,
    now_ms: int | None = None,
    keeps_delays: bool = False,
    *,
    may_use_rows: bool = True,
) -> DecodedSend:
    """Decode the message of a raw body and its headers. Raises InvalidMessage and InvalidDelay."""
    if headers.get(f"{HEADER}raw", "true") != "true":
        raise InvalidMessage(f"{HEADER}raw: 'true', or leave it out")
    quoted_id = headers.get(f"{HEADER}id")
    message = _message_from_headers(
        headers,
        data,
        None if quoted_id is None else unquote(quoted_id),
        _properties_from_headers(headers),
    )
    return _convert_messages(
        topic, [message], ids, now_ms, keeps_delays, is_single=True, may_use_rows=may_use_rows
    )


def _properties_from_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Read the headers `timeball-property-NAME` as properties by name."""
    return {
        unquote(name.removeprefix(PROPERTY_HEADER)): unquote(value)
        for name, value in headers.items()
        if name.startswith(PROPERTY_HEADER)
    }


def _check_header_names(headers: Mapping[str, str]) -> None:
    """Raise InvalidMessage for an unknown header `timeball-…`, and InvalidDelay for a header with an old name.

    If a misspelled delay were ignored, the message would be delivered at once.
    """
    for name in headers:
        if name in _RENAMED_HEADERS:
            raise InvalidDelay(f"header {name!r} is called {_RENAMED_HEADERS[name]!r}")
        is_field_header = name.startswith(HEADER) and not name.startswith(PROPERTY_HEADER)
        if is_field_header and name.removeprefix(HEADER) not in RAW_HEADERS:
            known = ", ".join(HEADER + known_name for known_name in (*RAW_HEADERS, "property-…"))
            raise InvalidMessage(f"header {name[:80]!r}; known are {known}")


def _message_from_headers(
    headers: Mapping[str, str], data: bytes, message_id: str | None, properties: dict[str, str]
) -> Message:
    """Build a message from its body `data`, and from the headers that correspond to the fields of a JSON message.

    Raises InvalidMessage and InvalidDelay for an unknown or old name of a header. The values are checked later.
    """
    _check_header_names(headers)
    key, tag = headers.get(f"{HEADER}key"), headers.get(f"{HEADER}tag")
    unique_key = headers.get(f"{HEADER}unique-key")
    all_properties = {**properties, "content-type": headers.get("content-type", "")}
    return Message(
        base64=data,
        id=message_id,
        key=None if key is None else unquote(key),
        tag=None if tag is None else unquote(tag),
        properties={name: value for name, value in all_properties.items() if value},
        at=headers.get(f"{HEADER}at", msgspec.UNSET),
        after=headers.get(f"{HEADER}after", msgspec.UNSET),
        zone=headers.get(f"{HEADER}zone", msgspec.UNSET),
        unique_key=None if unique_key is None else unquote(unique_key),
        # `unique_key` checks `on_pending`, and `expiry_properties` checks `on_expiry`.
        on_pending=cast(OnPending | None, headers.get(f"{HEADER}on-pending")),
        on_expiry=cast(OnExpiry | None, headers.get(f"{HEADER}on-expiry")),
        expires_at=headers.get(f"{HEADER}expires-at", msgspec.UNSET),
        expires_in=headers.get(f"{HEADER}expires-in", msgspec.UNSET),
        window=headers.get(f"{HEADER}window", msgspec.UNSET),
        spread=cast(Spread | None, headers.get(f"{HEADER}spread")),  # `_parse_window` checks it
    )


def build_answer(
    sending: DecodedSend,
    first_seq: int,
    store_ms: int,
    repeated: tuple[str, list[SentState]] | None = None,
    *,
    durable: bool,
    pending: UniqueMessage | None = None,
) -> Sent | SentMany | SentRows:
    """Build the answer to messages that are in the log from `first_seq` on, stored at `store_ms`.

    `repeated` is only given for a send with an idempotency key or a unique key: the outcome (`created`, `exists`, …),
    and the current states of messages that were sent before. `pending` is the message that a send with a unique key
    has kept or replaced. `durable`: the messages were synced to the disk.
    """
    outcome, states = repeated or (None, ())
    if sending.ids_and_times is None:
        counts = Counter(sent_state.state for sent_state in states)
        past_due_counts = (0, 0) if states else _count_past_due(sending.rows, store_ms)
        return SentRows(first_seq, sending.row_count, durable, outcome, counts, *past_due_counts)
    answers = []
    for index, (message_id, due_ms, delay_ms, is_relative) in enumerate(sending.ids_and_times):
        state, past_ms = None, 0
        if states:
            state, due_ms = states[index].state, states[index].due_ms
        elif delay_ms is not None:
            due_ms = store_ms + delay_ms
        elif due_ms is not None and not is_relative:
            past_ms = max(0, store_ms - due_ms)
        due_text = None if due_ms is None else format_time(due_ms)
        answers.append(
            Sent(message_id, first_seq + index, durable, due_text, due_ms, outcome, state, past_ms)
        )
    if pending is not None:
        _add_pending(answers[0], pending)
    if sending.is_single:
        answers[0].store_ms = store_ms
        return answers[0]
    return SentMany(answers, store_ms)


def _add_pending(sent: Sent, pending: UniqueMessage) -> None:
    """Add the pending message with the same unique key to an answer, as the kept or as the replaced message."""
    due = format_time(pending.due_ms)
    if sent.outcome == KEPT:
        sent.id, sent.due, sent.due_ms, sent.past_ms = pending.id, due, pending.due_ms, 0
    else:
        sent.replaced = Replaced(pending.id, pending.seq, due, pending.due_ms)


def _count_past_due(rows: SendBatch, store_ms: int) -> tuple[int, int]:
    """Compute `past_rows` and `past_ms` (see SentRows) for columns that the broker has accepted at `store_ms`."""
    if not isinstance(rows, pa.RecordBatch) or "due_ms" not in rows.schema.names:
        return 0, 0
    return past_due(rows.column("due_ms"), store_ms)


# ---- JSON -------------------------------------------------------------------------------------------------------


def _convert_messages(
    topic: str,
    messages: Sequence[Message],
    ids: IdSource,
    now_ms: int | None,
    keeps_delays: bool,
    *,
    is_single: bool,
    may_use_rows: bool,
) -> DecodedSend:
    """Check decoded messages, and convert them to rows or columns (see `decode_messages`).

    Raises InvalidMessage and InvalidDelay.
    """
    uses_rows = may_use_rows and now_ms is not None and len(messages) <= SMALL_BATCH_ROWS
    if keeps_delays and uses_rows:
        uses_rows = all(message.after is msgspec.UNSET for message in messages)
    # body, tag, keys and properties of each message
    column_values: list[tuple[bytes, str | None, str | None, str | None]] = []
    send_rows: list[SendRow] = []
    ids_and_times, size_bytes = list[IdAndTime](), 0
    unique: UniqueKey | None = None
    level_windows_ms: dict[int, int] = {}
    expiry_now_ms = None if keeps_delays else now_ms
    for index, message in enumerate(messages):
        body, identity = _extract_body(index, message), _check_id_and_time(index, message, ids)
        # `latest` has the last time at which the message may be due: the end of its window.
        properties, latest = properties_text(_collect_properties(message)), identity
        if message.window is not UNSET or message.spread is not None:  # a delivery window
            window_ms = _parse_window(message, identity)
            latest = _with_offset(identity, last_offset_ms(window_ms))
            if message.spread == "level":
                level_windows_ms[index] = window_ms  # the broker chooses the due time later
            else:
                identity = _with_offset(identity, even_offset_ms(identity.message_id, window_ms))
        if (
            message.expires_at is not UNSET
            or message.expires_in is not UNSET
            or message.on_expiry is not None
        ):
            properties = (properties or "") + _encode_expiry(message, latest, expiry_now_ms)
        elif not EXPIRY_NAMES.isdisjoint(message.properties):
            check_expiry(message.properties, latest.due_ms)
        size_bytes += len(body) + len(properties or "")
        tag = None if message.tag is None else check_label("tag", message.tag)
        keys = _join_keys(index, message) if message.key is not None or message.keys else None
        # A message with a unique key is alone in its request.
        if message.unique_key is not None or message.on_pending is not None:
            unique = _check_unique_key(message, len(messages))
            keys = with_unique_key(keys, unique)
        if now_ms is None or not uses_rows:
            column_values.append((body, tag, keys, properties))
        else:  # a row has a due time and no delay
            if identity.delay_ms is not None:
                identity = IdAndTime(identity.message_id, now_ms + identity.delay_ms, None, True)
            send_rows.append(
                send_row(
                    topic=topic, body=body, tag=tag, keys=keys, unique_key=identity.message_id,
                    properties=properties, due_ms=identity.due_ms,
                )
            )  # fmt: skip
        ids_and_times.append(identity)
    columns = _to_columns(topic, column_values, ids_and_times) if column_values else None
    return DecodedSend(
        send_rows if columns is None else columns, len(messages), size_bytes, ids_and_times, is_single, unique,
        level_windows_ms,
    )  # fmt: skip


def _to_columns(
    topic: str,
    column_values: Sequence[tuple[bytes, str | None, str | None, str | None]],
    ids_and_times: Sequence[IdAndTime],
) -> pa.RecordBatch:
    """Convert the values of messages to a batch of _SCHEMA. Raises InvalidMessage.

    `column_values`: body, tag, keys and properties of each message.
    """
    rows_of_values = [
        (topic, body, tag, keys, identity.message_id, properties, identity.due_ms, identity.delay_ms)
        for (body, tag, keys, properties), identity in zip(column_values, ids_and_times, strict=True)
    ]
    try:
        arrays = [
            pa.array(column, type_)
            for column, type_ in zip(zip(*rows_of_values, strict=True), _SCHEMA.types, strict=True)
        ]
    except (pa.ArrowException, UnicodeError, OverflowError) as error:
        raise InvalidMessage(f"not to be stored: {error}") from error
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def _check_id_and_time(index: int, message: Message, ids: IdSource) -> IdAndTime:
    """Check the id and the time of a message. A message without an id gets one from `ids`.

    `index` is the position in the request. Raises InvalidMessage and InvalidDelay.
    """
    if message.id == "":
        raise InvalidMessage(f"message {index}: id is empty; leave it out, and the broker generates one")
    message_id = ids.id_of(index) if message.id is None else message.id
    check_label("id", message.id)
    if message.zone is not msgspec.UNSET:
        return IdAndTime(message_id, _convert_local_time(message)[0], None)
    return IdAndTime(message_id, *due_and_delay_ms(message.at, message.after))


def _convert_local_time(message: Message) -> tuple[int, str]:
    """Convert the local time of a message with a zone to (due_ms, value of the property LOCAL_TIME).

    Raises InvalidDelay.
    """
    at, zone = message.at, message.zone
    assert zone is not msgspec.UNSET
    if not isinstance(at, str) or message.after is not msgspec.UNSET:
        raise InvalidDelay(f"zone={zone[:64]!r}: needs at, a local time such as '2030-01-31T09:00'")
    return local_due_ms(at, zone)


def _collect_properties(message: Message) -> dict[str, str]:
    """Collect the properties of a message, and add LOCAL_TIME if it has a zone.

    Raises InvalidMessage if the message has a property LOCAL_TIME, and InvalidDelay.
    """
    if LOCAL_TIME in message.properties:
        raise InvalidMessage(f"property {LOCAL_TIME!r}: the broker sets it; give at and zone instead")
    if message.zone is msgspec.UNSET:
        return message.properties
    return {**message.properties, LOCAL_TIME: _convert_local_time(message)[1]}


def _join_keys(index: int, message: Message) -> str | None:
    """Check the key or keys of a message, and join them to the text that the log stores. Raises InvalidMessage."""
    if message.key is not None and message.keys:
        raise InvalidMessage(f"message {index}: key and keys; give one of them")
    return check_key(message.key) if message.key is not None else keys_text(message.keys)


def _check_unique_key(message: Message, count: int) -> UniqueKey:
    """Check the unique key of a message, which is one of `count` in its request. Raises InvalidMessage."""
    if message.unique_key is None:
        raise InvalidMessage("on_pending without unique_key: give both")
    if count > 1:
        raise InvalidMessage(f"{count} messages in a request, and one has a unique key: send it alone")
    return unique_key(message.unique_key, message.on_pending)


def _parse_window(message: Message, identity: IdAndTime) -> int:
    """Check the delivery window of a message, and return its length in ms. Raises InvalidDelay."""
    if message.window is UNSET:
        raise InvalidDelay("spread without window: give both")
    if identity.due_ms is None and identity.delay_ms is None:
        raise InvalidDelay("a window begins at a time: give at or after, too")
    if message.zone is not UNSET:
        # After an update of tzdata the message would be due at the begin of its window.
        raise InvalidDelay("a window and a zone: give at with its offset from UTC")
    if message.spread not in (None, *get_args(Spread)):
        raise InvalidDelay(f"spread {message.spread!r}: {', '.join(get_args(Spread))}")
    window_ms = time_parsing.delay_ms(message.window, "window")
    if window_ms > limits.DELAY_MS_MAX:
        raise InvalidDelay(f"window {message.window!r}: at most ten years")
    return window_ms


def _with_offset(identity: IdAndTime, offset_ms: int) -> IdAndTime:
    """Add an offset to the due time or delay."""
    if identity.due_ms is not None:
        return identity._replace(due_ms=identity.due_ms + offset_ms)
    return identity._replace(delay_ms=(identity.delay_ms or 0) + offset_ms)


def begins_of_windows(decoded: DecodedSend, now_ms: int) -> dict[int, int]:
    """Compute when the level windows of a send begin, in ms since 1970, by the index of their message."""
    begins_ms = {}
    for index in decoded.level_windows_ms:
        identity = (decoded.ids_and_times or [])[index]
        begins_ms[index] = now_ms + (identity.delay_ms or 0) if identity.due_ms is None else identity.due_ms
    return begins_ms


def with_due_times(decoded: DecodedSend, due_times_ms: Mapping[int, int]) -> DecodedSend:
    """Replace the due times of messages of a JSON send. `due_times_ms` has new due times, by the index of the message.

    A message that is not in `due_times_ms` keeps its time.
    """
    ids_and_times = [
        IdAndTime(identity.message_id, due_times_ms[index], None, True) if index in due_times_ms else identity
        for index, identity in enumerate(decoded.ids_and_times or [])
    ]
    rows = decoded.rows
    if isinstance(rows, pa.RecordBatch):
        for name in TIMES:
            values = [getattr(identity, name) for identity in ids_and_times]
            rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(values, pa.int64()))
    else:
        rows = [
            (*row[:_DUE_MS], identity.due_ms, *row[_DUE_MS + 1 :])
            for row, identity in zip(rows, ids_and_times, strict=True)
        ]
    return decoded._replace(rows=rows, ids_and_times=ids_and_times)


def _encode_expiry(message: Message, latest: IdAndTime, now_ms: int | None) -> str:
    """Encode the expiry of a message as properties. Raises InvalidDelay.

    The expiry must be after `latest`, the last time at which the message may be due. A delay is counted from `now_ms`.
    `now_ms` is None for a send that may be repeated, whose answer must not depend on the present time. Then a delay is
    not compared with the expiry.
    """
    if latest.due_ms is None and latest.delay_ms is None:
        raise InvalidDelay("a message without at or after is visible at once: leave its expiry out")
    if not EXPIRY_NAMES.isdisjoint(message.properties):
        raise InvalidDelay("an expiry as fields and as properties: give the fields")
    due_ms = latest.due_ms
    if latest.delay_ms is not None and now_ms is not None:
        due_ms = now_ms + latest.delay_ms
    return encode_properties(
        expiry_properties(
            None if message.expires_at is UNSET else time_parsing.due_ms(message.expires_at, "expires_at"),
            None if message.expires_in is UNSET else time_parsing.delay_ms(message.expires_in, "expires_in"),
            message.on_expiry,
            due_ms,
        )
    )


def _extract_body(index: int, message: Message) -> bytes:
    """Extract the body of a message. Raises InvalidMessage unless it has exactly one of `body`, `json` and `base64`."""
    json = None if message.json is msgspec.UNSET else message.json
    given_count = (message.body is not None) + (json is not None) + (message.base64 is not None)
    if message.body is not None and given_count == 1:
        return message.body.encode("utf-8", "strict")
    if message.base64 is not None and given_count == 1:
        return message.base64
    if json is not None and given_count == 1:
        return bytes(json)
    raise InvalidMessage(f"message {index}: give one of body (text), json and base64; this has {given_count}")


def template_fields(message: Message) -> tuple[bytes, str | None, str | None]:
    """Check a message that is a template, and extract (body, tag, keys). Raises InvalidMessage."""
    tag = None if message.tag is None else check_label("tag", message.tag)
    properties_text(message.properties)  # refuses names and values that the log cannot store
    return _extract_body(0, message), tag, _join_keys(0, message)


# ---- Arrow ------------------------------------------------------------------------------------------------------


def _decode_arrow(topic: str, data: bytes) -> DecodedSend:
    """Decode an Arrow stream, and add the column `topic`. Raises InvalidMessage, InvalidDelay and OverLimit."""
    messages = arrow_ipc.read_messages(data)
    header, _ = next(messages, (memoryview(b""), memoryview(b"")))
    given_schema = arrow_ipc.read_schema(header)
    if "topic" in given_schema.names:
        raise InvalidMessage("column 'topic': the path names the topic; leave the column out")
    schema = given_schema.append(pa.field("topic", pa.string()))
    columns, batches, row_count = SendColumns(schema), [], 0
    for header, body in messages:
        batch = arrow_ipc.read_batch(header, body, given_schema)
        # Check the number of rows first: a column without values takes no bytes, so a small request can claim many
        # rows.
        row_count += batch.num_rows
        if row_count > limits.ROWS_PER_REQUEST_MAX:
            raise OverLimit(
                f"more than {limits.ROWS_PER_REQUEST_MAX} rows in one request: send fewer at once"
            )
        # No check of the topic column is needed, because the policy has already checked the topic of the path.
        batches.append(columns.check_and_convert(_with_topic(batch, topic, schema), None))
    if not batches:
        raise InvalidMessage("no record batch: send at least one row")
    all_rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    check_bytes(all_rows.nbytes)
    _check_single_keys(all_rows)
    check_no_nulls(dict(zip(all_rows.schema.names, all_rows.columns, strict=True)), TIMES)
    return DecodedSend(all_rows, row_count, all_rows.nbytes, None)


def _check_single_keys(rows: pa.RecordBatch) -> None:
    """Raise InvalidMessage if a row has several keys, or an invalid key, in the column `keys`."""
    if "keys" in rows.schema.names and (has_fault := key_faults(rows.column("keys"))).any():
        row = int(has_fault.argmax())
        try:
            check_key(rows.column("keys")[row].as_py())
        except InvalidMessage as error:
            raise InvalidMessage(f"row {row}: {error}; send messages with several keys as JSON") from error


def _with_topic(batch: pa.RecordBatch, topic: str, schema: pa.Schema) -> pa.RecordBatch:
    """Append the column `topic` to a batch. `schema` is the schema with that column. Raises InvalidMessage."""
    topics = pa.repeat(pa.scalar(topic, pa.string()), batch.num_rows)
    try:
        return pa.RecordBatch.from_arrays([*batch.columns, topics], schema=schema)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidMessage(f"not a sound record batch: {error}") from error
