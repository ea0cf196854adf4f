"""Requests between groups as JSON: one that a node of another version might misread is refused."""

from __future__ import annotations

import msgspec
import pytest

from timeball.broker.revoking.group_questions import (
    AnyQuestion,
    CancelHere,
    FindHere,
    GroupAnswer,
    GroupRoute,
    RecallHere,
    RescheduleHere,
    RouteHere,
)
from timeball.model.answers import MessagePlace, Verdict


@pytest.mark.parametrize(
    "question",
    [
        CancelHere(keys=["order-17"]),
        RescheduleHere(ids=["x"], topic="orders", due_ms=5),
        FindHere(id="x"),
        RecallHere(topic="orders", handle="handle"),
        RouteHere(topic="orders", consumer_group="g"),
    ],
)
def test_a_question_survives_encoding_and_decoding(question: AnyQuestion) -> None:
    assert msgspec.json.decode(msgspec.json.encode(question), type=AnyQuestion) == question


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b'{"ask":"cancel","ids":["x"],"but_not":["y"]}', id="unknown field"),
        pytest.param(b'{"ask":"release"}', id="unknown type"),
        pytest.param(b'{"ids":["x"]}', id="no type"),
    ],
)
def test_a_question_of_an_unknown_form_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=AnyQuestion)


def test_an_answer_survives_encoding_and_decoding() -> None:
    answer = GroupAnswer(
        verdicts=[Verdict("x", "cancelled", 1, 2)],
        places=[MessagePlace("waiting", 1)],
        route=GroupRoute("g1", 1, 2, "DELAY", in_order=True),
    )
    assert msgspec.json.decode(msgspec.json.encode(answer), type=GroupAnswer) == answer
