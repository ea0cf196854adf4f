"""What a call says: who makes it, whose names are bad, how long it waits, and which durations are none."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st
from tests.edges.grpc.consumer import GROUP, Consumer, with_consumer
from tests.edges.grpc.wire import d, receive_request

from timeball.broker.filters import EVERYTHING
from timeball.edges.grpc import calls as module
from timeball.edges.grpc._generated.definition_pb2 import Code, Resource
from timeball.edges.grpc.calls import (
    CLIENT_ID,
    DURATION_SECONDS_MAX,
    OK,
    WAIT_MS_MAX,
    Call,
    Consuming,
    duration_ms,
    group_name,
    resource,
    status,
    status_of,
    topic_name,
    wait_ms,
)
from timeball.edges.shared.error_codes import Refused
from timeball.model import limits
from timeball.model.access import ANONYMOUS


def test_a_client_says_its_name() -> None:
    assert Call({CLIENT_ID: "host@1@2"}).client_id == "host@1@2"


@pytest.mark.parametrize(
    "headers", [{}, {CLIENT_ID: ""}, {CLIENT_ID: "x" * (limits.CLIENT_ID_CHARACTERS_MAX + 1)}]
)
def test_a_client_without_a_name_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Refused) as refused:
        _ = Call(headers).client_id
    assert refused.value.protocol_code == Code.CLIENT_ID_REQUIRED


NAMES = st.from_regex(r"[|a-zA-Z0-9_-]{1,40}", fullmatch=True)


@given(NAMES, st.one_of(st.just(""), NAMES))
def test_a_name_comes_back_as_its_client_knows_it(name: str, space: str) -> None:
    for read in (topic_name, group_name):
        assert resource(read(resource(f"{space}%{name}" if space else name, space)), space) == Resource(
            resource_namespace=space, name=name
        )


def test_a_namespace_stands_before_the_name() -> None:
    assert topic_name(Resource(resource_namespace="shop", name="orders")) == "shop%orders"
    assert topic_name(Resource(name="orders")) == "orders"


@pytest.mark.parametrize(
    "name", ["", "a.b", "../etc", "a b", "é", "a\n", "a" * (limits.TOPIC_BYTES_MAX + 1), "a/b"]
)
def test_a_bad_name_is_refused_with_the_code_of_its_kind(name: str) -> None:
    for read, code in (
        (topic_name, Code.ILLEGAL_TOPIC),
        (group_name, Code.ILLEGAL_CONSUMER_GROUP),
    ):
        with pytest.raises(Refused) as refused:
            read(Resource(name=name))
        assert refused.value.protocol_code == code


def test_a_namespace_counts_towards_the_length() -> None:
    name = "a" * limits.GROUP_BYTES_MAX
    assert group_name(Resource(name=name)) == name
    with pytest.raises(Refused, match="1 to 120"):
        group_name(Resource(resource_namespace="s", name=name))


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
    assert consumer.world.broker.tables.groups.find_group(GROUP) is None
    await consumer.world.broker.create_topic("orders", 1)
    await consumer.receive()
    assert consumer.world.broker.tables.groups.find_group(GROUP) is not None


@with_consumer()
async def test_what_is_in_a_retry_topic_has_been_wanted_once(consumer: Consumer) -> None:
    consuming = Consuming()
    for name in ("orders", "%RETRY%g_orders"):
        await consumer.world.broker.create_topic(name, 1)
    topic = consumer.world.broker.policy.readable("%RETRY%g_orders", ANONYMOUS)
    expression = d.FilterExpression(type=d.FilterType.TAG, expression="red")
    assert consuming.wanted(expression, topic) is EVERYTHING
    assert (
        consuming.wanted(expression, consumer.world.broker.policy.readable("orders", ANONYMOUS))
        is not EVERYTHING
    )


@with_consumer()
async def test_a_filter_is_read_once(consumer: Consumer) -> None:
    consuming = Consuming()
    await consumer.world.broker.create_topic("orders", 1)
    topic = consumer.world.broker.policy.readable("orders", ANONYMOUS)
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


def test_a_room_may_say_the_code_itself() -> None:
    found = status_of(Refused(Code.ILLEGAL_POLLING_TIME, "no"))
    assert (found.code, found.message) == (Code.ILLEGAL_POLLING_TIME, "no")


def test_what_nobody_foresaw_tells_its_name_and_no_more() -> None:
    found = status_of(KeyError("a secret"))
    assert found.code == Code.INTERNAL_SERVER_ERROR
    assert "KeyError" in found.message and "secret" not in found.message


def test_a_sentence_has_a_bound() -> None:
    assert len(status(Code.BAD_REQUEST, "x" * 10_000).message) < 2_100
    assert OK.code == Code.OK
