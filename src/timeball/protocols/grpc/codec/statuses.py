"""What a call is answered with when it is not granted: RocketMQ's code, and a sentence that says what to do.

Each error of ours has one code. A room that can tell more precisely what was wrong, as a delay that is too long is
from a name that is too long, raises `Refused` with the code itself. What nobody foresaw is INTERNAL_SERVER_ERROR, and
its text stays with us: clients are told its name and no more.
"""

from __future__ import annotations

from timeball.errors import (
    Forbidden,
    GroupNotFound,
    InvalidDelay,
    InvalidFilter,
    InvalidMessage,
    InvalidName,
    NotFound,
    OutOfRange,
    OverLimit,
    RequestError,
    TimeballError,
    Unauthorized,
    Unavailable,
)
from timeball.protocols.grpc._generated.definition_pb2 import Code, Status

SENTENCE_CHARACTERS_MAX = 1_024  # it may quote what a client has sent

_CODES: list[tuple[type[TimeballError], Code]] = [
    (InvalidDelay, Code.ILLEGAL_DELIVERY_TIME),
    (InvalidFilter, Code.ILLEGAL_FILTER_EXPRESSION),
    (InvalidName, Code.ILLEGAL_TOPIC),  # names of groups are checked where they are read (names.py)
    (InvalidMessage, Code.BAD_REQUEST),
    (GroupNotFound, Code.CONSUMER_GROUP_NOT_FOUND),
    (NotFound, Code.TOPIC_NOT_FOUND),
    (OutOfRange, Code.BAD_REQUEST),
    (Unauthorized, Code.UNAUTHORIZED),
    (Forbidden, Code.FORBIDDEN),
    (RequestError, Code.BAD_REQUEST),
    (OverLimit, Code.TOO_MANY_REQUESTS),
    (Unavailable, Code.HA_NOT_AVAILABLE),
]


class Refused(RequestError):
    """The call is answered with this code and sentence; nothing is logged, since nothing of ours is wrong."""

    code = "refused"

    def __init__(self, code: Code, sentence: str) -> None:
        super().__init__(sentence)
        self.status_code = code


def ok() -> Status:
    """Done as asked."""
    return Status(code=Code.OK, message=Code.Name(Code.OK))


def status(code: Code, sentence: str) -> Status:
    """A status with a sentence of bounded length."""
    return Status(code=code, message=sentence[:SENTENCE_CHARACTERS_MAX])


def status_of(error: BaseException) -> Status:
    """The status for what a handler has raised."""
    if isinstance(error, Refused):
        return status(error.status_code, str(error))
    for kind, code in _CODES:
        if isinstance(error, kind):
            return status(code, str(error))
    if isinstance(error, TimeballError):
        return status(Code.INTERNAL_SERVER_ERROR, str(error))
    return status(
        Code.INTERNAL_SERVER_ERROR, f"internal error: {type(error).__name__}; the broker's log says more"
    )
