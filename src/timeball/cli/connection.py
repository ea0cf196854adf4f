"""The way to a broker for commands, with the failure that a terminal meets most put into words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from timeball.errors import Unavailable

if TYPE_CHECKING:
    from timeball.client import Timeball


@contextmanager
def connect(endpoint: str) -> Iterator[Timeball]:
    """A client of `endpoint`; Unavailable, naming the endpoint and what to do, when nobody answers."""
    from timeball.client import Timeball

    try:
        with Timeball(endpoint) as ball:
            yield ball
    except Unavailable as error:
        said = str(error)
        if not said.startswith("no broker answers") or "handshake" in said:
            raise
        if "Socket closed" in said and not endpoint.startswith("grpc+tls"):
            # What a broker that speaks TLS alone does to whoever does not.
            raise Unavailable(f"{said}; if the broker has a certificate, write grpc+tls://") from error
        raise Unavailable(
            f"no broker answers at {endpoint}: start one with 'timeball up', or name another with --endpoint"
        ) from error
