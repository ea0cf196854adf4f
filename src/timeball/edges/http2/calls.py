"""The parts of a call that do not depend on frames: its method, its headers, and the counts of all calls of an edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.model.access import ANONYMOUS, Caller


class Method(NamedTuple):
    """A gRPC method of an edge. `decode` raises one of `decode_errors` for bytes that are no request."""

    name: str
    takes_stream: bool
    gives_stream: bool
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    decode_errors: tuple[type[Exception], ...] = ()
    outlives_client: bool = False  # the handler continues after its client has gone


@dataclass(slots=True)
class Call:
    """The headers of a call by lower-case name, the caller, and the time it waits for the answer."""

    headers: Mapping[str, str]
    # The client's address without its port.
    peer: str = ""
    remaining_s: float | None = None  # until the client's deadline; None: it has none
    caller: Caller = ANONYMOUS


@dataclass
class Room:
    """The bounds and the counts of all calls of one edge."""

    received: MemoryQuota
    request_bytes_max: int
    calls: SharedLimit
