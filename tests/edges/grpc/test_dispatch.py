"""A call by its name: one status, whatever happens on the way."""

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
    return Dispatch([handlers], check)


def ask(room: Dispatch, name: str = "AckMessage", request: Any = None) -> Any:
    return asyncio.run(room.unary(name, CALL, request or AckMessageRequest()))


def all_of(room: Dispatch, name: str = "ReceiveMessage") -> list[Any]:
    async def read() -> list[Any]:
        return [each async for each in room.stream(name, CALL, ReceiveMessageRequest())]

    return asyncio.run(read())


async def done(call: Call, request: AckMessageRequest) -> AckMessageResponse:
    return AckMessageResponse(status=OK)


def raising(error: Exception) -> Any:
    async def handler(call: Call, request: Any) -> Any:
        raise error

    return handler


@pytest.mark.parametrize("name", sorted(METHODS))
def test_what_no_room_answers_is_not_implemented_and_says_its_name(name: str) -> None:
    room = dispatch({})
    method = METHODS[name]
    found = all_of(room, name)[0] if method.gives_stream else ask(room, name, method.request())
    assert isinstance(found, method.response)
    assert found.status.code == Code.NOT_IMPLEMENTED and name in found.status.message


def test_the_handlers_answer_is_the_answer() -> None:
    assert ask(dispatch({"AckMessage": done})).status.code == Code.OK


def test_an_error_is_told_in_the_status() -> None:
    refused = ask(dispatch({"AckMessage": raising(Refused(Code.INVALID_RECEIPT_HANDLE, "old"))}))
    assert (refused.status.code, refused.status.message) == (Code.INVALID_RECEIPT_HANDLE, "old")
    assert ask(dispatch({"AckMessage": raising(OverLimit("wait"))})).status.code == Code.TOO_MANY_REQUESTS


def test_what_nobody_foresaw_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        found = ask(dispatch({"AckMessage": raising(ZeroDivisionError("secret"))}))
    assert found.status.code == Code.INTERNAL_SERVER_ERROR and "secret" not in found.status.message
    assert "secret" in caplog.text  # where the operator looks


def test_an_error_of_ours_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    ask(dispatch({"AckMessage": raising(OverLimit("wait"))}))
    assert not caplog.records


def test_a_failure_is_the_last_of_a_stream() -> None:
    async def handler(call: Call, request: Any) -> AsyncIterator[ReceiveMessageResponse]:
        yield ReceiveMessageResponse(status=OK)
        raise Refused(Code.TOPIC_NOT_FOUND, "gone")

    found = all_of(dispatch({"ReceiveMessage": handler}))
    assert [each.status.code for each in found] == [Code.OK, Code.TOPIC_NOT_FOUND]


def test_whoever_may_not_is_not_heard() -> None:
    heard = []

    async def handler(call: Call, request: Any) -> Any:
        heard.append(call)

    def check(call: Call, name: str, request: Any) -> None:
        raise Refused(Code.FORBIDDEN, f"{name}: no")

    room = dispatch({"AckMessage": handler, "ReceiveMessage": handler}, check)
    assert ask(room).status.code == Code.FORBIDDEN
    assert [each.status.code for each in all_of(room)] == [Code.FORBIDDEN]
    assert not heard


def test_a_stream_that_nobody_reads_any_more_is_ended_at_once() -> None:
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


def test_two_rooms_may_not_answer_the_same_call() -> None:
    with pytest.raises(AssertionError, match="AckMessage"):
        Dispatch([{"AckMessage": done}, {"AckMessage": done}], lambda *_: None)
    with pytest.raises(AssertionError, match="Acknowledge"):
        dispatch({"Acknowledge": done})


class Told:
    """A reply that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def answer(self, message: bytes) -> None:
        self.told.append(message)

    def refuse(self, error: BaseException) -> None:
        self.told.append(error)


def test_a_direct_handler_tells_its_reply() -> None:
    reply = Told()
    room = dispatch(
        {"AckMessage": Direct(lambda call, request, reply: reply.answer(b"done")), "Heartbeat": done}
    )
    assert room.begin("AckMessage", CALL, AckMessageRequest(), reply)
    assert reply.told == [b"done"]
    assert not room.begin("Heartbeat", CALL, AckMessageRequest(), reply), "it needs a task"
    assert reply.told == [b"done"]


def test_a_direct_handler_that_fails_or_may_not_be_asked_is_refused() -> None:
    error = OverLimit("wait")

    def begin(call: Call, request: Any, reply: Any) -> None:
        raise error

    def check(call: Call, name: str, request: Any) -> None:
        raise Refused(Code.FORBIDDEN, "no")

    reply = Told()
    assert dispatch({"AckMessage": Direct(begin)}).begin("AckMessage", CALL, None, reply)
    assert reply.told == [error]
    assert dispatch({"AckMessage": Direct(begin)}, check).begin("AckMessage", CALL, None, reply)
    assert str(reply.told[1]) == "no"
