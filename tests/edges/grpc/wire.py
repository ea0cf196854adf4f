"""A minimal RocketMQ 5 client: sends single calls over a real connection, and returns the responses.

Unlike RocketMQ's own clients (tests/interop), it sends any request, also an invalid one.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import grpc
from tests.node_fixture import BOUND_S, RunningNode

from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc._generated import service_pb2 as service
from timeball.edges.grpc.dispatch import METHODS, SERVICE_NAME

# Tests of other folders import the two modules by these names.
d, s = definition, service

OK = definition.Code.OK


class Wire:
    """A connection of one client id. `headers`: further headers, with _ for -."""

    def __init__(self, port: int, client_id: str = "client-1", **headers: str) -> None:
        # A separate pool, because otherwise all channels of a process share a connection, and none can be cut alone.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
        self.client_id = client_id
        headers_by_name = {
            "x-mq-client-id": client_id,
            **{name.replace("_", "-"): text for name, text in headers.items()},
        }
        self._metadata = [(name, text) for name, text in headers_by_name.items() if text]

    @classmethod
    def to(cls, node: RunningNode, client_id: str = "client-1", **headers: str) -> Wire:
        return cls(node.node.grpc_port, client_id, **headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def ask(self, name: str, request: Any, timeout_s: float = BOUND_S) -> Any:
        """Make a unary call, and return its response, whatever its status."""
        return self._call("unary_unary", name)(request, timeout=timeout_s, metadata=self._metadata)

    def ask_ok(self, name: str, request: Any, timeout_s: float = BOUND_S) -> Any:
        """Make a unary call, whose status must be OK."""
        response = self.ask(name, request, timeout_s)
        assert response.status.code == OK, response.status
        return response

    def later(self, name: str, request: Any, timeout_s: float = BOUND_S) -> Any:
        """Begin a unary call, and return a future for its response."""
        return self._call("unary_unary", name).future(request, timeout=timeout_s, metadata=self._metadata)

    def stream(self, name: str, request: Any, timeout_s: float | None = BOUND_S) -> Any:
        """Begin a call with a stream of responses, and return their iterator, which can be cancelled."""
        return self._call("unary_stream", name)(request, timeout=timeout_s, metadata=self._metadata)

    def receive(self, group: str, topic: str, **fields: Any) -> list[Any]:
        """Make a ReceiveMessage call, whose status must be OK or MESSAGE_NOT_FOUND, and return its messages.

        `fields`: see `receive_request`.
        """
        responses = list(self.stream("ReceiveMessage", receive_request(group, topic, **fields)))
        statuses = [each.status for each in responses if each.WhichOneof("content") == "status"]
        assert [status.code for status in statuses] in ([OK], [definition.Code.MESSAGE_NOT_FOUND]), statuses
        return [each.message for each in responses if each.WhichOneof("content") == "message"]

    def telemetry(self, settings: definition.Settings | None = None) -> Telemetry:
        """Open a Telemetry stream. With settings, send them and wait until the broker accepts them."""
        opened = Telemetry(self._call("stream_stream", "Telemetry"), self._metadata)
        if settings is not None:
            opened.send(service.TelemetryCommand(settings=settings))
            assert next(opened).status.code == OK
        return opened

    def _call(self, kind: str, name: str) -> Any:
        """Return a function of the channel that makes a call. `kind`: unary_unary, unary_stream or stream_stream."""
        method = METHODS[name]
        return getattr(self._channel, kind)(
            f"/{SERVICE_NAME}/{name}",
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )


class Telemetry:
    """A Telemetry stream: `send` sends a command, and `next` waits for a command of the broker."""

    def __init__(self, call: Any, metadata: list[tuple[str, str]]) -> None:
        self._out: queue.SimpleQueue[service.TelemetryCommand | None] = queue.SimpleQueue()
        self._call = call(iter(self._out.get, None), metadata=metadata, timeout=BOUND_S)

    def __iter__(self) -> Iterator[service.TelemetryCommand]:
        return self

    def __next__(self) -> service.TelemetryCommand:
        command: service.TelemetryCommand = next(self._call)
        return command

    def send(self, command: service.TelemetryCommand) -> None:
        self._out.put(command)

    def end(self) -> None:
        """End the client's side. The broker may still send commands."""
        self._out.put(None)

    def cut(self) -> None:
        """Cancel the stream, as if the client had disconnected."""
        self._call.cancel()
        self._out.put(None)


def consumer_settings(
    group: str, client_type: int = definition.ClientType.SIMPLE_CONSUMER
) -> definition.Settings:
    """Create the settings of a consumer."""
    subscription = definition.Subscription(group=definition.Resource(name=group))
    return definition.Settings(client_type=definition.ClientType.Name(client_type), subscription=subscription)


def producer_settings(*topics: str) -> definition.Settings:
    """Create the settings of a producer."""
    publishing = definition.Publishing(topics=[definition.Resource(name=topic) for topic in topics])
    return definition.Settings(client_type=definition.ClientType.PRODUCER, publishing=publishing)


def receive_request(
    group: str,
    topic: str,
    *,
    queue_id: int = -1,
    invisible_ms: int | None = 60_000,
    wait_ms: int | None = None,
    filter_text: str = "*",
    sql: bool = False,
    **fields: Any,
) -> service.ReceiveMessageRequest:
    """A request for any queue of a topic, unless the fields say otherwise."""
    kind = definition.FilterType.SQL if sql else definition.FilterType.TAG
    request = service.ReceiveMessageRequest(
        group=definition.Resource(name=group),
        message_queue=definition.MessageQueue(topic=definition.Resource(name=topic), id=queue_id),
        filter_expression=definition.FilterExpression(type=kind, expression=filter_text),
        **{"batch_size": 32, **fields},
    )
    if invisible_ms is not None:
        request.invisible_duration.FromMilliseconds(invisible_ms)
    if wait_ms is not None:
        request.long_polling_timeout.FromMilliseconds(wait_ms)
    return request
