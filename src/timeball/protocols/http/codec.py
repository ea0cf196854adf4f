"""JSON of receives, answers and moves to structs and back; instants, spans and leases. No I/O."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa

from timeball import instants, limits
from timeball.errors import InvalidDelay, InvalidMessage, OutOfRange
from timeball.message import decode_properties, lateness_ms
from timeball.protocols.error_codes import Refused
from timeball.rules import with_valid_fields

JSON, NDJSON = "application/json", "application/x-ndjson"

At = int | str
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Names of before, and what a sender that still has them should write.
_OLD_NAMES = {"delay": "after", "deliver_at": "at"}
_DURATION = "a text with its unit, such as '5s' or '30m'"
_INSTANT = "text such as '2030-01-31T09:00:00Z', or milliseconds since 1970"
_PRESENT = "; leave it out to deliver at once"
_OF_TIME = re.compile(r"`\$[^`]*\.(after|at|lease|timeout)`")
_CHARSET = re.compile(r';\s*charset="?utf-?8"?\s*', re.IGNORECASE)


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
    """Receipts of attempts that failed. Without `after` the group's retry policy says when they come again."""

    receipts: list[str]
    after: str | msgspec.UnsetType = msgspec.UNSET
    reason: str = ""


class GivingUp(msgspec.Struct, forbid_unknown_fields=True):
    """Receipts of messages for the group's dead letters."""

    receipts: list[str]
    reason: str = ""


class Extending(msgspec.Struct, forbid_unknown_fields=True):
    """Receipts whose leases shall end so far from now."""

    receipts: list[str]
    lease: str


class Answered(msgspec.Struct):
    """A receipt, good from now on, and whether its lease had not ended before."""

    receipt: str
    valid: bool


class AnsweredMany(msgspec.Struct):
    """The outcomes for these receipts, in their order."""

    results: list[Answered]


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request whose path and query say all: {}."""


class Resuming(msgspec.Struct, forbid_unknown_fields=True):
    """`shift`: what was held comes later, by as long as the pause was; otherwise what is overdue comes at once."""

    shift: bool = False


class Resolving(msgspec.Struct, forbid_unknown_fields=True):
    """Dead letters to send again or to delete: those that are named, or all that are left."""

    dead_letters: list[str] | None = None
    all: bool = False


class Topic(msgspec.Struct):
    """A topic: its queues, and the visible messages that are kept in them."""

    topic: str
    queues: int
    messages: int


class Topics(msgspec.Struct):
    """Topics, by name."""

    topics: list[Topic]


class TopicMade(msgspec.Struct, forbid_unknown_fields=True):
    """A topic to make; one that is there keeps its queues, or gains some. Without a number: as the settings say."""

    queues: int | None = None


class Moving(msgspec.Struct, forbid_unknown_fields=True):
    """Another instant for a scheduled message: exactly one of these."""

    at: At | msgspec.UnsetType = msgspec.UNSET
    after: str | msgspec.UnsetType = msgspec.UNSET


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
        raise refused(error, kind) from error


def refused(error: Exception, kind: Any) -> InvalidDelay | InvalidMessage:
    """Return the error for a body that cannot be read; of a time it tells what to write.

    `kind`: the struct that it was to be, whose fields an error about an unknown one lists.
    """
    text = f"body: {error}"
    for old, new in _OLD_NAMES.items():
        if f"unknown field `{old}`" in text:
            return InvalidDelay(f"{text}; `{old}` is called `{new}`")
    found = _OF_TIME.search(text)
    if found is None:
        return InvalidMessage(with_valid_fields(text, kind))
    wanted = _INSTANT if found[1] == "at" else _DURATION
    return InvalidDelay(f"{text}; {found[1]} is {wanted}{_PRESENT if 'null' in text else ''}")


# ---- instants ---------------------------------------------------------------------------------------------------


def when(at: At | msgspec.UnsetType, after: str | msgspec.UnsetType) -> tuple[int | None, int | None]:
    """Return (due_ms, delay_ms), of which at most one is there; raise InvalidDelay."""
    if at is not msgspec.UNSET and after is not msgspec.UNSET:
        raise InvalidDelay(f"at={at} and after={after} name two instants; give one of them")
    return (
        None if at is msgspec.UNSET else instants.due_ms(at),
        None if after is msgspec.UNSET else instants.delay_ms(after),
    )


def instant_text(instant_ms: int) -> str:
    """Return an instant as RFC 3339 in UTC, with milliseconds."""
    second, ms = divmod(instant_ms, limits.SECOND_MS)
    return f"{_second_text(second)}.{ms:03d}Z"


@lru_cache(1_024)  # messages of one time are due at one time
def _second_text(second: int) -> str:
    return (_EPOCH + timedelta(seconds=second)).isoformat(timespec="seconds").removesuffix("+00:00")


def lease_ms(lease: str) -> int:
    """Return the milliseconds of a lease; raise OutOfRange for one that no group may have."""
    found = instants.delay_ms(lease, "lease")
    if not limits.SECOND_MS <= found <= limits.INVISIBLE_MS_MAX:
        raise OutOfRange(f"lease={lease}: {limits.SECOND_MS} to {limits.INVISIBLE_MS_MAX} ms")
    return found


def start_ms(text: str) -> int:
    """Return where a new group is to begin: 0 for `earliest`, END for `latest`, else an instant."""
    if text in ("earliest", "latest"):
        return 0 if text == "earliest" else instants.END
    try:
        return instants.due_ms(text)
    except InvalidDelay as error:
        advice = "earliest, latest, or an instant: RFC 3339 with a zone, or milliseconds since 1970"
        raise InvalidMessage(f"start={text[:40]}: {advice}") from error


# ---- answers ----------------------------------------------------------------------------------------------------


def leased(rows: pa.RecordBatch, topic: str, handles: Sequence[str]) -> LeasedMany:
    """Return what was handed out, under the topic that was asked for: some of it may come from a retry topic."""
    names = (
        "seq", "queue_id", "queue_offset", "store_ms", "reconsume_times", "unique_key", "body", "tag", "keys",
        "properties", "due_ms", "accepted_ms",
    )  # fmt: skip
    values = zip(*(rows.column(name).to_pylist() for name in names), strict=True)
    found = []
    for handle, row in zip(handles, values, strict=True):
        seq, queue, offset, store_ms, times, unique_key, body, tag, keys, properties, due_ms, accepted_ms = (
            row
        )
        text, raw = shown(body or b"")
        one = Leased(
            handle, topic, 1 + (times or 0), seq, queue, offset, instant_text(store_ms), unique_key, text, raw,
            tag, (keys or "").split(), decode_properties(properties or ""),
        )  # fmt: skip
        if due_ms is not None:
            one.due, one.lateness_ms = instant_text(due_ms), lateness_ms(due_ms, accepted_ms, store_ms)
        found.append(one)
    return LeasedMany(found)


def shown_body(beginning: bytes, size_bytes: int) -> dict[str, Any]:
    """Return the fields that show a body of so many bytes by its beginning: as text, or as base64 where it is none."""
    is_cut = len(beginning) < size_bytes
    fields: dict[str, Any] = {"size_bytes": size_bytes} | ({"body_cut": True} if is_cut else {})
    try:
        # A cut may go through a character.
        return fields | {"body": getincrementaldecoder("utf-8")().decode(beginning, not is_cut)}
    except UnicodeDecodeError:
        return fields | {"base64": beginning}


def shown(body: bytes) -> tuple[str | None, bytes | None]:
    """Return a body as text, or as bytes when it is no UTF-8."""
    try:
        return body.decode(), None
    except UnicodeDecodeError:
        return None, body
