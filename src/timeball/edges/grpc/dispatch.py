"""Call the handler with a call's name, and end the call with exactly one status.

The service definitions list the calls. A call without a handler gets NOT_IMPLEMENTED, with its name in the text. Errors
are returned in the response's own `status`, as RocketMQ's clients expect. A gRPC error is only used for a call that no
handler has seen. Permissions are checked before a handler runs (required_permissions.py).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NamedTuple

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from timeball.edges.grpc._generated import service_pb2
from timeball.edges.grpc._generated.definition_pb2 import Code
from timeball.edges.grpc.calls import Call, Direct, Handlers, Reply, status_of
from timeball.edges.shared.error_codes import Refused, log_failure

logger = logging.getLogger(__name__)

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["MessagingService"]
SERVICE_NAME = _SERVICE.full_name

Admit = Callable[[Any], None]  # finds out the caller of a call from its headers; raises Unauthorized
Check = Callable[[Call, str, Any], None]  # raises if this caller may not make this call


class Method(NamedTuple):
    """A call in the service definitions."""

    name: str
    request: type[Message]
    response: type[Message]
    takes_stream: bool
    gives_stream: bool


def _method(found: MethodDescriptor) -> Method:
    return Method(
        found.name,
        GetMessageClass(found.input_type),
        GetMessageClass(found.output_type),
        bool(found.client_streaming),
        bool(found.server_streaming),
    )


METHODS = {method.name: _method(method) for method in _SERVICE.methods}


class Dispatch:
    """The handlers by the names of their calls.

    `admit` runs with the headers of each call, `check` once its request has arrived. None allows every call.
    """

    def __init__(self, rooms: Iterable[Handlers], check: Check | None, admit: Admit | None = None) -> None:
        self._handlers: dict[str, Any] = {}
        self._check, self.admit = check, admit
        for handlers in rooms:
            unknown = (handlers.keys() - METHODS.keys()) | (handlers.keys() & self._handlers.keys())
            assert not unknown, f"no such call, or two rooms answer it: {sorted(unknown)}"
            self._handlers.update(handlers)
        direct = {name: each for name, each in self._handlers.items() if isinstance(each, Direct)}
        self._direct = {name: each.begin for name, each in direct.items()}
        self._decoders = {name: each.decode for name, each in direct.items() if each.decode is not None}

    def decoder(self, name: str) -> Callable[[bytes], Any]:
        """Return the function that decodes requests of this call. It raises DecodeError."""
        return self._decoders.get(name, METHODS[name].request.FromString)

    def begin(self, name: str, call: Call, request: Any, reply: Reply) -> bool:
        """Begin a call whose handler needs no task, or return False for a call that `unary` or `stream` answers."""
        begin = self._direct.get(name)
        if begin is None:
            return False
        try:
            if self._check is not None:
                self._check(call, name, request)
            begin(call, request, reply)
        except Exception as error:  # of any kind: the client gets an answer
            reply.refuse(error)
        return True

    async def unary(self, name: str, call: Call, request: Any) -> Any:
        """Return the response, of the call's own type. Never raises unless cancelled."""
        try:
            if self._check is not None:
                self._check(call, name, request)
            return await self._handler(name)(call, request)
        except Exception as error:  # of any kind: the client gets an answer
            return self.failed(name, error)

    async def stream(self, name: str, call: Call, request: Any) -> AsyncIterator[Any]:
        """Yield the responses. A failure is the last of them. `request` is itself a stream if the call takes one."""
        responses: Any = None
        try:
            if self._check is not None:
                self._check(call, name, request)
            responses = self._handler(name)(call, request)
            async for response in responses:
                yield response
        except Exception as error:  # as above: the client gets an answer
            yield self.failed(name, error)
        finally:
            if responses is not None:
                # Now, not at garbage collection: messages held for a client that has gone must be given back.
                await responses.aclose()

    def _handler(self, name: str) -> Any:
        handler = self._handlers.get(name)
        if handler is None:
            raise Refused(
                Code.NOT_IMPLEMENTED,
                f"{name} is not implemented by Timeball; docs/protocols/grpc.md has what is",
            )
        return handler

    def failed(self, name: str, error: BaseException) -> Any:
        """Return the response of a call that has failed, and log the failure."""
        log_failure(logger, name, error)
        return METHODS[name].response(status=status_of(error))
