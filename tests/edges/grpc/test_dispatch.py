"""Dispatch runs the handler of a call, and answers every failure with a status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from timeball.edges.grpc._generated.definition_pb2 import Code
from timeball.edges.grpc._generated.service_pb2 import (
    AckMessageRequest,
    AckMessageResponse,
    ReceiveMessageRequest,
    ReceiveMessageResponse,
)
from timeball.edges.grpc.calls import OK, Call, Direct, Handlers
from timeball.edges.grpc.dispatch import METHODS, Dispatch
from timeball.edges.shared.error_codes import Refused
from timeball.model.errors import OverLimit

CALL = Call({})


def dispatch(handlers: Handlers, check: Any = lambda *_: None) -> Dispatch:
    """Return a dispatch with these handlers and this check of permissions."""
    return Dispatch([handlers], check)


def ask(dispatcher: Dispatch, name: str = "AckMessage", request: Any = None) -> Any:
    """Make a unary call, and return its response."""
    return asyncio.run(dispatcher.unary(name, CALL, request or AckMessageRequest()))


def responses_of(dispatcher: Dispatch, name: str = "ReceiveMessage") -> list[Any]:
    async def read() -> list[Any]:
        return [each async for each in dispatcher.stream(name, CALL, ReceiveMessageRequest())]

    return asyncio.run(read())


async def answer_ok(call: Call, request: AckMessageRequest) -> AckMessageResponse:
    """Answer with OK."""
    return AckMessageResponse(status=OK)


def handler_that_raises(error: Exception) -> Any:
    """Return a handler that raises this error."""

    async def handler(call: Call, request: Any) -> Any:
        raise error

    return handler


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_call_without_a_handler_is_not_implemented(name: str) -> None:
    dispatcher = dispatch({})
    method = METHODS[name]
    response = (
        responses_of(dispatcher, name)[0] if method.gives_stream else ask(dispatcher, name, method.request())
    )
    assert isinstance(response, method.response)
    assert response.status.code == Code.NOT_IMPLEMENTED and name in response.status.message


def test_the_response_of_the_handler_is_returned() -> None:
    assert ask(dispatch({"AckMessage": answer_ok})).status.code == Code.OK


def test_an_error_of_the_handler_becomes_the_status() -> None:
    refused = ask(dispatch({"AckMessage": handler_that_raises(Refused(Code.INVALID_RECEIPT_HANDLE, "old"))}))
    assert (refused.status.code, refused.status.message) == (Code.INVALID_RECEIPT_HANDLE, "old")
    assert (
        ask(dispatch({"AckMessage": handler_that_raises(OverLimit("wait"))})).status.code
        == Code.TOO_MANY_REQUESTS
    )


def test_an_internal_error_is_logged_and_answered_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        response = ask(dispatch({"AckMessage": handler_that_raises(ZeroDivisionError("secret"))}))
    assert response.status.code == Code.INTERNAL_SERVER_ERROR and "secret" not in response.status.message
    assert "secret" in caplog.text  # the operator needs the text


def test_an_expected_error_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    ask(dispatch({"AckMessage": handler_that_raises(OverLimit("wait"))}))
    assert not caplog.records


def test_a_failure_is_the_last_response_of_a_stream() -> None:
    async def handler(call: Call, request: Any) -> AsyncIterator[ReceiveMessageResponse]:
        yield ReceiveMessageResponse(status=OK)
        raise Refused(Code.TOPIC_NOT_FOUND, "gone")

    responses = responses_of(dispatch({"ReceiveMessage": handler}))
    assert [each.status.code for each in responses] == [Code.OK, Code.TOPIC_NOT_FOUND]


def test_a_caller_without_permission_does_not_reach_the_handler() -> None:
    handled_calls = []

    async def handler(call: Call, request: Any) -> Any:
        handled_calls.append(call)

    def check(call: Call, name: str, request: Any) -> None:
        raise Refused(Code.FORBIDDEN, f"{name}: no")

    dispatcher = dispatch({"AckMessage": handler, "ReceiveMessage": handler}, check)
    assert ask(dispatcher).status.code == Code.FORBIDDEN
    assert [each.status.code for each in responses_of(dispatcher)] == [Code.FORBIDDEN]
    assert not handled_calls


def test_closing_a_stream_closes_the_handler_at_once() -> None:
    ended = []

    async def handler(call: Call, request: Any) -> AsyncIterator[ReceiveMessageResponse]:
        try:
            yield ReceiveMessageResponse(status=OK)
            yield ReceiveMessageResponse(status=OK)
        finally:
            ended.append(True)

    async def read_one() -> None:
        responses: Any = dispatch({"ReceiveMessage": handler}).stream("ReceiveMessage", CALL, None)
        await anext(responses)
        await responses.aclose()
        assert ended

    asyncio.run(read_one())


def test_two_handlers_for_one_call_or_an_unknown_call_are_a_fault() -> None:
    with pytest.raises(AssertionError, match="AckMessage"):
        Dispatch([{"AckMessage": answer_ok}, {"AckMessage": answer_ok}], lambda *_: None)
    with pytest.raises(AssertionError, match="Acknowledge"):
        dispatch({"Acknowledge": answer_ok})


class RecordingReply:
    """A Reply that records its answers and refusals."""

    def __init__(self) -> None:
        self.outcomes: list[Any] = []

    def answer(self, message: bytes) -> None:
        self.outcomes.append(message)

    def refuse(self, error: BaseException) -> None:
        self.outcomes.append(error)


def test_a_direct_handler_answers_by_its_reply() -> None:
    reply = RecordingReply()
    dispatcher = dispatch(
        {"AckMessage": Direct(lambda call, request, reply: reply.answer(b"done")), "Heartbeat": answer_ok}
    )
    assert dispatcher.begin("AckMessage", CALL, AckMessageRequest(), reply)
    assert reply.outcomes == [b"done"]
    assert not dispatcher.begin("Heartbeat", CALL, AckMessageRequest(), reply), "it needs a task"
    assert reply.outcomes == [b"done"]


def test_a_failing_or_forbidden_direct_handler_refuses_by_its_reply() -> None:
    error = OverLimit("wait")

    def begin(call: Call, request: Any, reply: Any) -> None:
        raise error

    def check(call: Call, name: str, request: Any) -> None:
        raise Refused(Code.FORBIDDEN, "no")

    reply = RecordingReply()
    assert dispatch({"AckMessage": Direct(begin)}).begin("AckMessage", CALL, None, reply)
    assert reply.outcomes == [error]
    assert dispatch({"AckMessage": Direct(begin)}, check).begin("AckMessage", CALL, None, reply)
    assert str(reply.outcomes[1]) == "no"
