"""The table of error codes for all protocols, and the texts that clients get."""

from __future__ import annotations

import logging

import pytest

from timeball.edges.grpc._generated.definition_pb2 import Code
from timeball.edges.grpc.calls import status_of
from timeball.edges.remoting.calls import response_code
from timeball.edges.remoting.codec.codes import ResponseCode
from timeball.edges.shared import error_codes
from timeball.model import errors
from timeball.model.errors import TimeballError


def kinds(root: type[TimeballError] = TimeballError) -> list[type[TimeballError]]:
    """Return a class of errors and all classes derived from it."""
    return [root, *(kind for child in root.__subclasses__() for kind in kinds(child))]


OURS = [kind for kind in kinds() if kind.__module__ == "timeball.model.errors"]


@pytest.mark.parametrize("kind", OURS)
def test_every_error_has_codes_and_keeps_its_text(kind: type[TimeballError]) -> None:
    error = kind("do this instead")
    codes, result = error_codes.codes_of(error), status_of(error)
    assert error_codes.sentence(error) == result.message == "do this instead"
    assert (result.code, response_code(error)) == (Code.Value(codes.grpc), ResponseCode[codes.remoting])
    # The codes of errors that the caller can resolve are below 500.
    is_callers = issubclass(kind, (errors.RequestError, errors.OverLimit))
    assert (result.code < Code.INTERNAL_ERROR) == (codes.http < 500) == is_callers


def test_an_error_without_a_row_uses_the_row_of_its_parent() -> None:
    assert error_codes.codes_of(errors.GroupNotFound("x")).remoting == "SUBSCRIPTION_GROUP_NOT_EXIST"
    assert error_codes.codes_of(errors.Corrupt("x")) == error_codes.codes_of(ValueError("x"))
    assert all(kind in (BaseException, *OURS) for kind in error_codes.TABLE)


def test_error_texts_are_short_and_printable() -> None:
    assert error_codes.sentence(errors.NotFound("a\x1b[31mred\n")) == "a [31mred "
    assert len(error_codes.sentence(errors.NotFound("x" * 100_000))) < 2_100
    assert "secret" not in error_codes.sentence(KeyError("a secret"))


def test_only_internal_faults_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(error_codes.__name__)
    with caplog.at_level("WARNING"):
        error_codes.log_failure(logger, "send", errors.NotFound("x"))
        error_codes.log_failure(logger, "send", errors.OverLimit("full"))
        assert not caplog.records
        error_codes.log_failure(logger, "send", ValueError("secret"))
    assert [(record.levelname, bool(record.exc_info)) for record in caplog.records] == [("ERROR", True)]
