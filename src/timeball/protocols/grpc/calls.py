"""One call of a client, whatever carries it: the vocabulary that all rooms of this edge share.

    unary          async (call, request) -> response
    server stream  async generator (call, request) -> responses
    Telemetry      async generator (call, requests) -> responses

Nothing here, and nothing in the rooms, knows grpcio: `server.py` is the one module that does, and another carrier of
HTTP/2 can take its place. What a handler raises becomes the response's status (dispatch.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from timeball import limits
from timeball.access import ANONYMOUS, Caller
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code

CLIENT_ID = "x-mq-client-id"


@dataclass(slots=True)
class Call:
    """Headers by lower-case name, who calls (an address without its port), and how long they wait for the answer."""

    headers: Mapping[str, str]
    peer: str = ""
    remaining_s: float | None = None  # until the client's deadline; None: it has none
    caller: Caller = ANONYMOUS

    @property
    def client_id(self) -> str:
        """What the client calls itself; raises Refused when it does not say. Nobody takes another account's name."""
        found = self.headers.get(CLIENT_ID, "")
        if not found or len(found) > limits.CLIENT_ID_CHARACTERS_MAX:
            raise Refused(
                Code.CLIENT_ID_REQUIRED,
                f"header {CLIENT_ID}: 1 to {limits.CLIENT_ID_CHARACTERS_MAX} characters, one name a client",
            )
        return found if self.caller is ANONYMOUS else f"{self.caller.name}/{found}"


Unary = Callable[[Call, Any], Awaitable[Any]]
Stream = Callable[[Call, Any], AsyncIterator[Any]]
Handlers = dict[str, Unary | Stream]  # by the name of the call in the service's definition
