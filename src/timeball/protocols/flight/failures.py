"""Our errors as Flight errors: the sentence is the message, the code travels as `extra_info`.

On the wire that is a gRPC status UNKNOWN and four trailers, as Arrow's own server writes them. What is not one of our
errors is logged here and answered with one sentence that tells nothing about the inside.
"""

from __future__ import annotations

import logging

from timeball.errors import TimeballError
from timeball.protocols.error_codes import log_failure, sentence

log = logging.getLogger(__name__)

_IO_ERROR = "5"  # Arrow's StatusCode, which its clients read as a FlightServerError
_DETAIL = "Failed"


def details(error: TimeballError) -> str:
    """Return the text of the gRPC status."""
    return f"{sentence(error)}. Detail: {_DETAIL}"


def trailers(error: TimeballError) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailers that carry this error across."""
    return (
        ("grpc-status-details-bin", error.code.encode()),
        ("x-arrow-status", _IO_ERROR),
        ("x-arrow-status-detail-bin", _DETAIL.encode()),
        ("x-arrow-status-message-bin", sentence(error).encode()),
    )


def internal(error: BaseException, where: str) -> TimeballError:
    """Log what should not have happened; return what may be said about it."""
    log_failure(log, where, error)
    return TimeballError(sentence(error))
