"""Dispatch: every request gets one answer, unless it is one-way."""

from __future__ import annotations

import logging

import pytest
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode

from timeball.edges.remoting.calls import Call, Dispatch, Reply
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.shared.error_codes import Refused
from timeball.model.errors import InvalidMessage, OverLimit

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC


def wire_with_handler(node: RunningNode, handler: object) -> Wire:
    """Let the handler serve request code 9000 of the node, and return a wire to it."""
    node.node.edges.remoting._dispatch._handlers[9000] = handler  # type: ignore[union-attr, assignment]
    return Wire.to(node)


def test_an_unknown_code_is_not_supported(wire: Wire) -> None:
    answer = wire.ask(9_999)
    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert "9999" in str(answer.remark)
    assert wire.ask(ROUTE, topic="TBW102").code == 0, "the connection stays open"


def test_a_one_way_request_is_not_answered(wire: Wire) -> None:
    wire.send(9_999, one_way=True)
    wire.send(ROUTE, topic="nobody", one_way=True)
    last = wire.send(ROUTE, topic="TBW102")
    wire.answer_to(last)
    assert not wire._answers


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Refused(ResponseCode.NO_PERMISSION, "no"), ResponseCode.NO_PERMISSION),
        (InvalidMessage("bad"), ResponseCode.MESSAGE_ILLEGAL),
        (OverLimit("full"), ResponseCode.SYSTEM_BUSY),
        (ValueError("secret"), ResponseCode.SYSTEM_ERROR),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_an_error_of_a_handler_becomes_an_answer(
    node: RunningNode, error: Exception, code: int, later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def answer_at_once(call: Call) -> Reply:
        raise error

    async def answer_later(call: Call) -> Reply:
        raise error

    handler = answer_later if later else answer_at_once
    with caplog.at_level(logging.WARNING), wire_with_handler(node, handler) as wire:
        answer = wire.ask(9000)
    assert answer.code == code
    assert "secret" not in str(answer.remark), "the text of an unexpected error is only logged"
    assert ("secret" in caplog.text) == isinstance(error, ValueError)


def test_two_handlers_for_one_code_are_refused() -> None:
    with pytest.raises(AssertionError, match="two handlers"):
        Dispatch([{1: lambda call: None}, {1: lambda call: None}])
