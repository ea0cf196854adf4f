"""Messages of kombu as messages of Timeball, and back."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest

from timeball.client.celery import messages
from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.limits import NAME


@pytest.mark.parametrize(
    ("queue", "topic"),
    [("celery", "celery"), ("mail.high", "mail%2Ehigh"), ("50%", "50%25"), ("a|b", "a%7Cb"), ("é", "%C3%A9")],
)
def test_the_name_of_a_queue_is_encoded_as_a_valid_topic(queue: str, topic: str) -> None:
    assert messages.topic_name(queue) == topic
    assert NAME.fullmatch(topic)


def test_a_virtual_host_becomes_a_prefix() -> None:
    assert [messages.topic_prefix(host) for host in ("", "/", "shop", "/shop")] == ["", "", "shop-", "shop-"]


@pytest.mark.parametrize(
    ("eta", "after_ms"),  # the due time is this long after 09:30 UTC
    [
        ("2027-01-31T09:30:00+00:00", 0),
        ("2027-01-31T09:30:00Z", 0),
        ("2027-01-31T09:30:00", 0),
        ("2027-01-31T10:30:00+01:00", 0),
        ("2027-01-31T09:30:00.000001+00:00", 1),
        ("2027-01-31T09:30:00.001000+00:00", 1),
        ("2027-01-31T09:30:00.001001+00:00", 2),
    ],
)
def test_an_eta_becomes_a_due_time_rounded_up(eta: str, after_ms: int) -> None:
    begin = datetime(2027, 1, 31, 9, 30, tzinfo=UTC)
    assert messages.due_ms(eta) == int(begin.timestamp() * 1000) + after_ms


def test_an_eta_before_1970_is_rounded_up_too_and_a_wrong_one_refused() -> None:
    early = datetime(1969, 12, 31, 23, 59, 59, 999_500, tzinfo=timezone(timedelta(0)))
    assert messages.due_ms(early.isoformat()) == 0
    with pytest.raises(InvalidDelay, match="eta 'soon'"):
        messages.due_ms("soon")


def message(**headers: object) -> dict[str, object]:
    """A message as kombu gives it to the transport, with these headers and the id "m"."""
    return {
        "body": "W10=",
        "headers": headers,
        "properties": {"priority": 0, "delivery_tag": "d", messages.ID: "m", "delivery_info": {}},
    }


def test_a_task_has_its_name_as_the_tag_and_its_id_as_the_key() -> None:
    fields = messages.fields_of(message(task="shop.close", id="task-17", eta="2027-01-31T09:30:00Z"))
    assert (fields["tag"], fields["keys"], fields["message_id"]) == ("shop.close", "task-17", "m")
    assert fields["at"] == messages.due_ms("2027-01-31T09:30:00Z")
    assert messages.ID not in json.loads(fields["body"])["properties"]


def test_a_task_name_or_id_that_timeball_would_refuse_is_left_out() -> None:
    fields = messages.fields_of(message(task="a || b", id="x" * 256))
    assert (fields["tag"], fields["keys"]) == (None, None) and "at" not in fields


def test_a_message_with_a_priority_is_refused() -> None:
    urgent = message()
    urgent["properties"] = {"priority": 5}
    with pytest.raises(
        InvalidMessage, match=r"priority 5: .* leave it out, and send urgent tasks to a queue with workers"
    ):
        messages.fields_of(urgent)


def test_a_received_payload_has_no_eta() -> None:
    body = json.dumps(message(id="a", eta="2999-01-01T00:00:00Z")).encode()
    payload = messages.payload_of(body, "m", {})
    assert payload is not None and payload["headers"] == {"id": "a", "eta": None}


@pytest.mark.parametrize("body", [b"", b"hello", b"\xff", b"[]", b'{"properties": 1}', b"{}"])
def test_a_body_that_is_no_message_of_kombu_has_no_payload(body: bytes) -> None:
    assert messages.payload_of(body, "m", {}) is None


OCCURRENCE = {"schedule": "shop-report", "occurrence": "2027-01-31T10:30:00", "scheduled_ms": "1801387800000"}


def test_the_task_id_of_an_occurrence_is_unique_and_the_same_at_each_delivery() -> None:
    body = json.dumps(message(id=None, root_id=None, task="shop.report")).encode()
    first, redelivered, second = (
        messages.payload_of(body, name, OCCURRENCE) for name in ("report.1", "report.1", "report.2")
    )
    assert first is not None and second is not None and first == redelivered
    assert first["headers"]["id"] == first["headers"]["root_id"] == first["properties"]["correlation_id"]
    assert first["headers"]["id"] != second["headers"]["id"] and "expires" not in first["headers"]


def test_the_expiry_of_an_occurrence_counts_from_its_scheduled_time() -> None:
    body = json.dumps(message(id=None, expires=None)).encode()
    payload = messages.payload_of(body, "report.1", {**OCCURRENCE, messages.EXPIRES: "90.5"})
    assert payload is not None and payload["headers"]["expires"] == "2027-01-31T09:31:30.500000+00:00"


def test_a_task_with_an_id_keeps_it() -> None:
    body = json.dumps(message(id="a")).encode()
    for properties in (OCCURRENCE, {}):
        payload = messages.payload_of(body, "report.1", properties)
        assert payload is not None and payload["headers"] == {"id": "a"}


def test_the_delays_of_requeues_double_up_to_two_hours() -> None:
    delays_ms = [messages.requeue_delay_ms(attempts) for attempts in range(16)]
    assert delays_ms[:5] == [0, 1_000, 2_000, 4_000, 8_000]
    assert delays_ms[13:] == [4_096_000, 7_200_000, 7_200_000]
    assert sum(delays_ms) > 6 * limits.HOUR_MS
