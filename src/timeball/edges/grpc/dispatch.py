"""Find the handler of a call by its name, check permissions, run the handler, and convert its error to a response.

RocketMQ's service definition lists the calls. A call without a handler gets NOT_IMPLEMENTED, with its name in the text.
Permissions are checked before a handler runs. Errors are returned in the `status` field of the response, as RocketMQ's
clients expect. Only calls that do not reach this module end with a gRPC error.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NamedTuple

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from timeball.broker.policy import Policy
from timeball.edges.grpc._generated import service_pb2
from timeball.edges.grpc._generated.definition_pb2 import Code, Resource, Settings
from timeball.edges.grpc.calls import Call, Direct, Handlers, Reply, group_name, status_of, topic_name
from timeball.edges.grpc.codec.messages_in import topics_in_send
from timeball.edges.shared.error_codes import Refused, log_failure
from timeball.model.access import ANONYMOUS, Caller, Verb

logger = logging.getLogger(__name__)

# ---- the dispatch of calls -----------------------------------------------------------------------------------

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["MessagingService"]
SERVICE_NAME = _SERVICE.full_name

Admit = Callable[[Any], None]  # sets the caller of a call from its headers. Raises Unauthorized
Check = Callable[[Call, str, Any], None]  # (call, name, request): raises if the caller may not make this call


class Method(NamedTuple):
    """A call in RocketMQ's service definition, with protobuf's classes for its messages."""

    name: str
    request: type[Message]
    response: type[Message]
    takes_stream: bool
    gives_stream: bool


def _method(descriptor: MethodDescriptor) -> Method:
    """Convert protobuf's description of a call."""
    return Method(
        descriptor.name,
        GetMessageClass(descriptor.input_type),
        GetMessageClass(descriptor.output_type),
        bool(descriptor.client_streaming),
        bool(descriptor.server_streaming),
    )


METHODS = {method.name: _method(method) for method in _SERVICE.methods}


class Dispatch:
    """Runs the handlers of all calls.

    `handler_tables` has the handlers of each handler class by the names of their calls. `admit` runs when the headers
    of a call have arrived, `check` when its request has arrived. Without `check`, every call is allowed.
    """

    def __init__(
        self, handler_tables: Iterable[Handlers], check: Check | None, admit: Admit | None = None
    ) -> None:
        self._handlers: dict[str, Any] = {}
        self._check, self.admit = check, admit
        for handlers in handler_tables:
            invalid_names = (handlers.keys() - METHODS.keys()) | (handlers.keys() & self._handlers.keys())
            assert not invalid_names, f"no such call, or two handlers for it: {sorted(invalid_names)}"
            self._handlers.update(handlers)
        direct_handlers = {
            name: handler for name, handler in self._handlers.items() if isinstance(handler, Direct)
        }
        self._direct = {name: handler.begin for name, handler in direct_handlers.items()}
        self._decoders = {
            name: handler.decode for name, handler in direct_handlers.items() if handler.decode is not None
        }

    def decoder(self, name: str) -> Callable[[bytes], Any]:
        """Return the function that decodes requests of this call from bytes. It raises DecodeError."""
        return self._decoders.get(name, METHODS[name].request.FromString)

    def begin(self, name: str, call: Call, request: Any, reply: Reply) -> bool:
        """Run a direct handler. Returns False if the call has none, and `unary` or `stream` must answer it.

        An error refuses the call by `reply`.
        """
        begin = self._direct.get(name)
        if begin is None:
            return False
        try:
            if self._check is not None:
                self._check(call, name, request)
            begin(call, request, reply)
        except Exception as error:  # of any kind: the client must get an answer
            reply.refuse(error)
        return True

    async def unary(self, name: str, call: Call, request: Any) -> Any:
        """Return the handler's response, or a response with its error. Raises only CancelledError."""
        try:
            if self._check is not None:
                self._check(call, name, request)
            return await self._handler(name)(call, request)
        except Exception as error:  # of any kind: the client must get an answer
            return self.failure_response(name, error)

    async def stream(self, name: str, call: Call, request: Any) -> AsyncIterator[Any]:
        """Yield the handler's responses. If it fails, the last response has the error.

        `request` is an async iterator if the call takes a stream of requests.
        """
        responses: Any = None
        try:
            if self._check is not None:
                self._check(call, name, request)
            responses = self._handler(name)(call, request)
            async for response in responses:
                yield response
        except Exception as error:  # of any kind: the client must get an answer
            yield self.failure_response(name, error)
        finally:
            if responses is not None:
                # Now, not at garbage collection: if the client has disconnected, the handler gives its messages back.
                await responses.aclose()

    def _handler(self, name: str) -> Any:
        """Look up the handler of a call. Raises Refused if it has none."""
        handler = self._handlers.get(name)
        if handler is None:
            raise Refused(
                Code.NOT_IMPLEMENTED,
                f"{name} is not implemented by Timeball; docs/protocols/grpc.md lists the calls that are",
            )
        return handler

    def failure_response(self, name: str, error: BaseException) -> Any:
        """Log the failure of a call, and create its response."""
        log_failure(logger, name, error)
        return METHODS[name].response(status=status_of(error))


# ---- required permissions ------------------------------------------------------------------------------------
# REQUIRED_PERMISSIONS lists the permission that each call requires, and the fields that name its topics and group. A
# call without an entry requires ADMIN. A Telemetry stream names its topics and its group in its messages. So the
# handler that reads the stream checks them (`check_settings`).

FindTopics = Callable[[Any], Iterable[Resource]]  # finds the topics in a request


class RequiredPermission(NamedTuple):
    """The permission that a call requires on its topics. `on_group`: also on the group in its field `group`."""

    verb: Verb
    find_topics: FindTopics = lambda request: ()
    on_group: bool = False


def _topic_field(request: Any) -> list[Resource]:
    return [request.topic]


def _topic_of_queue(request: Any) -> list[Resource]:
    return [request.message_queue.topic]


REQUIRED_PERMISSIONS = {
    "QueryRoute": RequiredPermission(Verb.LOOK, _topic_field),
    "QueryOffset": RequiredPermission(Verb.LOOK, _topic_of_queue),
    "SendMessage": RequiredPermission(Verb.SEND, topics_in_send),
    "EndTransaction": RequiredPermission(Verb.SEND, _topic_field),
    "RecallMessage": RequiredPermission(Verb.CANCEL, _topic_field),
    "QueryAssignment": RequiredPermission(Verb.RECEIVE, _topic_field, on_group=True),
    "AckMessage": RequiredPermission(Verb.RECEIVE, _topic_field, on_group=True),
    "ChangeInvisibleDuration": RequiredPermission(Verb.RECEIVE, _topic_field, on_group=True),
    "ForwardMessageToDeadLetterQueue": RequiredPermission(Verb.RECEIVE, _topic_field, on_group=True),
    "ReceiveMessage": RequiredPermission(Verb.RECEIVE, _topic_of_queue, on_group=True),
    "PullMessage": RequiredPermission(Verb.RECEIVE, _topic_of_queue, on_group=True),
    "UpdateOffset": RequiredPermission(Verb.RECEIVE, _topic_of_queue, on_group=True),
    "GetOffset": RequiredPermission(Verb.RECEIVE, _topic_of_queue, on_group=True),
}
# Calls that any account may make: they concern the client itself, or name their topics and groups in later messages.
ACCOUNT_ONLY = frozenset({"Telemetry", "Heartbeat", "NotifyClientTermination"})


def check(policy: Policy, call: Call, name: str, request: Any) -> None:
    """Check that the caller has the permissions that the call requires. Raises Unauthorized, Forbidden, Refused."""
    if call.caller is ANONYMOUS or name in ACCOUNT_ONLY:
        return
    permission = REQUIRED_PERMISSIONS.get(name, RequiredPermission(Verb.ADMIN))
    group = group_name(request.group) if permission.on_group else None
    topics: list[str | None] = [topic_name(topic) for topic in permission.find_topics(request)]
    for topic in topics or [None]:
        policy.allow(call.caller, permission.verb, topic=topic, group=group)


def check_settings(policy: Policy, caller: Caller, settings: Settings) -> None:
    """Check that the caller may use the topics and the group in its settings.

    Raises Unauthorized, Forbidden, Refused.
    """
    for topic in settings.publishing.topics:
        # A producer of the topic is sent half messages of it, when it is asked about their transactions.
        policy.allow(caller, Verb.SEND, topic=topic_name(topic))
    if settings.HasField("subscription"):
        policy.allow(caller, Verb.RECEIVE, group=group_name(settings.subscription.group))
