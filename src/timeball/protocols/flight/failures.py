"""Our errors as Flight errors: the sentence is the message, the code travels as `extra_info`.

Flight puts the traceback of any other exception into the answer, so every handler runs inside `answering`:
what is not one of our errors is logged here and answered with one sentence that tells nothing about the
inside.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow.flight as flight

from timeball.errors import TimeballError
from timeball.protocols.flight.codec import shorten

log = logging.getLogger(__name__)

INTERNAL = "an error inside the broker; its log says more"


def to_flight(error: TimeballError) -> flight.FlightServerError:
    """The Flight error that carries this one across."""
    return flight.FlightServerError(shorten(str(error)), extra_info=error.code.encode())


def internal(error: BaseException, where: str) -> TimeballError:
    """Log what should not have happened; returns what may be said about it."""
    log.error("%s failed", where, exc_info=error)
    return TimeballError(INTERNAL)


@contextmanager
def answering(where: str) -> Iterator[None]:
    """Turn every exception of the block into a Flight error."""
    try:
        yield
    except TimeballError as error:
        raise to_flight(error) from None
    except flight.FlightError:
        raise
    except Exception as error:  # Flight would send its traceback to the client
        raise to_flight(internal(error, where)) from None
