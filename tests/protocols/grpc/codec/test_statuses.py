"""Each error of ours has a code of RocketMQ's, and what is not ours stays with us."""

from __future__ import annotations

import pytest

from timeball import errors
from timeball.errors import TimeballError
from timeball.protocols.grpc._generated.definition_pb2 import Code
from timeball.protocols.grpc.codec.statuses import SENTENCE_CHARACTERS_MAX, Refused, ok, status, status_of


def kinds(root: type[TimeballError] = TimeballError) -> list[type[TimeballError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in kinds(child))]


@pytest.mark.parametrize("kind", [kind for kind in kinds() if "protocols" not in kind.__module__])
def test_every_error_has_a_code_and_keeps_its_sentence(kind: type[TimeballError]) -> None:
    found = status_of(kind("do this instead"))
    assert found.code != Code.OK and found.message == "do this instead"
    # Whose fault it is can be told from the code.
    assert (found.code < Code.INTERNAL_ERROR) == issubclass(kind, (errors.RequestError, errors.OverLimit))


def test_a_room_may_say_the_code_itself() -> None:
    found = status_of(Refused(Code.ILLEGAL_POLLING_TIME, "no"))
    assert (found.code, found.message) == (Code.ILLEGAL_POLLING_TIME, "no")


def test_what_nobody_foresaw_tells_its_name_and_no_more() -> None:
    found = status_of(KeyError("a secret"))
    assert found.code == Code.INTERNAL_SERVER_ERROR
    assert "KeyError" in found.message and "secret" not in found.message


def test_a_sentence_has_a_bound() -> None:
    assert len(status(Code.BAD_REQUEST, "x" * 10_000).message) == SENTENCE_CHARACTERS_MAX
    assert ok().code == Code.OK
