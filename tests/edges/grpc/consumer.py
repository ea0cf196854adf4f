"""A consumer that calls the edge's handlers without a connection, on a node in memory with a manual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.edges.grpc.wire import consumer_settings, definition, receive_request, service

from timeball.edges.grpc.calls import CLIENT_ID, Call, store_settings
from timeball.edges.grpc.dispatch import METHODS, Dispatch
from timeball.edges.grpc.edge import GrpcEdge

GROUP, TOPIC, CLIENT = "g", "orders", "client-1"
MINUTE_MS = 60_000


class FutureReply:
    """The Reply of a direct handler. The future `response` gets the decoded response."""

    def __init__(self, dispatch: Dispatch, name: str) -> None:
        self._dispatch, self._name = dispatch, name
        self.response: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answer(self, message: bytes) -> None:
        self.response.set_result(METHODS[self._name].response.FromString(message))

    def refuse(self, error: BaseException) -> None:
        self.response.set_result(self._dispatch.failure_response(self._name, error))


async def answer(dispatch: Dispatch, name: str, call: Call, request: Any) -> Any:
    """Make a call with one response, whether its handler is direct or unary, and return the response."""
    reply = FutureReply(dispatch, name)
    if dispatch.begin(name, call, request, reply):
        return await reply.response
    return await dispatch.unary(name, call, request)


class Consumer:
    """One client of an edge. Each method makes a call."""

    def __init__(self, world: World, edge: GrpcEdge, name: str = CLIENT, peer: str = "10.0.0.1") -> None:
        self.world, self.edge, self.name, self.peer = world, edge, name, peer

    def call(self, remaining_s: float | None = None) -> Call:
        """Return the facts of a call of this client."""
        return Call({CLIENT_ID: self.name}, self.peer, remaining_s)

    def connect(self, group: str = GROUP) -> None:
        """Register the client with the settings of a consumer."""
        context = self.edge.context
        store_settings(context.sessions, self.name, consumer_settings(group), context.monotonic_ms())

    async def send(self, count: int = 1, queues: int = 2, **columns: object) -> None:
        """Create the topic, and send `count` messages."""
        await self.world.broker.create_topic(TOPIC, queues)
        await self.world.broker.send(batch(count, **columns))

    async def responses(self, name: str, request: Any, remaining_s: float | None = None) -> list[Any]:
        """Make a call that streams, and return its responses."""
        return [each async for each in self.edge.dispatch.stream(name, self.call(remaining_s), request)]

    async def receive(
        self, group: str = GROUP, topic: str = TOPIC, **fields: Any
    ) -> list[definition.Message]:
        """Receive messages, by default without waiting. A missing topic is created first."""
        if self.world.broker.tables.topics.find_topic(topic) is None:
            await self.world.broker.create_topic(topic, 1 if topic.startswith("%") else 2)
        responses = await self.responses(
            "ReceiveMessage", receive_request(group, topic, **{"wait_ms": 0, **fields})
        )
        assert responses[0].status.code in (definition.Code.OK, definition.Code.MESSAGE_NOT_FOUND), responses[
            0
        ]
        return [each.message for each in responses if each.WhichOneof("content") == "message"]

    async def refused(self, request: service.ReceiveMessageRequest, remaining_s: float | None = None) -> int:
        """Make a ReceiveMessage call that must have one response, and return its code."""
        (only,) = await self.responses("ReceiveMessage", request, remaining_s)
        return int(only.status.code)

    async def ask(self, name: str, request: Any) -> Any:
        """Make a unary call, and return its response."""
        return await answer(self.edge.dispatch, name, self.call(), request)

    async def ack(
        self, *messages: definition.Message, group: str = GROUP, topic: str = TOPIC
    ) -> service.AckMessageResponse:
        """Acknowledge messages by their receipt handles."""
        entries = [
            service.AckMessageEntry(
                message_id=each.system_properties.message_id,
                receipt_handle=each.system_properties.receipt_handle,
            )
            for each in messages
        ]
        request = service.AckMessageRequest(group=resource(group), topic=resource(topic), entries=entries)
        response: service.AckMessageResponse = await self.ask("AckMessage", request)
        return response

    async def change(
        self, message: definition.Message, ms: int | None, **fields: Any
    ) -> service.ChangeInvisibleDurationResponse:
        """Change the invisible time of a message to `ms`, None for a request without a duration."""
        request = service.ChangeInvisibleDurationRequest(
            group=resource(GROUP), topic=resource(TOPIC),
            receipt_handle=message.system_properties.receipt_handle, **fields,
        )  # fmt: skip
        if ms is not None:
            request.invisible_duration.FromMilliseconds(ms)
        response: service.ChangeInvisibleDurationResponse = await self.ask("ChangeInvisibleDuration", request)
        return response

    async def dead_letter(self, message: definition.Message) -> int:
        """Forward a message to the dead letters, and return the code."""
        request = service.ForwardMessageToDeadLetterQueueRequest(
            group=resource(GROUP), topic=resource(TOPIC), receipt_handle=message.system_properties.receipt_handle,
        )  # fmt: skip
        return int((await self.ask("ForwardMessageToDeadLetterQueue", request)).status.code)

    async def pass_time(self, ms: int = MINUTE_MS) -> None:
        """Advance the clock, and wait until messages whose invisible time is over have come back."""
        self.world.broker.consuming.wake()
        await self.world.advance(ms)
        self.world.broker.consuming.wake()
        leases = self.world.broker.consuming.leases
        await self.world.until(
            lambda: (
                not any(
                    held.deadline_ms <= self.world.clock.wall
                    for queue_leases in leases.all()
                    for held in queue_leases.in_flight.values()
                )
            ),
            "expired messages have come back",
        )


def resource(name: str) -> definition.Resource:
    """Return the name of a topic or a group as protobuf message."""
    return definition.Resource(name=name)


@asynccontextmanager
async def consumer_of(world: World) -> AsyncIterator[Consumer]:
    """Run the gRPC edge of a broker with one consumer."""
    edge = GrpcEdge(world.broker)
    try:
        yield Consumer(world, edge)
    finally:
        await edge.close()


def run_with_consumer(**settings: Any) -> Callable[[Any], Any]:
    """Decorate `async def test_…(consumer)`: the result is a function without arguments that runs it to its end.

    `consumer` is a Consumer on a new node in memory. `settings`: of the node.
    """

    def decorate(test: Any) -> Any:
        async def run(world: World) -> None:
            async with consumer_of(world) as consumer:
                await test(consumer)

        run.__name__ = test.__name__
        return on_node(**settings)(run)

    return decorate
