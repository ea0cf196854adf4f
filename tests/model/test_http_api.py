"""The structs of the HTTP API: requests refuse unknown fields, answers ignore them, and empty fields are left out."""

from __future__ import annotations

import msgspec
import pytest

from timeball.model import http_api

REQUESTS = {
    http_api.Message: {"body": "x"},
    http_api.Answering: {"receipts": ["r"]},
    http_api.GivingBack: {"receipts": ["r"]},
    http_api.GivingUp: {"receipts": ["r"]},
    http_api.Extending: {"receipts": ["r"], "lease": "5s"},
    http_api.CancellingMany: {"ids": ["a"]},
    http_api.ReschedulingMany: {"ids": ["a"], "after": "5s"},
    http_api.TopicMade: {"queues": 8},
    http_api.GroupLimits: {"max_per_key": 1},
    http_api.Committing: {"offsets": {"0": 3}},
    http_api.Resolving: {"all": True},
}
ANSWERS = {
    http_api.Sent: {"id": "a", "seq": 1, "durable": True},
    http_api.Answered: {"receipt": "r", "valid": True},
    http_api.Places: {"id": "a", "messages": [{"state": "waiting", "seq": 1}], "messages_cut": True},
    http_api.SettledMany: {"verdicts": [{"id": "a", "verdict": "cancelled"}]},
    http_api.Topics: {"topics": [{"topic": "t", "queues": 8, "messages": 0}]},
    http_api.TopicQueues: {"topic": "t", "queues": {"0": {"min": 0, "max": 1}}},
    http_api.GroupOffsets: {"group": "g", "topic": "t", "offsets": {}},
    http_api.Groups: {"groups": []},
    http_api.DeadLetters: {"dead_letters": []},
    http_api.DealtMany: {"count": 1, "results": [{"dead_letter": "d", "verdict": "resent"}]},
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_refuses_a_field_that_it_does_not_have(kind: type[msgspec.Struct]) -> None:
    data = REQUESTS[kind]
    assert msgspec.json.decode(msgspec.json.encode(data), type=kind) is not None
    with pytest.raises(msgspec.ValidationError, match="unknown field `misspelt`"):
        msgspec.json.decode(msgspec.json.encode(data | {"misspelt": 1}), type=kind)


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_unknown_field_of_an_answer_is_ignored(kind: type[msgspec.Struct]) -> None:
    data = msgspec.json.encode(ANSWERS[kind] | {"added_later": 1})
    assert msgspec.json.encode(msgspec.json.decode(data, type=kind)) == msgspec.json.encode(ANSWERS[kind])


def test_a_message_is_encoded_without_the_fields_that_it_does_not_have() -> None:
    assert msgspec.json.encode(http_api.Message(body="x", after="5s")) == b'{"body":"x","after":"5s"}'


def test_a_json_body_is_decoded_as_raw_json() -> None:
    decoded = msgspec.json.decode(b'{"json": [1, 2]}', type=http_api.Message)
    assert decoded.json == msgspec.Raw(b"[1, 2]") and decoded.body is None


def test_the_body_of_a_received_message_has_the_name_body() -> None:
    leased = http_api.Leased("r", "t", 1, 9, 0, 3, "2031-01-31T09:30:00.000Z", text="x")
    data = msgspec.json.encode(leased)
    assert msgspec.json.decode(data)["body"] == "x"
    assert msgspec.json.decode(data, type=http_api.Leased) == leased
