"""A message as a request: its headers, and signatures that the scheme's own library verifies."""

from __future__ import annotations

import json
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
    deliveries,
    retry_after_ms,
    signed,
)
from timeball.io.clock import SystemClock
from timeball.model.message import READ_SCHEMA, encode_properties

SECRET = bytes(range(32))
DUE_MS = 1_927_616_400_000


def delivery(properties: dict[str, str] | None = None, **columns: Any) -> Delivery:
    row = {
        "topic": "orders", "body": b"body", "unique_key": "id-1", "store_ms": DUE_MS + 5, "born_ms": 1,
        "properties": encode_properties(properties or {}), **columns,
    }  # fmt: skip
    (found,) = deliveries(pa.RecordBatch.from_pylist([row], READ_SCHEMA), "sub", "orders")
    return found


def headers(properties: dict[str, str] | None = None, **columns: Any) -> dict[str, str]:
    return dict(delivery(properties, **columns).headers)


def test_the_headers_of_a_message() -> None:
    found = headers({"a": "1"}, tag="new", keys="order-7 cust%1", due_ms=DUE_MS, reconsume_times=2)
    assert found == {
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


def test_a_second_attempt_has_no_instant_of_its_own() -> None:
    assert "timeball-due" not in headers(topic="%RETRY%g_orders", due_ms=DUE_MS)


def test_what_the_broker_and_clients_keep_among_properties_stays_here() -> None:
    own = {"UNIQ_KEY": "x", "KEYS": "k", "TAGS": "t", "ORIGIN_GROUP": "g", "RETRY_TOPIC": "t", "DELAY": "3"}
    assert not [name for name in headers(own) if "property" in name]


def test_a_content_type_is_that_of_the_property() -> None:
    found = headers({"content-type": "application/json;charset=utf-8"})
    assert found["content-type"] == "application/json;charset=utf-8"
    assert "timeball-property-content-type" not in found


def test_a_cloud_event_goes_out_in_binary_mode_as_it_came_in() -> None:
    event = {
        "ce-specversion": "1.0", "ce-id": "e.1", "ce-source": "/shop", "ce-type": "paid", "ce-note": 'a "b" 5%ü',
        "content-type": "image/png", "other": "x",
    }  # fmt: skip
    found = headers(event, unique_key="e.1")
    assert found["ce-note"] == "a%20%22b%22%205%25%C3%BC"
    assert (found["ce-id"], found["ce-source"], found["ce-type"]) == ("e.1", "/shop", "paid")
    assert found["content-type"] == "image/png" and found["timeball-property-other"] == "x"
    # The header that is signed has no dot, the attribute keeps its own.
    assert found["webhook-id"] == "e%2E1"


def test_more_properties_than_servers_take_are_left_out_and_counted() -> None:
    found = headers({f"p{at}": "x" * 500 for at in range(60)})
    shown = [name for name in found if name.startswith("timeball-property-")]
    assert sum(len(name) + len(found[name]) for name in shown) <= PROPERTIES_CHARACTERS_MAX * 2
    assert int(found["timeball-properties-omitted"]) + len(shown) == 60


@given(st.dictionaries(st.text(), st.text()), st.text(min_size=1), st.text(), st.text())
def test_nothing_of_a_message_makes_another_header_or_line(
    properties: dict[str, str], key: str, tag: str, keys: str
) -> None:
    found = delivery(properties, unique_key=key, tag=tag, keys=keys)
    for name, value in found.headers:
        assert name.isascii() and name.isprintable() and not set(name) & set(' :,;()<>@\\"/[]?={}'), name
        assert value.isascii() and value.isprintable(), value
    assert "." not in found.message_id


@given(st.binary(), st.binary(min_size=24, max_size=64))
def test_a_signature_is_verified_by_the_library_of_the_scheme(body: bytes, secret: bytes) -> None:
    text = body.hex().encode()  # the library takes text
    now_ms = SystemClock().wall_ms()
    found = dict(signed(delivery(body=text), [secret], now_ms))
    Webhook(secret_text(secret)).verify(text, found, json_parse=False)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret_text(secret[::-1] + b"x")).verify(text, found, json_parse=False)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret_text(secret)).verify(text + b" ", found, json_parse=False)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret_text(secret)).verify(text, {**found, "webhook-id": "other"}, json_parse=False)


def test_while_a_secret_is_replaced_both_verify() -> None:
    now_ms = SystemClock().wall_ms()
    found = dict(signed(delivery(body=b'{"a": 1}'), [SECRET, b"old" * 8], now_ms))
    assert len(found["webhook-signature"].split()) == 2
    for secret in (SECRET, b"old" * 8):
        assert Webhook(secret_text(secret)).verify(b'{"a": 1}', found) == {"a": 1}


def test_the_published_example_of_the_scheme() -> None:
    """The vector of the Standard Webhooks libraries' own tests."""
    secret = b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    one = Delivery("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', [], 1)
    found = dict(signed(one, [secret], 1_614_265_330_000))
    assert found["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_an_id_stays_the_same_in_each_attempt_also_where_the_sender_gave_none() -> None:
    first = delivery(unique_key=None, born_host="h", keys="k").message_id
    again = delivery(
        {"ORIGIN_GROUP": "g"}, unique_key=None, born_host="h", keys="k", topic="%RETRY%g_orders", store_ms=9
    ).message_id
    assert first == again
    assert delivery(unique_key=None, born_host="h", keys="k", body=b"other").message_id != first
    assert delivery({"UNIQ_KEY": "known"}, unique_key=None).message_id == "known"


def test_a_body_that_is_not_there_is_empty() -> None:
    assert delivery(body=None).body == b""
    assert json.loads(delivery(body=b"[]").body) == []


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        (None, 0), ("", 0), ("soon", 0), ("-5", 0), ("0", 0), ("120", 120_000), (" 7 ", 7_000), ("1.5", 0),
        ("9" * 400, 999_999_999_000), ("Fri, 31 Jan 2031 09:00:10 GMT", 10_000), ("Fri, 31 Jan 2031 08:59:50 GMT", 0),
        ("Fri, 31 Jan 2031 09:00:10", 10_000), ("31 Jan 99999999 09:00:10 GMT", 0), ("٣", 0),
    ],
)  # fmt: skip
def test_retry_after_in_seconds_and_as_a_date(text: str | None, ms: int) -> None:
    assert retry_after_ms(text, DUE_MS) == ms
