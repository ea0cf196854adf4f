"""Translate errors to the code and the text that a client gets.

TABLE gives each error class a code for remoting, gRPC and HTTP. Flight uses the error's own `code`. A class that is not
in the table uses the row of its nearest parent class. A handler that needs a more specific code (for a delay that is
too long, for example) raises `Refused` with a code of its protocol. For an internal fault, clients get only the class
name of the error. Its text goes to the broker's log.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from timeball.model.errors import (
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

TEXT_CHARACTERS_MAX = 2_000  # an error text may quote a client's input of any length


class Codes(NamedTuple):
    """The codes of one error class: names in RocketMQ's ResponseCode and in its gRPC enum Code, and an HTTP status."""

    remoting: str
    grpc: str
    http: int


TABLE: dict[type[BaseException], Codes] = {
    BaseException: Codes("SYSTEM_ERROR", "INTERNAL_SERVER_ERROR", 500),
    RequestError: Codes("SYSTEM_ERROR", "BAD_REQUEST", 400),
    InvalidMessage: Codes("MESSAGE_ILLEGAL", "BAD_REQUEST", 400),
    # Over gRPC, the names of groups are checked where they are read (grpc/calls.py).
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
    """An error with a specific code of one protocol, which the client gets with the text. Nothing is logged."""

    code = "refused"

    def __init__(self, protocol_code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.protocol_code = protocol_code


def codes_of(error: BaseException) -> Codes:
    """Find the codes of an error's class, or of its nearest parent class in TABLE."""
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)


def sentence(error: BaseException) -> str:
    """Build the text that the client gets for an error (`shorten`). For an internal fault, it names only the class."""
    if not isinstance(error, TimeballError):
        return f"internal error: {type(error).__name__}; the broker's log says more"
    return shorten(str(error))


def shorten(text: str) -> str:
    """Replace control characters by spaces, and cut the text after TEXT_CHARACTERS_MAX characters."""
    if len(text) <= TEXT_CHARACTERS_MAX and text.isprintable():
        return text
    clean = "".join(c if c.isprintable() else " " for c in text[:TEXT_CHARACTERS_MAX])
    return clean if len(text) <= TEXT_CHARACTERS_MAX else f"{clean} …"


def log_failure(logger: logging.Logger, request: str, error: BaseException) -> None:
    """Log an internal fault, with its stack. A TimeballError is not logged, because the client gets its text."""
    if not isinstance(error, TimeballError):
        logger.error("request failed request=%s reason=%s", request, error, exc_info=error)
