"""Flight's errors turned back into ours, so that a caller catches one family whatever the wire is.

The broker's errors travel as a code and a sentence (docs/protocols). What Flight itself reports means that no answer
came, and becomes Unavailable, so that a program can tell "wait" from "give up". gRPC's debug context is cut off: it
names no remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.flight as flight

from timeball.errors import OverLimit, TimeballError, Unavailable, from_code

# gRPC's own words; it says them before the broker sees a request.
TOO_LONG = "Received message larger than max"
_TAILS = (". Detail: Failed", ". gRPC client debug context", ". Client context")


def translate(error: BaseException, endpoint: str) -> TimeballError:
    """Return our error for what Flight raised while speaking to `endpoint`."""
    if isinstance(error, TimeballError):
        return error
    text = str(error)
    for tail in _TAILS:
        text = text.split(tail, 1)[0]
    if isinstance(error, flight.FlightServerError) and error.extra_info:
        return from_code(bytes(error.extra_info).decode("ascii", "replace"), text)
    if TOO_LONG in text:
        return OverLimit(f"{endpoint} takes no request as long as this one: name fewer things at once")
    if isinstance(error, flight.FlightTimedOutError):
        return Unavailable(f"{endpoint} did not answer in time")
    if isinstance(error, (flight.FlightUnavailableError, flight.FlightCancelledError)):
        reason = text.rsplit("with message: ", 1)[-1]
        return Unavailable(f"no broker answers at {endpoint}; is `timeball serve` running there? ({reason})")
    if isinstance(error, flight.FlightError):
        return Unavailable(f"the connection to {endpoint} failed: {text}")
    return TimeballError(f"{endpoint} answered with something else than a broker would: {text}")


@contextmanager
def translated(endpoint: str) -> Iterator[None]:
    """Raise our errors instead of Flight's from the block."""
    try:
        yield
    except (pa.ArrowException, flight.FlightError) as error:
        raise translate(error, endpoint) from error
