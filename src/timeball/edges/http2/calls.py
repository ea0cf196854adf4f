"""The parts of a gRPC call that do not depend on HTTP/2: its method, its headers, and the limits of its edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.model.access import ANONYMOUS, Caller


class Method(NamedTuple):
    """A gRPC method of an edge.

    `takes_stream` and `gives_stream` state whether it is client streaming or server streaming. `decode` converts bytes
    to a request, and raises one of `decode_errors` for bytes that are no request. `encode` converts a response to
    bytes.
    """

    name: str
    takes_stream: bool
    gives_stream: bool
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    decode_errors: tuple[type[Exception], ...] = ()
    outlives_client: bool = False  # the handler continues after its client has disconnected


@dataclass(slots=True)
class Call:
    """The facts of a call for its handler: the headers, the client, and the client's deadline."""

    headers: Mapping[str, str]  # by lower-case name
    peer: str = ""  # the client's address without its port
    remaining_s: float | None = None  # from the begin of the call to the client's deadline, if it has one
    caller: Caller = ANONYMOUS  # the account, once it has been checked


@dataclass
class Room:
    """The limits that all calls of one edge share, with their counters."""

    received: MemoryQuota  # the bytes of requests that have arrived, or are allowed to arrive
    request_bytes_max: int  # of one request, decompressed
    calls: SharedLimit  # the number of open calls
