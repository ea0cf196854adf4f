"""The shared definitions of the handlers: client ids, names, durations, long polls and statuses."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st
from tests.edges.grpc.consumer import GROUP, Consumer, run_with_consumer
from tests.edges.grpc.wire import definition, receive_request

from timeball.broker.filters import EVERYTHING
from timeball.edges.grpc import calls as module
from timeball.edges.grpc._generated.definition_pb2 import Code, Resource
from timeball.edges.grpc.calls import (
    CLIENT_ID,
    DURATION_SECONDS_MAX,
    LONG_POLL_MS_MAX,
    OK,
    Call,
    LongPolls,
    duration_ms,
    group_name,
    long_poll_ms,
    resource,
    status,
    status_of,
    topic_name,
)
from timeball.edges.shared.error_codes import Refused
from timeball.model import limits
from timeball.model.access import ANONYMOUS


def test_the_header_has_the_client_id() -> None:
    assert Call({CLIENT_ID: "host@1@2"}).client_id == "host@1@2"


@pytest.mark.parametrize(
    "headers", [{}, {CLIENT_ID: ""}, {CLIENT_ID: "x" * (limits.CLIENT_ID_CHARACTERS_MAX + 1)}]
)
def test_a_missing_or_too_long_client_id_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Refused) as refused:
        _ = Call(headers).client_id
    assert refused.value.protocol_code == Code.CLIENT_ID_REQUIRED


NAMES = st.from_regex(r"[|a-zA-Z0-9_-]{1,40}", fullmatch=True)


@given(NAMES, st.one_of(st.just(""), NAMES))
def test_a_name_is_converted_back_to_the_client_s_resource(name: str, space: str) -> None:
    for read in (topic_name, group_name):
        assert resource(read(resource(f"{space}%{name}" if space else name, space)), space) == Resource(
            resource_namespace=space, name=name
        )


def test_a_namespace_is_put_before_the_name() -> None:
    assert topic_name(Resource(resource_namespace="shop", name="orders")) == "shop%orders"
    assert topic_name(Resource(name="orders")) == "orders"


@pytest.mark.parametrize(
    "name", ["", "a.b", "../etc", "a b", "é", "a\n", "a" * (limits.TOPIC_BYTES_MAX + 1), "a/b"]
)
def test_an_invalid_name_is_refused_with_the_code_of_its_kind(name: str) -> None:
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
def test_any_duration_is_converted_to_ms_or_refused(seconds: int, nanos: int) -> None:
    duration = Duration(seconds=seconds, nanos=nanos)
    try:
        ms = duration_ms(duration, definition.Code.ILLEGAL_POLLING_TIME, "it")
    except Refused as error:
        assert error.protocol_code == definition.Code.ILLEGAL_POLLING_TIME
        assert abs(seconds) > DURATION_SECONDS_MAX or abs(nanos) > 999_999_999 or seconds * nanos < 0
    else:
        assert ms == (seconds * 10**9 + nanos) // 10**6


@given(st.one_of(st.none(), st.floats(-10, 1e9)), st.one_of(st.none(), st.integers(0, 10**12)))
def test_a_long_poll_ends_before_the_deadline_of_its_call(
    remaining_s: float | None, timeout_ms: int | None
) -> None:
    timeout = None
    if timeout_ms is not None:
        timeout = Duration()
        timeout.FromMilliseconds(timeout_ms)
    poll_ms = long_poll_ms(Call({}, remaining_s=remaining_s), timeout)
    assert 0 <= poll_ms <= min(LONG_POLL_MS_MAX, timeout_ms if timeout_ms is not None else LONG_POLL_MS_MAX)
    if remaining_s is not None:
        assert poll_ms <= max(0, remaining_s * 1_000)
        if 0.01 < remaining_s < 20:
            assert poll_ms < remaining_s * 1_000


@pytest.mark.parametrize(
    ("remaining_s", "poll_ms"),
    [
        (None, LONG_POLL_MS_MAX),
        (100.0, LONG_POLL_MS_MAX),
        (1e30, LONG_POLL_MS_MAX),
        (20.0, 19_500),
        (10.0, 9_500),
        (1.0, 750),
    ],
)
def test_a_long_poll_without_timeout_waits_up_to_the_maximum_or_the_deadline(
    remaining_s: float | None, poll_ms: int
) -> None:
    assert long_poll_ms(Call({}, remaining_s=remaining_s), None) == poll_ms


@run_with_consumer()
async def test_the_first_receive_of_a_group_creates_it(consumer: Consumer) -> None:
    assert consumer.world.broker.tables.groups.find_group(GROUP) is None
    await consumer.world.broker.create_topic("orders", 1)
    await consumer.receive()
    assert consumer.world.broker.tables.groups.find_group(GROUP) is not None


@run_with_consumer()
async def test_a_retry_topic_is_not_filtered_again(consumer: Consumer) -> None:
    long_polls = LongPolls()
    for name in ("orders", "%RETRY%g_orders"):
        await consumer.world.broker.create_topic(name, 1)
    topic = consumer.world.broker.policy.find_readable_topic("%RETRY%g_orders", ANONYMOUS)
    expression = definition.FilterExpression(type=definition.FilterType.TAG, expression="red")
    assert long_polls.filter_for(expression, topic) is EVERYTHING
    assert (
        long_polls.filter_for(
            expression, consumer.world.broker.policy.find_readable_topic("orders", ANONYMOUS)
        )
        is not EVERYTHING
    )


@run_with_consumer()
async def test_a_filter_is_compiled_once(consumer: Consumer) -> None:
    long_polls = LongPolls()
    await consumer.world.broker.create_topic("orders", 1)
    topic = consumer.world.broker.policy.find_readable_topic("orders", ANONYMOUS)
    expression = definition.FilterExpression(type=definition.FilterType.SQL, expression="a > 1")
    assert long_polls.filter_for(expression, topic) is long_polls.filter_for(expression, topic)


def test_waiting_calls_of_one_address_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_PER_ADDRESS_MAX", 3)

    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        other = Consumer(consumer.world, consumer.edge, "client-2", "10.0.0.2")
        waiting = [asyncio.create_task(consumer.receive(f"g{n}", wait_ms=20_000)) for n in range(3)]
        consuming = consumer.world.broker.consuming
        await consumer.world.until(lambda: consuming.waiting_receives == 3, "three calls wait")
        request = receive_request(GROUP, "orders", wait_ms=20_000)
        assert await consumer.refused(request) == definition.Code.TOO_MANY_REQUESTS
        late = asyncio.create_task(other.receive("g3", wait_ms=20_000))
        await consumer.world.until(
            lambda: consuming.waiting_receives == 4, "the call of the other address waits, too"
        )
        await consumer.send()
        assert [len(messages) for messages in await asyncio.gather(*waiting, late)] == [1, 1, 1, 1]
        assert len(await consumer.receive()) == 1  # its earlier calls have ended, so it may wait again

    check()


def test_a_refused_error_gives_its_own_code() -> None:
    refusal = status_of(Refused(Code.ILLEGAL_POLLING_TIME, "no"))
    assert (refusal.code, refusal.message) == (Code.ILLEGAL_POLLING_TIME, "no")


def test_the_status_of_an_internal_error_has_only_its_class_name() -> None:
    internal_error = status_of(KeyError("a secret"))
    assert internal_error.code == Code.INTERNAL_SERVER_ERROR
    assert "KeyError" in internal_error.message and "secret" not in internal_error.message


def test_the_text_of_a_status_is_shortened() -> None:
    assert len(status(Code.BAD_REQUEST, "x" * 10_000).message) < 2_100
    assert OK.code == Code.OK
