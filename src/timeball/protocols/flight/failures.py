"""Our errors as Flight errors: the sentence is the message, the code travels as `extra_info`.

On the wire that is a gRPC status UNKNOWN and four trailers, as Arrow's own server writes them. What is not one of our
errors is logged here and answered with one sentence that tells nothing about the inside.
"""

from __future__ import annotations

import logging

from timeball.errors import TimeballError
from timeball.protocols.flight.codec import shorten

log = logging.getLogger(__name__)

INTERNAL = "an error inside the broker; its log says more"

_IO_ERROR = "5"  # Arrow's StatusCode, which its clients read as a FlightServerError
_DETAIL = "Failed"


def details(error: TimeballError) -> str:
    """Return the text of the gRPC status."""
    return f"{shorten(str(error))}. Detail: {_DETAIL}"


def trailers(error: TimeballError) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailers that carry this error across."""
    return (
        ("grpc-status-details-bin", error.code.encode()),
        ("x-arrow-status", _IO_ERROR),
        ("x-arrow-status-detail-bin", _DETAIL.encode()),
        ("x-arrow-status-message-bin", shorten(str(error)).encode()),
    )


def internal(error: BaseException, where: str) -> TimeballError:
    """Log what should not have happened; returns what may be said about it."""
    log.error("verb failed verb=%s", where, exc_info=error)
    return TimeballError(INTERNAL)
