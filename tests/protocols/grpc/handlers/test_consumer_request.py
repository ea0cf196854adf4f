"""What every consumer's call says: how long it waits, and which durations are none."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st
from tests.protocols.grpc.consumer import GROUP, Consumer, resource, with_consumer
from tests.protocols.grpc.wire import d, receive_request

from timeball.broker.filters import EVERYTHING
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc.calls import Call
from timeball.protocols.grpc.handlers import consumer_request as module
from timeball.protocols.grpc.handlers.consumer_request import (
    DURATION_SECONDS_MAX,
    WAIT_MS_MAX,
    Consuming,
    duration_ms,
    wait_ms,
)

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


@given(INT64, INT32)
def test_any_duration_is_milliseconds_or_refused(seconds: int, nanos: int) -> None:
    duration = Duration(seconds=seconds, nanos=nanos)
    try:
        ms = duration_ms(duration, d.Code.ILLEGAL_POLLING_TIME, "it")
    except Refused as error:
        assert error.protocol_code == d.Code.ILLEGAL_POLLING_TIME
        assert abs(seconds) > DURATION_SECONDS_MAX or abs(nanos) > 999_999_999 or seconds * nanos < 0
    else:
        assert ms == (seconds * 10**9 + nanos) // 10**6


@given(st.one_of(st.none(), st.floats(-10, 1e9)), st.one_of(st.none(), st.integers(0, 10**12)))
def test_a_wait_ends_before_the_deadline(remaining_s: float | None, asked_ms: int | None) -> None:
    asked = None
    if asked_ms is not None:
        asked = Duration()
        asked.FromMilliseconds(asked_ms)
    waits = wait_ms(Call({}, remaining_s=remaining_s), asked)
    assert 0 <= waits <= min(WAIT_MS_MAX, asked_ms if asked_ms is not None else WAIT_MS_MAX)
    if remaining_s is not None:
        assert waits <= max(0, remaining_s * 1_000)
        if 0.01 < remaining_s < 20:
            assert waits < remaining_s * 1_000


@pytest.mark.parametrize(
    ("remaining_s", "waits"),
    [
        (None, WAIT_MS_MAX),
        (100.0, WAIT_MS_MAX),
        (1e30, WAIT_MS_MAX),
        (20.0, 19_500),
        (10.0, 9_500),
        (1.0, 750),
    ],
)
def test_who_does_not_say_waits_as_long_as_it_may(remaining_s: float | None, waits: int) -> None:
    assert wait_ms(Call({}, remaining_s=remaining_s), None) == waits


@with_consumer()
async def test_a_group_is_made_by_its_first_call(consumer: Consumer) -> None:
    consuming = Consuming(consumer.edge.site)
    assert consumer.world.broker.parts.groups.find(GROUP) is None
    assert consuming.group(resource(GROUP)).group_name == GROUP
    assert consumer.world.broker.parts.groups.find(GROUP) is not None


@with_consumer()
async def test_what_is_in_a_retry_topic_has_been_wanted_once(consumer: Consumer) -> None:
    consuming = Consuming(consumer.edge.site)
    for name in ("orders", "%RETRY%g_orders"):
        await consumer.world.broker.create_topic(name, 1)
    topic = consuming.topic(resource("%RETRY%g_orders"))
    expression = d.FilterExpression(type=d.FilterType.TAG, expression="red")
    assert consuming.wanted(expression, topic) is EVERYTHING
    assert consuming.wanted(expression, consuming.topic(resource("orders"))) is not EVERYTHING


@with_consumer()
async def test_a_filter_is_read_once(consumer: Consumer) -> None:
    consuming = Consuming(consumer.edge.site)
    await consumer.world.broker.create_topic("orders", 1)
    topic = consuming.topic(resource("orders"))
    expression = d.FilterExpression(type=d.FilterType.SQL, expression="a > 1")
    assert consuming.wanted(expression, topic) is consuming.wanted(expression, topic)


def test_one_address_does_not_take_all_the_places_for_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITS_PER_ADDRESS_MAX", 3)

    @with_consumer()
    async def check(consumer: Consumer) -> None:
        other = Consumer(consumer.world, consumer.edge, "client-2", "10.0.0.2")
        waiting = [asyncio.create_task(consumer.receive(f"g{n}", wait_ms=20_000)) for n in range(3)]
        await consumer.world.until(lambda: consumer.world.broker.waiters._count == 3, "they wait")
        request = receive_request(GROUP, "orders", wait_ms=20_000)
        assert await consumer.refused(request) == d.Code.TOO_MANY_REQUESTS
        late = asyncio.create_task(other.receive("g3", wait_ms=20_000))
        await consumer.world.until(lambda: consumer.world.broker.waiters._count == 4, "another one waits")
        await consumer.send()
        assert [len(found) for found in await asyncio.gather(*waiting, late)] == [1, 1, 1, 1]
        assert len(await consumer.receive()) == 1  # there is room again

    check()
