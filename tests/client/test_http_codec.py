"""Requests and answers of the HTTP API: targets, errors, and answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from timeball import Conflict, InvalidMessage, InvalidName, OutOfRange, TimeballError
from timeball.client.attempts import Lost, NotNow
from timeball.client.http_codec import (
    LeaseRequest,
    SentRows,
    decode_lines,
    decode_sent,
    error_of,
    path,
    receive_target,
    resolve_dead_letters,
    send_request,
)
from timeball.client.http_connection import Reply
from timeball.client.rows import build_message
from timeball.model import answers, wire


def test_a_path_is_escaped_and_an_invalid_topic_is_refused() -> None:
    assert path("topics", "%DLQ%g", "ack", group="a|b") == "/v1/topics/%25DLQ%25g/ack?group=a%7Cb"
    assert path("messages", "a/b c?", topic=None) == "/v1/messages/a%2Fb%20c%3F"
    for wrong in ("", "a/b", "a b", ".."):
        with pytest.raises(InvalidName):
            path("topics", wrong, "ack")


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_a_rate_that_json_cannot_represent_is_refused(rate: float) -> None:
    with pytest.raises(OutOfRange, match="in a second"):
        resolve_dead_letters("g", "resend", None, rate=rate)


def test_the_targets_of_a_receive_and_of_a_stream_have_their_parameters() -> None:
    request = LeaseRequest("t", "g", 7, 5, 60_000, "latest", sql="a = 'b'")
    selection = "start=latest&sql=a%20%3D%20%27b%27"
    assert receive_target(request) == (
        f"/v1/topics/t/receive?group=g&lease=60000ms&max=7&wait=5ms&{selection}"
    )
    assert receive_target(request, credit=9) == (
        f"/v1/topics/t/stream?group=g&credit=9&lease=60000ms&{selection}"
    )


@pytest.mark.parametrize(
    ("status", "body", "error_class"),
    [
        (409, b'{"code":"conflict","detail":"x"}', Conflict),
        (503, b'{"code":"unavailable","detail":"x"}', NotNow),
        (503, b"<html>", Lost),
        (500, b"Internal Server Error", Lost),
        (404, b"<html>", TimeballError),
        (418, b'{"code":"new"}', TimeballError),
    ],
)
def test_an_error_answer_becomes_the_class_of_its_code_or_of_its_status(
    status: int, body: bytes, error_class: type[Exception]
) -> None:
    assert type(error_of(Reply(status, "", body), "http://there")) is error_class


def test_one_message_is_sent_as_an_object_and_several_as_lines() -> None:
    message = build_message("t", "x", "tag", ["a", "b"], {"p": "q"}, "id", "5s", None)
    request = send_request([message], None, [("traceparent", "00-1")])
    assert (request.method, request.target) == ("POST", "/v1/topics/t/messages")
    assert dict(request.headers) == {"content-type": "application/json", "traceparent": "00-1"}
    assert msgspec.json.decode(request.body) == {
        "id": "id", "body": "x", "keys": ["a", "b"], "tag": "tag", "properties": {"p": "q"}, "after": "5000ms",
    }  # fmt: skip
    key = wire.SendKey(idempotency_key="t/\u00e9 1", attempt="a")
    request = send_request([message, message], key, ())
    assert request.body.count(b"\n") == 1
    assert dict(request.headers)["idempotency-key"] == "t/%C3%A9 1"


@pytest.mark.parametrize(
    "fields", [{"tag": "\ud800"}, {"message_id": "\ud800"}, {"properties": {"a": "\ud800"}}]
)
def test_half_of_a_surrogate_pair_in_a_text_is_refused(fields: dict[str, Any]) -> None:
    arguments = {"tag": None, "keys": None, "properties": None, "message_id": "id", **fields}
    with pytest.raises(InvalidMessage, match="are text"):
        send_request([build_message("t", b"x", after=None, at=None, **arguments)], None, ())


def test_the_answer_to_a_repeated_send_has_the_current_states() -> None:
    data = b'{"id":"a","seq":5,"durable":true,"outcome":"exists","state":"waiting","due_ms":9,"store_ms":7}'
    sent = decode_sent(data, 1)
    assert sent.ack == answers.SendAck(5, 1, 7, "exists", [answers.SentState("waiting", 9)])


def test_the_answer_to_several_messages_counts_those_with_a_due_time_in_the_past() -> None:
    data = (
        b'{"messages":[{"id":"a","seq":5,"durable":true,"past_ms":3},'
        b'{"id":"b","seq":6,"durable":true,"past_ms":8}],"store_ms":7}'
    )
    expected = SentRows(answers.SendAck(5, 2, 7), past_rows=2, past_ms=8, due_ms=None, id="a", replaced=None)
    assert decode_sent(data, 2) == expected


def test_each_line_of_a_stream_is_a_message_and_empty_lines_are_skipped() -> None:
    line = (
        b'{"receipt":"r","topic":"t","attempt":2,"seq":9,"queue":1,"offset":3,"base64":"/w==",'
        b'"released":"2031-01-31T09:30:00.002Z","due":"2031-01-31T09:30:00.000Z","lateness_ms":2,"scheduled_seq":4}'
    )
    (message,) = decode_lines(b"\n" + line + b"\n\n")
    assert (message.body, message.attempts, message.queue_id, message.queue_offset) == (b"\xff", 1, 1, 3)
    assert (message.store_ms - message.due_ms, message.due_ms) == (2, 1_927_618_200_000)  # type: ignore[operator]
    assert (message.id, message.born_ms, message.keys, message.scheduled_seq) == (None, None, [], 4)
