"""Random requests: every call is answered with a status other than an internal error, and the broker continues.

The requests are generated from protobuf's definitions: valid and invalid names, numbers at the ends of their ranges,
missing messages, undefined enumeration values.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from tests.bounds import BOUND_S
from tests.edges.grpc.consumer import GROUP, TOPIC, Consumer, answer, resource, run_with_consumer
from tests.edges.grpc.wire import consumer_settings, definition

from timeball.edges.grpc.calls import store_settings
from timeball.edges.grpc.dispatch import METHODS, Method
from timeball.edges.shared.error_codes import Refused

CALLS = 150  # per seed
DEPTH_MAX = 5  # of nested messages
F = FieldDescriptor

TEXTS = [
    TOPIC, GROUP, "%DLQ%g", "%RETRY%g_orders", "rmq_sys_x", "no/name", "", "n" * 200, "id-1", "a > 1", "red || blue",
    "*", "\x01\x02", "AQE", "\u00e9\U0001f600", "\x00", " ", "2",
]  # fmt: skip
NUMBERS = [-2, -1, 0, 1, 2, 3, 4, 6, 10, 32, 64, 1_000, 60_000]
RANGE_ENDS = {F.TYPE_INT32: 1 << 31, F.TYPE_ENUM: 1 << 31, F.TYPE_INT64: 1 << 63}


class RequestMaker:
    """Generates requests from a seed, so that a failure can be reproduced."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def request(self) -> tuple[Method, Message]:
        """Generate a call and its request. Groups and topics in it often exist."""
        method = self._random.choice(sorted(METHODS.values(), key=lambda each: each.name))
        request: Any = self.message(method.request)
        fields = method.request.DESCRIPTOR.fields_by_name
        for name, known in (("group", GROUP), ("topic", TOPIC)):
            if name in fields and self._random.random() < 0.8:
                getattr(request, name).CopyFrom(resource(known))
        if "message_queue" in fields and self._random.random() < 0.8:
            request.message_queue.topic.CopyFrom(resource(TOPIC))
        for message in getattr(request, "messages", []):
            if self._random.random() < 0.9:
                message.topic.CopyFrom(resource(TOPIC))
        return method, request

    def message(self, message_class: type[Message], depth: int = 0) -> Any:
        """Generate a message of this class. Some of its fields are left out."""
        result = message_class()
        left_out = self._random.choice([0.0, 0.2, 0.6])
        for field in message_class.DESCRIPTOR.fields:
            if depth == DEPTH_MAX or self._random.random() < left_out:
                continue
            value, count = getattr(result, field.name), self._random.randrange(4)
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                value.update({self._random.choice(TEXTS): self._random.choice(TEXTS) for _ in range(count)})
            elif field.type == F.TYPE_MESSAGE:
                inner = GetMessageClass(field.message_type)
                if field.is_repeated:
                    value.extend(self.message(inner, depth + 1) for _ in range(count))
                else:
                    value.CopyFrom(self.message(inner, depth + 1))
            elif field.is_repeated:
                value.extend(self._scalar(field.type) for _ in range(count))
            else:
                setattr(result, field.name, self._scalar(field.type))
        return result

    def _scalar(self, field_type: int) -> Any:
        if field_type == F.TYPE_STRING:
            return self._random.choice(TEXTS)
        if field_type == F.TYPE_BYTES:
            return self._random.randbytes(self._random.randrange(40))
        if field_type == F.TYPE_BOOL:
            return self._random.random() < 0.5
        if field_type in (F.TYPE_FLOAT, F.TYPE_DOUBLE):
            return self._random.choice([0.0, -1.0, 1e30, float("inf"), float("nan")])
        end = RANGE_ENDS[field_type]
        return self._random.choice([*NUMBERS, -end, end - 1])


async def responses_of(consumer: Consumer, method: Method, request: Message) -> list[Any]:
    """Make a call, and return its responses."""
    call = consumer.call(remaining_s=0.01)  # long polls end soon
    if method.takes_stream:

        async def stream() -> Any:
            yield request

        return [each async for each in consumer.edge.dispatch.stream(method.name, call, stream())]
    if method.gives_stream:
        return [each async for each in consumer.edge.dispatch.stream(method.name, call, request)]
    return [await answer(consumer.edge.dispatch, method.name, call, request)]


def codes(responses: list[Any]) -> list[int]:
    """Return the codes of the responses with a status."""
    return [each.status.code for each in responses if each.HasField("status")]


@pytest.mark.parametrize("seed", range(6))
def test_a_random_request_is_answered_without_an_internal_error(seed: int) -> None:
    maker, seen = RequestMaker(seed), set[int]()

    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        consumer.connect()
        await consumer.send(5, unique_key=[f"id-{n}" for n in range(5)], properties=["a\x012\x02"] * 5)
        for _ in range(CALLS):
            method, request = maker.request()
            async with asyncio.timeout(BOUND_S):
                responses = await responses_of(consumer, method, request)
            # A Telemetry stream without settings gets no response.
            assert codes(responses) or method.name == "Telemetry", (method.name, request)
            assert definition.Code.INTERNAL_SERVER_ERROR not in codes(responses), (
                method.name,
                request,
                responses,
            )
            seen.update(codes(responses))
        await consumer.send(unique_key=["last"])
        assert await consumer.receive("somebody-else")

    check()
    assert definition.Code.OK in seen and len(seen) > 5  # the requests reach different parts of the broker


def test_the_harness_sees_what_nobody_foresaw(caplog: pytest.LogCaptureFixture) -> None:
    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        async def broken(call: Any, request: Any) -> Any:
            raise KeyError("a field that was forgotten")

        consumer.edge.dispatch._handlers["AckMessage"] = broken
        method = METHODS["AckMessage"]
        assert definition.Code.INTERNAL_SERVER_ERROR in codes(
            await responses_of(consumer, method, method.request())
        )

    with caplog.at_level(logging.CRITICAL):
        check()


def test_random_settings_are_stored_or_refused_completely() -> None:
    maker = RequestMaker(0)

    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        clients = consumer.edge.context.sessions
        for _ in range(200):
            try:
                store_settings(clients, "a", maker.message(definition.Settings), 0)
                store_settings(clients, "a", consumer_settings(GROUP), 1)
            except Refused:
                assert clients.get("a") is None
            clients.remove("a")
            assert not clients.producer_names()

    check()
