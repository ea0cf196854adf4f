"""A message as a request: its headers and its signature. No I/O.

The scheme is Standard Webhooks 1.0. `webhook-id` identifies the message and is the same in each attempt. The signature
is HMAC-SHA256 over id, timestamp and body, joined with dots. There is one signature for each secret that is valid at
the moment. Characters that a header cannot contain are written as %XX, and also blanks, double quotes and percent
signs, as CloudEvents defines it.
"""

from __future__ import annotations

import hmac
from base64 import b64encode
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import quote

import pyarrow as pa

from timeball.broker.consuming.retry import SPENT
from timeball.model.message import decode_properties
from timeball.model.trace_context import TRACEPARENT, TRACESTATE
from timeball.monitoring.push_figures import Outcome

# Common servers accept 8 KiB of headers in total. The rest is for the other headers, and for those that proxies add.
PROPERTIES_CHARACTERS_MAX = 6 * 1024
BINARY = "application/octet-stream"
_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '%"')
# the characters that a header's name may contain besides letters, digits and %
_SAFE_IN_NAMES = "!#$&'*+-.^_`|~"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Properties that RocketMQ's clients and the broker add to a message. Push sends them in headers of their own, or not at
# all.
_OWN = SPENT | {
    "TAGS", "KEYS", "UNIQ_KEY", "WAIT", "ORIGIN_GROUP", "ORIGIN_MESSAGE_ID", "RETRY_TOPIC", "1ST_POP_TIME", "POP_CK",
}  # fmt: skip
_COLUMNS = (
    "topic", "body", "tag", "keys", "unique_key", "properties", "born_ms", "born_host", "store_ms",
    "reconsume_times", "due_ms",
)  # fmt: skip

Headers = list[tuple[str, str]]


class Delivery(NamedTuple):
    """One attempt at one message: its request without the signature."""

    message_id: str  # the value of the header webhook-id
    body: bytes
    headers: Headers
    attempt: int


class Answer(NamedTuple):
    """The outcome of a request. `words` is for people.

    `retry_after_ms` is the pause that the receiver has requested.
    """

    outcome: Outcome
    status: int = 0
    words: str = ""
    retry_after_ms: int = 0

    @property
    def is_gone(self) -> bool:
        """True if the receiver answered 410, which means: stop sending (Standard Webhooks)."""
        return self.status == 410


def deliveries(rows: pa.RecordBatch, name: str, topic: str) -> Iterator[Delivery]:
    """Yield an attempt for each row in READ_SCHEMA that subscription `name` received from a topic."""
    columns = [rows.column(column).to_pylist() for column in _COLUMNS]
    for row in zip(*columns, strict=True):
        stands_in, body, tag, keys, unique_key, text, born_ms, born_host, store_ms, times, due_ms = row
        properties, body = decode_properties(text or ""), body or b""
        known = unique_key or properties.get("UNIQ_KEY") or _made_id(topic, body, keys, born_ms, born_host)
        message_id = quote(known, safe=_SAFE).replace(".", "%2E")  # a dot would end the id in the signed text
        attempt = 1 + (times or 0)
        headers: Headers = [
            ("webhook-id", message_id),
            ("content-type", _written(properties.pop("content-type", "")) or BINARY),
            ("timeball-subscription", name),
            ("timeball-topic", _written(topic)),
            ("timeball-attempt", str(attempt)),
            ("timeball-released", _instant(store_ms)),
        ]
        # A row of the retry topic was due when its lease ended, and that is not the due time that the sender chose.
        if due_ms is not None and stands_in == topic:
            headers.append(("timeball-due", _instant(due_ms)))
        if tag:
            headers.append(("timeball-tag", _written(tag)))
        if keys:
            headers.append(("timeball-key", " ".join(map(_written, keys.split()))))
        # Trace contexts keep their names, so that the receiver's request becomes part of the message's trace.
        for context in (TRACEPARENT, TRACESTATE):
            if value := properties.pop(context, ""):
                headers.append(
                    (context, value if value.isascii() and value.isprintable() else _written(value))
                )
        headers += _property_headers(properties)
        yield Delivery(message_id, body, headers, attempt)


def signed(delivery: Delivery, secrets: Sequence[bytes], now_ms: int) -> Headers:
    """Build the headers of one attempt, with its signatures at the time `now_ms`."""
    seconds = str(now_ms // 1_000)
    content = b".".join((delivery.message_id.encode(), seconds.encode(), delivery.body))
    signatures = ["v1," + b64encode(hmac.digest(secret, content, "sha256")).decode() for secret in secrets]
    return [
        *delivery.headers,
        ("webhook-timestamp", seconds),
        ("webhook-signature", " ".join(signatures)),
    ]


def retry_after_ms(value: str | None, now_ms: int) -> int:
    """Parse Retry-After, a number of seconds or a date, to milliseconds from now. 0 if it is missing or malformed."""
    if value is None:
        return 0
    text = value.strip()
    if text.isascii() and text.isdecimal():
        return int(text[:9]) * 1_000  # nine digits are thirty years, and the caller applies a limit
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        return 0
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0, (at - _EPOCH) // timedelta(milliseconds=1) - now_ms)


def _property_headers(properties: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a header for each property. The attributes of a CloudEvent keep their names."""
    is_event, left, omitted = "ce-specversion" in properties, PROPERTIES_CHARACTERS_MAX, 0
    for name, value in properties.items():
        if name in _OWN:
            continue
        is_attribute = is_event and name.startswith("ce-")
        header = quote(name, safe=_SAFE_IN_NAMES), _written(value)
        left -= len(header[0]) + len(header[1])
        if left < 0:
            omitted += 1
        else:
            yield (header[0] if is_attribute else f"timeball-property-{header[0]}"), header[1]
    if omitted:
        yield "timeball-properties-omitted", str(omitted)


def _made_id(topic: str, body: bytes, keys: str | None, born_ms: int | None, born_host: str | None) -> str:
    """Derive an id for a message that was sent without one, from content that is the same in each attempt."""
    parts = (topic.encode(), (keys or "").encode(), str(born_ms).encode(), str(born_host).encode(), body)
    return blake2b(b"\n".join(parts), digest_size=16).hexdigest()


def _written(value: str) -> str:
    return quote(value, safe=_SAFE)


def _instant(instant_ms: int) -> str:
    text = (_EPOCH + timedelta(milliseconds=instant_ms)).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"
