"""Codec of HTTP requests and answers: receives, receipts, reschedules, times, leases and problem documents. No I/O.

This module is separate from requests.py, so that the answers during a recovery (recovering.py) need no HTTP library.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from timeball.edges.shared.error_codes import Refused, codes_of, sentence
from timeball.log.row_encoder import NumberedRows, ReadRows
from timeball.model import limits, time_parsing
from timeball.model.bodies import readable_body
from timeball.model.errors import (
    UNDECODABLE,
    AlreadyPending,
    InvalidDelay,
    InvalidMessage,
    OutOfRange,
    StorageError,
    TimeballError,
    Unauthorized,
)
from timeball.model.http_api import At, Leased
from timeball.model.message import READ_SCHEMA, decode_properties, lateness_ms
from timeball.model.rules import with_valid_fields

# ---- structs of requests and answers -------------------------------------------------------------------------

JSON, NDJSON = "application/json", "application/x-ndjson"

# In the body of a request other than a send. It is enough for 10,000 ids, and for the template of a schedule.
STRINGS_MAX = 50_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# field names of older versions: their new names
_RENAMED_FIELDS = {"delay": "after", "deliver_at": "at"}
_DURATION_FORM = "a text with its unit, such as '5s' or '30m'"
_TIME_FORM = "text such as '2030-01-31T09:00:00Z', or milliseconds since 1970"
_HINT_SEND_AT_ONCE = "; leave it out to deliver at once"
_TIME_FIELD = re.compile(r"`\$[^`]*\.(after|at|expires_at|expires_in|window|lease|timeout)`")
_CHARSET = re.compile(r';\s*charset="?utf-?8"?\s*', re.IGNORECASE)


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that needs no arguments in its body: {}."""


class Resuming(msgspec.Struct, forbid_unknown_fields=True):
    """How to resume a campaign. With `shift`, its pending messages are delayed by the length of the pause.

    Without it, overdue messages are due at once.
    """

    shift: bool = False


class Moving(msgspec.Struct, forbid_unknown_fields=True):
    """The new due time of a scheduled message: exactly one of `at` and `after`."""

    at: At | msgspec.UnsetType = msgspec.UNSET
    after: str | msgspec.UnsetType = msgspec.UNSET


encode = msgspec.json.Encoder().encode


def check_content_type(content_type: str, *known_types: str) -> str:
    """Read the media type from the header `content-type`, without parameters and in lower case.

    Raises Refused (415) if the type is not in `known_types`, or has another parameter than the charset UTF-8.
    """
    name, semicolon, rest = content_type.partition(";")
    name = name.strip().lower()
    if name not in known_types or (semicolon and not _CHARSET.fullmatch(semicolon + rest)):
        raise Refused(415, f"content-type {content_type[:80]!r}: send {' or '.join(known_types)}")
    return name


def decode(kind: type[Any], data: bytes) -> Any:
    """Decode a request's body as a struct of type `kind`. Raises InvalidMessage, InvalidDelay and OutOfRange."""
    _check_string_count(data)
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise decoding_error(error, kind) from error


def _check_string_count(data: bytes) -> None:
    """Raise OutOfRange if JSON has more strings than any request may have.

    Decoding keeps the interpreter's lock, so all other threads wait: a third of a second for 8 MiB of short ids.
    """
    quotes_max = 2 * STRINGS_MAX
    # In the text of a string, a quote has a backslash before it. The last quote of a string may have one, too, but
    # never the first. So valid requests are never refused, and others have at most `quotes_max` strings.
    quotes = data.count(b'"')
    if quotes > quotes_max and quotes - data.count(b'\\"') > quotes_max:
        raise OutOfRange(f"more than {STRINGS_MAX} strings in one request: name fewer at once")


def decoding_error(error: Exception, kind: Any) -> InvalidDelay | InvalidMessage:
    """Build the error for a body that cannot be decoded. For an invalid time, the text shows the valid form.

    `kind` is the expected struct. If a field is unknown, the text lists the fields of this struct.
    """
    text = f"body: {error}"
    for old_name, new_name in _RENAMED_FIELDS.items():
        if f"unknown field `{old_name}`" in text:
            return InvalidDelay(f"{text}; `{old_name}` is called `{new_name}`")
    time_field = _TIME_FIELD.search(text)
    if time_field is None:
        return InvalidMessage(with_valid_fields(text, kind))
    valid_form = _TIME_FORM if time_field[1] in ("at", "expires_at") else _DURATION_FORM
    return InvalidDelay(
        f"{text}; {time_field[1]} is {valid_form}{_HINT_SEND_AT_ONCE if 'null' in text else ''}"
    )


# ---- times ---------------------------------------------------------------------------------------------------


def due_and_delay_ms(
    at: At | msgspec.UnsetType, after: str | msgspec.UnsetType
) -> tuple[int | None, int | None]:
    """Parse a due time or a delay to (due_ms, delay_ms), with None for a missing value.

    Raises InvalidDelay if both are given, or if the value is invalid.
    """
    if at is not msgspec.UNSET and after is not msgspec.UNSET:
        raise InvalidDelay(f"at={at} and after={after} name two due times; give one of them")
    return (
        None if at is msgspec.UNSET else time_parsing.due_ms(at),
        None if after is msgspec.UNSET else time_parsing.delay_ms(after),
    )


@lru_cache(256)  # messages that became visible together have the same time
def format_time(time_ms: int) -> str:
    """Format a time as RFC 3339 in UTC, with milliseconds."""
    second, ms = divmod(time_ms, limits.SECOND_MS)
    return f"{_second_text(second)}.{ms:03d}Z"


@lru_cache(1_024)  # messages sent together are often due in the same second
def _second_text(second: int) -> str:
    return (_EPOCH + timedelta(seconds=second)).isoformat(timespec="seconds").removesuffix("+00:00")


def parse_lease(lease: str, min_ms: int = 1) -> int:
    """Parse the duration of a lease to milliseconds.

    Raises InvalidDelay, and OutOfRange below `min_ms` or above INVISIBLE_MS_MAX.
    """
    duration_ms = time_parsing.delay_ms(lease, "lease")
    if not min_ms <= duration_ms <= limits.INVISIBLE_MS_MAX:
        raise OutOfRange(f"lease={lease}: {min_ms} to {limits.INVISIBLE_MS_MAX} ms")
    return duration_ms


def parse_start(text: str) -> int:
    """Parse the start of a new group: 0 for `earliest`, END for `latest`, else a time in milliseconds since 1970 UTC.

    Raises InvalidMessage.
    """
    if text in ("earliest", "latest"):
        return 0 if text == "earliest" else time_parsing.END
    try:
        return time_parsing.due_ms(text)
    except InvalidDelay as error:
        advice = "earliest, latest, or an instant: RFC 3339 with a zone, or milliseconds since 1970"
        raise InvalidMessage(f"start={text[:40]}: {advice}") from error


# ---- received messages ---------------------------------------------------------------------------------------


_LEASED_COLUMNS = (
    "seq", "queue_id", "queue_offset", "store_ms", "reconsume_times", "unique_key", "body", "tag", "keys", "properties",
    "due_ms", "accepted_ms", "source_seq", "sys_flag",
)  # fmt: skip
# Of the messages of one answer together. A compressed body may become a thousand times as large.
LEASED_BYTES_MAX = 2 * limits.POP_BYTES_MAX
_BEFORE_RECEIPT = b'{"receipt":'  # the receipt is the first field
_KEPT_MAX, _KEPT_BYTES_MAX = 2_048, 2_048  # messages that are kept encoded, and bytes of each: 4 MiB
_LEASED_VALUES = itemgetter(*map(READ_SCHEMA.get_field_index, _LEASED_COLUMNS))


class LeasedEncoder:
    """Encodes received messages as JSON objects (`Leased`).

    Many groups may receive the same message. It is encoded once, and the answers differ in the receipts.
    """

    def __init__(self) -> None:
        # The last small messages, from the end of the receipt on, by requested topic and sequence number. A message of
        # a retry topic can be requested by that topic or by the original one, and shows the requested topic.
        self._encoded: dict[tuple[str, int], bytes] = {}

    def encode(self, rows: ReadRows, topic: str, receipts: Sequence[str]) -> list[bytes]:
        """Encode the rows of a receive. `receipts` has the receipt of each row.

        The result ends with the message that brings it above LEASED_BYTES_MAX, so it may have fewer messages than rows.
        `topic` is the requested topic. Some rows may come from the group's retry topic.
        """
        encoded, free_bytes = list[bytes](), LEASED_BYTES_MAX
        for receipt, message in zip(receipts, self._messages(rows, topic), strict=True):
            encoded.append(_with_receipt(receipt, message))
            free_bytes -= len(message)
            if free_bytes < 0:
                break
        return encoded

    def _messages(self, rows: ReadRows, topic: str) -> Iterator[bytes]:
        """Yield the encoded rows, each from the end of its receipt on."""
        if isinstance(rows, NumberedRows):
            # Rows as values are as the log has them, so the sequence number (`row[0]`) identifies the whole message.
            for row in rows.values:
                yield self._encoded.get((topic, row[0])) or self._encode_new(
                    topic, row[0], _LEASED_VALUES(row)
                )
        else:
            columns = (rows.column(name).to_pylist() for name in _LEASED_COLUMNS)
            for values in zip(*columns, strict=True):
                yield _encode_leased(values, topic)

    def _encode_new(self, topic: str, seq: int, row: Sequence[Any]) -> bytes:
        """Encode a message, and cache it if it is small. In a full cache, it replaces the oldest message."""
        encoded = _encode_leased(row, topic)
        if len(encoded) <= _KEPT_BYTES_MAX:
            if len(self._encoded) >= _KEPT_MAX:
                del self._encoded[next(iter(self._encoded))]
            self._encoded[topic, seq] = encoded
        return encoded


def _with_receipt(receipt: str, encoded: bytes) -> bytes:
    return b'%b"%b%b' % (_BEFORE_RECEIPT, receipt.encode(), encoded)


def _encode_leased(row: Sequence[Any], topic: str) -> bytes:
    """Encode a message as `Leased`, from the end of its receipt on. `row` has the values of _LEASED_COLUMNS."""
    (
        seq, queue, offset, store_ms, reconsume_times, unique_key, body, tag, keys, properties, due_ms, accepted_ms,
        source_seq, sys_flag,
    ) = row  # fmt: skip
    text, not_utf8 = text_or_bytes(readable_body(body or b"", sys_flag))
    message = Leased(
        "", topic, 1 + (reconsume_times or 0), seq, queue, offset, format_time(store_ms), unique_key, text,
        not_utf8, tag, keys.split() if keys else [], decode_properties(properties) if properties else {},
        scheduled_seq=source_seq,
    )  # fmt: skip
    if due_ms is not None:
        message.due, message.lateness_ms = format_time(due_ms), lateness_ms(due_ms, accepted_ms, store_ms)
    return encode(message)[len(_BEFORE_RECEIPT) + 1 :]


def body_fields(first_bytes: bytes, size_bytes: int) -> dict[str, Any]:
    """Build the fields that show the first bytes of a body: `body` as text, or `base64` if they are not UTF-8.

    `size_bytes` is the size of the whole body. If only a part is shown, `body_cut` is true.
    """
    is_cut = len(first_bytes) < size_bytes
    fields: dict[str, Any] = {"size_bytes": size_bytes} | ({"body_cut": True} if is_cut else {})
    try:
        # The first bytes may end within a character.
        return fields | {"body": getincrementaldecoder("utf-8")().decode(first_bytes, not is_cut)}
    except UnicodeDecodeError:
        return fields | {"base64": first_bytes}


def text_or_bytes(body: bytes) -> tuple[str | None, bytes | None]:
    """Decode a body as UTF-8: (text, None), or (None, bytes) if it is not UTF-8."""
    try:
        return body.decode(), None
    except UnicodeDecodeError:
        return None, body


# ---- answers, and problem documents (RFC 9457) for errors ----------------------------------------------------

PROBLEM = "application/problem+json"


class Answer(NamedTuple):
    """The answer to a request. `value` is encoded as JSON, unless it is bytes.

    `size_bytes` is an estimate of the size, which counts towards the limit for unsent bytes.
    """

    status: int
    value: Any
    headers: tuple[tuple[bytes, bytes], ...] = ()
    media_type: str = JSON
    size_bytes: int = 0


def problem(status: int, code: str, detail: str, *, allow: str = "", **members: Any) -> Answer:
    """Build an answer with a problem document (RFC 9457). `members` are additional members of the document.

    `allow` is the value of the header Allow. 401 also gets WWW-Authenticate, 429 and 503 get Retry-After.
    """
    headers: tuple[tuple[bytes, bytes], ...] = ((b"allow", allow.encode()),) if allow else ()
    if status == 401:
        headers = ((b"www-authenticate", b'Bearer realm="timeball"'),)
    elif status in (429, 503):
        headers = ((b"retry-after", b"1"),)
    value = {
        "type": f"urn:timeball:{code}",
        "title": code,
        "status": status,
        "code": code,
        "detail": detail,
        **members,
    }
    return Answer(status, value, headers, PROBLEM)


def problem_of(error: BaseException) -> Answer:
    """Build the answer for an error. For an internal fault, the answer contains only the name of its class."""
    if isinstance(error, Refused):
        return problem(error.protocol_code, "bad_request", sentence(error))
    if not isinstance(error, TimeballError):
        return problem(500, "error", sentence(error))
    # The log has stopped: the request was correct, and another broker may accept it.
    status = 503 if isinstance(error, StorageError) else codes_of(error).http
    assert status != 401 or isinstance(error, Unauthorized)
    members: dict[str, Any] = {}
    if isinstance(error, AlreadyPending):
        due = format_time(error.due_ms)
        members = {"id": error.id, "seq": error.seq, "due": due, "due_ms": error.due_ms}
    return problem(status, error.code, sentence(error), **members)
