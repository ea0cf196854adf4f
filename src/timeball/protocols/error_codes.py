"""What a client is told when a request is not granted: one table of codes, one rule for the sentence.

Each error of ours has a code of each protocol; over Flight it is the error's own `code`. An error that is not in the
table has its parent's row. A handler that can tell more precisely what was wrong, as a delay that is too long is from
a name that is too long, raises `Refused` with its protocol's code itself. Of a fault of ours clients are told the name
and no more: its text is for the broker's log.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from timeball.errors import (
    Conflict,
    Forbidden,
    GroupNotFound,
    InvalidDelay,
    InvalidFilter,
    InvalidMessage,
    InvalidName,
    InvalidReceipt,
    NotFound,
    OutOfRange,
    OverLimit,
    RequestError,
    TimeballError,
    Unauthorized,
    Unavailable,
)

SENTENCE_CHARACTERS_MAX = 2_000  # it may quote what a client has sent


class Codes(NamedTuple):
    """The codes of one error: names of RocketMQ's ResponseCode and of its gRPC Code, and an HTTP status."""

    remoting: str
    grpc: str
    http: int


TABLE: dict[type[BaseException], Codes] = {
    BaseException: Codes("SYSTEM_ERROR", "INTERNAL_SERVER_ERROR", 500),
    RequestError: Codes("SYSTEM_ERROR", "BAD_REQUEST", 400),
    InvalidMessage: Codes("MESSAGE_ILLEGAL", "BAD_REQUEST", 400),
    # Over gRPC names of groups are checked where they are read (grpc/calls.py).
    InvalidName: Codes("INVALID_PARAMETER", "ILLEGAL_TOPIC", 400),
    Conflict: Codes("MESSAGE_ILLEGAL", "BAD_REQUEST", 409),
    InvalidDelay: Codes("MESSAGE_ILLEGAL", "ILLEGAL_DELIVERY_TIME", 400),
    InvalidFilter: Codes("SUBSCRIPTION_PARSE_FAILED", "ILLEGAL_FILTER_EXPRESSION", 400),
    InvalidReceipt: Codes("NO_MESSAGE", "INVALID_RECEIPT_HANDLE", 400),
    Unauthorized: Codes("NO_PERMISSION", "UNAUTHORIZED", 401),
    Forbidden: Codes("NO_PERMISSION", "FORBIDDEN", 403),
    NotFound: Codes("TOPIC_NOT_EXIST", "TOPIC_NOT_FOUND", 404),
    GroupNotFound: Codes("SUBSCRIPTION_GROUP_NOT_EXIST", "CONSUMER_GROUP_NOT_FOUND", 404),
    OutOfRange: Codes("INVALID_PARAMETER", "BAD_REQUEST", 416),
    OverLimit: Codes("SYSTEM_BUSY", "TOO_MANY_REQUESTS", 429),
    Unavailable: Codes("SERVICE_NOT_AVAILABLE", "HA_NOT_AVAILABLE", 503),
}


class Refused(RequestError):
    """The request is answered with this code of its protocol, and this sentence; nothing is logged."""

    code = "refused"

    def __init__(self, protocol_code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.protocol_code = protocol_code


def codes_of(error: BaseException) -> Codes:
    """Return the codes of an error: those of its class, or of the nearest of its parents."""
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)


def sentence(error: BaseException) -> str:
    """Return what a client is told of an error, in printable characters and of bounded length."""
    if not isinstance(error, TimeballError):
        return f"internal error: {type(error).__name__}; the broker's log says more"
    return shorten(str(error))


def shorten(text: str) -> str:
    """Return a text without control characters, and no longer than a screen."""
    if len(text) <= SENTENCE_CHARACTERS_MAX and text.isprintable():
        return text
    clean = "".join(c if c.isprintable() else " " for c in text[:SENTENCE_CHARACTERS_MAX])
    return clean if len(text) <= SENTENCE_CHARACTERS_MAX else f"{clean} …"


def log_failure(logger: logging.Logger, request: str, error: BaseException) -> None:
    """Log a fault of ours, with its stack; of an error that says what to do the client is told, and that is enough."""
    if not isinstance(error, TimeballError):
        logger.error("request failed request=%s reason=%s", request, error, exc_info=error)
