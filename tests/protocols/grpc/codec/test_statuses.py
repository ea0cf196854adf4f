"""Each error of ours has a code of RocketMQ's, and what is not ours stays with us."""

from __future__ import annotations

from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code
from timeball.protocols.grpc.codec.statuses import ok, status, status_of


def test_a_room_may_say_the_code_itself() -> None:
    found = status_of(Refused(Code.ILLEGAL_POLLING_TIME, "no"))
    assert (found.code, found.message) == (Code.ILLEGAL_POLLING_TIME, "no")


def test_what_nobody_foresaw_tells_its_name_and_no_more() -> None:
    found = status_of(KeyError("a secret"))
    assert found.code == Code.INTERNAL_SERVER_ERROR
    assert "KeyError" in found.message and "secret" not in found.message


def test_a_sentence_has_a_bound() -> None:
    assert len(status(Code.BAD_REQUEST, "x" * 10_000).message) < 2_100
    assert ok().code == Code.OK
