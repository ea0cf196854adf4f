"""A call before it is a stream of frames: which method, with which headers, and what all calls of an edge share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from timeball.access import ANONYMOUS, Caller
from timeball.protocols.shared_limits import ByteShares, SharedLimit


class Method(NamedTuple):
    """A call that an edge has. `decode` raises one of `decode_errors` for bytes that are no request."""

    name: str
    takes_stream: bool
    gives_stream: bool
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    decode_errors: tuple[type[Exception], ...] = ()
    outlives_client: bool = False  # what it has begun is done, also for a client that has gone


@dataclass(slots=True)
class Call:
    """Headers by lower-case name, who calls (an address without its port), and how long they wait for the answer."""

    headers: Mapping[str, str]
    peer: str = ""
    remaining_s: float | None = None  # until the client's deadline; None: it has none
    caller: Caller = ANONYMOUS


@dataclass
class Room:
    """Bounds, and the counts of all calls of one edge."""

    received: ByteShares
    request_bytes_max: int
    calls: SharedLimit
