"""The headers of a message's request, and signatures that the scheme's own library verifies."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from timeball.broker.registry.push_subscriptions import secret_text
from timeball.edges.push.codec import (
    PROPERTIES_CHARACTERS_MAX,
    Delivery,
    build_deliveries,
    retry_after_ms,
    signed_headers,
)
from timeball.io.clock import SystemClock
from timeball.model.message import READ_SCHEMA, encode_properties

SECRET = bytes(range(32))
DUE_MS = 1_927_616_400_000


def delivery(properties: dict[str, str] | None = None, **columns: Any) -> Delivery:
    """Return the delivery of one message with these properties and columns."""
    row = {
        "topic": "orders", "body": b"body", "unique_key": "id-1", "store_ms": DUE_MS + 5, "born_ms": 1,
        "properties": encode_properties(properties or {}), **columns,
    }  # fmt: skip
    (delivery,) = build_deliveries(pa.RecordBatch.from_pylist([row], READ_SCHEMA), "sub", "orders")
    return delivery


def headers(properties: dict[str, str] | None = None, **columns: Any) -> dict[str, str]:
    """Return the headers of the delivery of one message with these properties and columns."""
    return dict(delivery(properties, **columns).headers)


def test_a_message_has_all_its_headers() -> None:
    sent_headers = headers({"a": "1"}, tag="new", keys="order-7 cust%1", due_ms=DUE_MS, reconsume_times=2)
    assert sent_headers == {
        "webhook-id": "id-1",
        "content-type": "application/octet-stream",
        "timeball-subscription": "sub",
        "timeball-topic": "orders",
        "timeball-attempt": "3",
        "timeball-released": "2031-01-31T09:00:00.005Z",
        "timeball-due": "2031-01-31T09:00:00.000Z",
        "timeball-tag": "new",
        "timeball-key": "order-7 cust%251",
        "timeball-property-a": "1",
    }


def test_a_body_that_the_producer_compressed_is_sent_readable() -> None:
    assert delivery(body=zlib.compress(b"text"), sys_flag=1).body == b"text"
    assert delivery(body=zlib.compress(b"text"), sys_flag=0).body == zlib.compress(b"text")


def test_a_row_of_the_retry_topic_has_no_due_header() -> None:
    assert "timeball-due" not in headers(topic="%RETRY%g_orders", due_ms=DUE_MS)


def test_internal_properties_are_not_sent() -> None:
    own = {"UNIQ_KEY": "x", "KEYS": "k", "TAGS": "t", "ORIGIN_GROUP": "g", "RETRY_TOPIC": "t", "DELAY": "3"}
    assert not [name for name in headers(own) if "property" in name]


def test_the_content_type_comes_from_the_property() -> None:
    sent_headers = headers({"content-type": "application/json;charset=utf-8"})
    assert sent_headers["content-type"] == "application/json;charset=utf-8"
    assert "timeball-property-content-type" not in sent_headers


def test_a_cloud_event_is_sent_in_binary_mode() -> None:
    event = {
        "ce-specversion": "1.0", "ce-id": "e.1", "ce-source": "/shop", "ce-type": "paid", "ce-note": 'a "b" 5%ü',
        "content-type": "image/png", "other": "x",
    }  # fmt: skip
    sent_headers = headers(event, unique_key="e.1")
    assert sent_headers["ce-note"] == "a%20%22b%22%205%25%C3%BC"
    assert (sent_headers["ce-id"], sent_headers["ce-source"], sent_headers["ce-type"]) == (
        "e.1",
        "/shop",
        "paid",
    )
    assert sent_headers["content-type"] == "image/png" and sent_headers["timeball-property-other"] == "x"
    # The signed header has no dots, and the attribute keeps its dots.
    assert sent_headers["webhook-id"] == "e%2E1"


def test_properties_beyond_the_limit_are_omitted_and_counted() -> None:
    sent_headers = headers({f"p{at}": "x" * 500 for at in range(60)})
    shown = [name for name in sent_headers if name.startswith("timeball-property-")]
    assert sum(len(name) + len(sent_headers[name]) for name in shown) <= PROPERTIES_CHARACTERS_MAX * 2
    assert int(sent_headers["timeball-properties-omitted"]) + len(shown) == 60


@given(st.dictionaries(st.text(), st.text()), st.text(min_size=1), st.text(), st.text())
def test_no_content_of_a_message_injects_headers(
    properties: dict[str, str], key: str, tag: str, keys: str
) -> None:
    built = delivery(properties, unique_key=key, tag=tag, keys=keys)
    for name, value in built.headers:
        assert name.isascii() and name.isprintable() and not set(name) & set(' :,;()<>@\\"/[]?={}'), name
        assert value.isascii() and value.isprintable(), value
    assert "." not in built.message_id


@given(st.binary(), st.binary(min_size=24, max_size=64))
def test_the_library_of_the_scheme_verifies_the_signature(body: bytes, secret: bytes) -> None:
    text = body.hex().encode()  # the library takes text
    now_ms = SystemClock().wall_ms()
    sent_headers = dict(signed_headers(delivery(body=text), [secret], now_ms))
    Webhook(secret_text(secret)).verify(text, sent_headers, json_parse=False)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret_text(secret[::-1] + b"x")).verify(text, sent_headers, json_parse=False)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret_text(secret)).verify(text + b" ", sent_headers, json_parse=False)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret_text(secret)).verify(text, {**sent_headers, "webhook-id": "other"}, json_parse=False)


def test_a_request_signed_with_two_secrets_is_verified_by_each() -> None:
    now_ms = SystemClock().wall_ms()
    sent_headers = dict(signed_headers(delivery(body=b'{"a": 1}'), [SECRET, b"old" * 8], now_ms))
    assert len(sent_headers["webhook-signature"].split()) == 2
    for secret in (SECRET, b"old" * 8):
        assert Webhook(secret_text(secret)).verify(b'{"a": 1}', sent_headers) == {"a": 1}


def test_the_example_of_the_standard_webhooks_libraries_has_their_signature() -> None:
    secret = b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    example = Delivery("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', [], 1)
    headers = dict(signed_headers(example, [secret], 1_614_265_330_000))
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_message_without_an_id_has_the_same_id_in_each_attempt() -> None:
    first = delivery(unique_key=None, born_host="h", keys="k").message_id
    again = delivery(
        {"ORIGIN_GROUP": "g"}, unique_key=None, born_host="h", keys="k", topic="%RETRY%g_orders", store_ms=9
    ).message_id
    assert first == again
    assert delivery(unique_key=None, born_host="h", keys="k", body=b"other").message_id != first
    assert delivery({"UNIQ_KEY": "known"}, unique_key=None).message_id == "known"


def test_a_missing_body_is_sent_as_an_empty_body() -> None:
    assert delivery(body=None).body == b""
    assert json.loads(delivery(body=b"[]").body) == []


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        (None, 0), ("", 0), ("soon", 0), ("-5", 0), ("0", 0), ("120", 120_000), (" 7 ", 7_000), ("1.5", 0),
        ("9" * 400, 999_999_999_000), ("Fri, 31 Jan 2031 09:00:10 GMT", 10_000), ("Fri, 31 Jan 2031 08:59:50 GMT", 0),
        ("Fri, 31 Jan 2031 09:00:10", 10_000), ("31 Jan 99999999 09:00:10 GMT", 0),
        ("Fri, 31 Jan 2031 09:00:10 +99999999999999", 0), ("٣", 0),
    ],
)  # fmt: skip
def test_retry_after_is_parsed_as_seconds_or_as_a_date(text: str | None, ms: int) -> None:
    assert retry_after_ms(text, DUE_MS) == ms
