"""Builds the request that delivers a message: its headers and its signature. Reads the header Retry-After.

The request follows Standard Webhooks 1.0:

    webhook-id          identifies the message, the same in each attempt
    webhook-timestamp   time of the attempt, in seconds since 1970
    webhook-signature   "v1," and base64 of HMAC-SHA256 over id, timestamp and body, joined with dots. There is one for
                        each valid secret, separated by spaces

Characters that a header cannot contain are percent-encoded (%XX), and so are spaces, double quotes and percent signs,
as in the HTTP binding of CloudEvents.

The worker imports this module with the broker. The HTTP client (sender.py) is only imported for a first subscription.
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
from timeball.model.bodies import readable_body
from timeball.model.message import decode_properties
from timeball.model.trace_context import TRACEPARENT, TRACESTATE
from timeball.monitoring.figures import Outcome

# Common servers accept 8 KiB of headers in total. 2 KiB are left for other headers and for those that proxies add.
PROPERTIES_CHARACTERS_MAX = 6 * 1024
DEFAULT_CONTENT_TYPE = "application/octet-stream"
# The printable ASCII characters that are not percent-encoded in values.
_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '%"')
# The characters that a header's name may contain besides letters, digits and %.
_SAFE_IN_NAMES = "!#$&'*+-.^_`|~"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Properties that RocketMQ's clients and the broker add to a message. They are not sent as property headers: some have
# headers of their own, such as `timeball-tag`, and the others are of no use to a receiver.
_INTERNAL_PROPERTIES = SPENT | {
    "TAGS", "KEYS", "UNIQ_KEY", "WAIT", "ORIGIN_GROUP", "ORIGIN_MESSAGE_ID", "RETRY_TOPIC", "1ST_POP_TIME", "POP_CK",
}  # fmt: skip
_COLUMNS = (
    "topic", "body", "tag", "keys", "unique_key", "properties", "born_ms", "born_host", "store_ms",
    "reconsume_times", "due_ms", "sys_flag",
)  # fmt: skip

Headers = list[tuple[str, str]]


class Delivery(NamedTuple):
    """One attempt to deliver a message: the request without its timestamp and signature."""

    message_id: str  # the value of the header webhook-id
    body: bytes
    headers: Headers
    attempt: int  # from 1


class Answer(NamedTuple):
    """The outcome of a request."""

    outcome: Outcome
    status: int = 0  # of the HTTP response, 0 without one
    detail: str = ""  # an explanation for people
    retry_after_ms: int = 0  # the pause that the receiver has requested, 0 for none

    @property
    def is_gone(self) -> bool:
        """True if the receiver answered 410, which means: stop sending (Standard Webhooks)."""
        return self.status == 410


def build_deliveries(rows: pa.RecordBatch, subscription: str, topic: str) -> Iterator[Delivery]:
    """Build an attempt for each row (READ_SCHEMA) that a subscription has received from `topic` or its retry topic.

    A compressed body is decompressed when its attempt is yielded.
    """
    columns = [rows.column(column).to_pylist() for column in _COLUMNS]
    for row in zip(*columns, strict=True):
        (
            stored_topic, body, tag, keys, unique_key, properties_text, born_ms, born_host, store_ms, reconsume_times,
            due_ms, sys_flag,
        ) = row  # fmt: skip
        properties, body = decode_properties(properties_text or ""), body or b""
        raw_id = unique_key or properties.get("UNIQ_KEY") or _derive_id(topic, body, keys, born_ms, born_host)
        # A dot would end the id in the signed text.
        message_id = quote(raw_id, safe=_SAFE).replace(".", "%2E")
        attempt = 1 + (reconsume_times or 0)
        headers: Headers = [
            ("webhook-id", message_id),
            ("content-type", _percent_encode(properties.pop("content-type", "")) or DEFAULT_CONTENT_TYPE),
            ("timeball-subscription", subscription),
            ("timeball-topic", _percent_encode(topic)),
            ("timeball-attempt", str(attempt)),
            ("timeball-released", _rfc3339(store_ms)),
        ]
        # A row of the retry topic has the time of the retry as its due time, and not the due time that the sender
        # chose.
        if due_ms is not None and stored_topic == topic:
            headers.append(("timeball-due", _rfc3339(due_ms)))
        if tag:
            headers.append(("timeball-tag", _percent_encode(tag)))
        if keys:
            headers.append(("timeball-key", " ".join(map(_percent_encode, keys.split()))))
        # Trace contexts keep their names, so that the receiver's request becomes part of the message's trace.
        for header_name in (TRACEPARENT, TRACESTATE):
            if value := properties.pop(header_name, ""):
                headers.append(
                    (
                        header_name,
                        value if value.isascii() and value.isprintable() else _percent_encode(value),
                    )
                )
        headers += _property_headers(properties)
        yield Delivery(message_id, readable_body(body, sys_flag), headers, attempt)


def signed_headers(delivery: Delivery, secrets: Sequence[bytes], now_ms: int) -> Headers:
    """Build all headers of an attempt: those of `delivery`, the timestamp `now_ms` and a signature for each secret."""
    seconds = str(now_ms // 1_000)
    signed_content = b".".join((delivery.message_id.encode(), seconds.encode(), delivery.body))
    signatures = [
        "v1," + b64encode(hmac.digest(secret, signed_content, "sha256")).decode() for secret in secrets
    ]
    return [
        *delivery.headers,
        ("webhook-timestamp", seconds),
        ("webhook-signature", " ".join(signatures)),
    ]


def retry_after_ms(value: str | None, now_ms: int) -> int:
    """Convert the header Retry-After, a number of seconds or a date, to milliseconds from `now_ms`.

    0 if the header is missing, malformed, or a date in the past.
    """
    if value is None:
        return 0
    text = value.strip()
    if text.isascii() and text.isdecimal():
        return int(text[:9]) * 1_000  # nine digits are thirty years, and the caller applies a limit
    try:
        retry_time = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):  # OverflowError: a time zone with many digits
        return 0
    retry_time = retry_time if retry_time.tzinfo is not None else retry_time.replace(tzinfo=UTC)
    return max(0, (retry_time - _EPOCH) // timedelta(milliseconds=1) - now_ms)


def _property_headers(properties: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a header `timeball-property-NAME` for each property. Attributes of a CloudEvent keep their names.

    From the first property on that exceeds PROPERTIES_CHARACTERS_MAX in total, properties are omitted. Then the
    last header contains the number of omitted ones.
    """
    is_event, characters_left, omitted_count = "ce-specversion" in properties, PROPERTIES_CHARACTERS_MAX, 0
    for name, value in properties.items():
        if name in _INTERNAL_PROPERTIES:
            continue
        is_event_attribute = is_event and name.startswith("ce-")
        header_name, header_value = quote(name, safe=_SAFE_IN_NAMES), _percent_encode(value)
        characters_left -= len(header_name) + len(header_value)
        if characters_left < 0:
            omitted_count += 1
        else:
            yield (header_name if is_event_attribute else f"timeball-property-{header_name}"), header_value
    if omitted_count:
        yield "timeball-properties-omitted", str(omitted_count)


def _derive_id(topic: str, body: bytes, keys: str | None, born_ms: int | None, born_host: str | None) -> str:
    """Derive the id of a message that was sent without an id, from values that are the same in each attempt."""
    content = (topic.encode(), (keys or "").encode(), str(born_ms).encode(), str(born_host).encode(), body)
    return blake2b(b"\n".join(content), digest_size=16).hexdigest()


def _percent_encode(value: str) -> str:
    return quote(value, safe=_SAFE)


def _rfc3339(time_ms: int) -> str:
    """Format a time as RFC 3339 in UTC, with milliseconds."""
    text = (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"
