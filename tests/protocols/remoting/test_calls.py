"""Typed access to a request, and one code for each error of ours."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from timeball.errors import InvalidDelay, NotFound, OutOfRange, StorageError, Unavailable
from timeball.protocols.error_codes import Refused
from timeball.protocols.remoting.calls import Call, response_code
from timeball.protocols.remoting.codec.codes import ResponseCode
from timeball.protocols.remoting.codec.frame import BINARY, Command
from timeball.protocols.remoting.connection import Connection


class Fields(msgspec.Struct):
    topic: str
    queueId: int = -1  # noqa: N815
    oway: bool = False


def call(**command: object) -> Call:
    loop = asyncio.new_event_loop()
    try:
        return Call(Connection(lambda *_: None, set(), loop), Command(code=10, **command))  # type: ignore[arg-type]
    finally:
        loop.close()


def test_text_becomes_what_the_field_says() -> None:
    found = call(ext={"topic": "t", "queueId": "3", "oway": "true", "unknown": "x"}).fields(Fields)
    assert found == Fields("t", 3, True)


@pytest.mark.parametrize("ext", [{}, {"topic": "t", "queueId": "three"}])
def test_a_bad_field_is_named(ext: dict[str, str]) -> None:
    with pytest.raises(Refused, match=r"topic|queueId") as error:
        call(ext=ext).fields(Fields)
    assert error.value.protocol_code == ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"topic": 7}', b"\xff", b"[" * 100_000])
def test_a_bad_body_is_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="code 10: the body"):
        call(body=body).body(Fields)


def test_an_answer_repeats_opaque_and_serialisation() -> None:
    answer = call(opaque=77, serialisation=BINARY).answer(ext={"a": "b"})
    assert (answer.opaque, answer.serialisation, answer.is_response, answer.ext) == (
        77,
        BINARY,
        True,
        {"a": "b"},
    )


def test_errors_have_codes() -> None:
    assert response_code(NotFound("x")) == ResponseCode.TOPIC_NOT_EXIST
    assert response_code(InvalidDelay("x")) == ResponseCode.MESSAGE_ILLEGAL
    assert response_code(OutOfRange("x")) == ResponseCode.INVALID_PARAMETER
    assert response_code(Unavailable("x")) == ResponseCode.SERVICE_NOT_AVAILABLE
    assert response_code(StorageError("x")) == response_code(ValueError()) == ResponseCode.SYSTEM_ERROR
