"""The broker's operations: an answer is true and durable, and a refused request leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import batch, column, on_node
from tests.crash.checker import check
from tests.crash.world import HOUR_MS, SECOND_MS, World

from timeball.model import limits
from timeball.model.errors import InvalidDelay, NotFound, OutOfRange, OverLimit
from timeball.model.message import Kind


async def queue(world: World, topic: str, queue_id: int = 0) -> pa.RecordBatch:
    """Read all rows of a queue."""
    return await world.broker.read_queue(topic, queue_id, 0, 1_000)


# ---- producing ----------------------------------------------------------------------------------------------


@on_node()
async def test_a_batch_of_immediate_and_scheduled_messages_is_accepted_in_its_order(world: World) -> None:
    first = await world.broker.send(batch(3, body=[b"0", b"1", b"2"], delay_ms=[None, SECOND_MS, None]))
    second = await world.broker.send(batch(1))
    assert (first.first_seq, first.rows, first.store_ms) == (2, 3, world.clock.wall)
    assert second.first_seq == 5
    rows = list(world.broker.read_log(1, 6))
    assert [kind for part in rows for kind in column(part, "kind")] == [
        Kind.META,
        Kind.MESSAGE,
        Kind.SCHEDULED,
        Kind.MESSAGE,
        Kind.MESSAGE,
    ]
    bodies = [body for q in (0, 1) for body in column(await queue(world, "orders", q), "body")]
    assert sorted(bodies) == [b"0", b"2", b"body"]


@on_node()
async def test_a_batch_with_one_invalid_message_is_refused_as_a_whole(world: World) -> None:
    with pytest.raises(InvalidDelay):
        await world.broker.send(batch(3, topic=["a", "b", "c"], delay_ms=[None, 5, -1]))
    assert world.broker.status()["log"]["next_seq"] == 1
    assert world.broker.topics() == {}
    assert (await world.broker.send(batch(1))).first_seq == 2


@on_node(auto_create_topics=False)
async def test_a_send_to_a_missing_topic_is_refused_and_appends_no_row(world: World) -> None:
    await world.broker.create_topic("orders", 1)
    for delay_ms in (None, SECOND_MS):
        with pytest.raises(NotFound, match="'other'"):
            await world.broker.send(batch(2, topic=["orders", "other"], delay_ms=[delay_ms] * 2))
    assert world.broker.status()["log"]["next_seq"] == 2
    await world.broker.send(batch(1))
    offsets = column(await queue(world, "orders"), "queue_offset")
    assert offsets == [0], "a refused batch has used up no offset"


@on_node()
async def test_a_refused_batch_larger_than_a_frame_uses_no_offsets(world: World) -> None:
    """Otherwise the next message would follow a gap, which no restart could explain."""
    body = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array([bytes(1_000)]))
    sent = pa.RecordBatch.from_pydict({"topic": ["orders"] * 300, "body": body})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "REQUEST_BYTES_MAX", 100_000)
        patch.setattr(limits, "FRAME_BYTES_MAX", 200_000)
        with pytest.raises(OverLimit, match="split it"):
            await world.broker.send(sent)
    await world.broker.send(batch(2))
    assert column(await queue(world, "orders"), "queue_offset") == [0]
    await world.stop()
    world.files.remove("checkpoint")
    await world.start()
    assert world.broker.queues("orders") == {0: (0, 1), 1: (0, 1)}


@on_node()
async def test_concurrent_sends_are_in_the_log_in_the_order_of_the_calls(world: World) -> None:
    answers = await asyncio.gather(*(world.broker.send(batch(2, body=[b"%d" % i] * 2)) for i in range(20)))
    assert [answer.first_seq for answer in answers] == list(range(2, 42, 2))
    bodies = [body for part in world.broker.read_log(2, 42) for body in column(part, "body")]
    assert bodies == [b"%d" % (i // 2) for i in range(40)]


@settings(max_examples=25)
@given(
    st.lists(
        st.one_of(
            st.lists(st.none() | st.integers(-5, 25) | st.integers(0, 2 * HOUR_MS), min_size=1, max_size=6),
            st.integers(1, HOUR_MS),
            st.sampled_from(["compact", "checkpoint", "restart", "consume", "merge", "apply_retention"]),
        ),
        max_size=12,
    )
)
@on_node()
async def test_each_message_is_released_once_and_not_before_its_due_time(
    world: World, steps: list[list[int | None] | int | str]
) -> None:
    for step in steps:
        if isinstance(step, list):
            await world.send("a", step)
        elif isinstance(step, int):
            await world.advance(step)
        else:
            await getattr(world, step)()
    await world.advance(3 * HOUR_MS)
    await world.consume()
    assert check(world.observed, await world.outcome()) == []


@on_node()
async def test_sends_beyond_the_limit_of_unwritten_bytes_are_refused(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "APPEND_BYTES_IN_FLIGHT_MAX", 1)
        waiting = asyncio.ensure_future(world.broker.send(batch(1)))
        await asyncio.sleep(0)
        with pytest.raises(OverLimit, match="wait for the disk"):
            await world.broker.send(batch(1))
        await waiting
        await world.broker.send(batch(1))


# ---- consuming ----------------------------------------------------------------------------------------------


@on_node()
async def test_offsets_of_missing_topics_and_beyond_the_end_are_refused(world: World) -> None:
    with pytest.raises(NotFound, match="'orders' does not exist"):
        await world.broker.commit_offsets("g", "orders", {0: 0})
    await world.broker.send(batch(3, queue_id=pa.array([0, 0, 1], pa.int32())))
    assert world.broker.queues("orders") == {0: (0, 2), 1: (0, 1)}
    await world.broker.commit_offsets("g", "orders", {0: 2, 1: 0})
    assert world.broker.offsets("g", "orders") == {0: 2, 1: 0}
    with pytest.raises(OutOfRange):
        await world.broker.commit_offsets("g", "orders", {0: 3})


@on_node()
async def test_a_queue_has_the_same_rows_after_a_restart(world: World) -> None:
    await world.broker.send(batch(5, queue_id=pa.array([0] * 5, pa.int32())))
    before = await queue(world, "orders")
    await world.restart()
    assert (await queue(world, "orders")).equals(before)
    for call in (world.broker.read_queue("none", 0, 0, 1), world.broker.read_queue("orders", 7, 0, 1)):
        with pytest.raises(NotFound):
            await call


@on_node()
async def test_read_log_returns_the_rows_of_a_range_and_of_the_requested_kinds(world: World) -> None:
    await world.broker.send(batch(4, delay_ms=[None, SECOND_MS, None, SECOND_MS]))
    await world.advance(SECOND_MS)

    def read(from_seq: int, to_seq: int, *options: Any) -> list[int]:
        parts = world.broker.read_log(from_seq, to_seq, *options)
        return [seq for part in parts for seq in column(part, "seq")]

    assert read(1, 100) == [1, 2, 3, 4, 5, 6, 7]
    assert read(2, 5) == [2, 3, 4]
    assert read(1, 100, [Kind.RELEASE, Kind.MESSAGE]) == [2, 4, 6, 7]
    assert read(1, 100, [Kind.SCHEDULED], 1) == [3, 5]
    assert read(8, 9) == read(5, 5) == []


@on_node()
async def test_create_topic_adds_queues_which_survive_a_crash(world: World) -> None:
    for queues in (1, 3, 2):
        await world.broker.create_topic("made", queues)
    await world.broker.create_topic("plain")
    image = world.files.crash(survival="nothing")
    for queues in (0, -1, limits.QUEUES_PER_TOPIC_MAX + 1):
        with pytest.raises(OutOfRange, match="between 1 and"):
            await world.broker.create_topic("made", queues)
    after_cut = World(image, world.clock)
    await after_cut.start()
    assert after_cut.broker.topics() == {"made": {"queues": 3}, "plain": {"queues": 2}}
    await after_cut.stop()


# ---- status -------------------------------------------------------------------------------------------------


@on_node()
async def test_the_status_counts_rows_and_pending_messages(world: World) -> None:
    await world.broker.send(
        batch(5, unique_key=list("abcde"), delay_ms=[None, 500, 30 * SECOND_MS, HOUR_MS, HOUR_MS])
    )
    await world.compact()
    await world.broker.cancel(ids=["e"])
    await world.broker.send(batch(1, delay_ms=[HOUR_MS]))
    await world.advance(500)
    status = world.broker.status()
    log = status["log"]
    assert (log["first_seq"], log["next_seq"], log["durable_seq"]) == (1, 11, 11)
    assert status["now_ms"] == world.clock.wall < status["settled_before_ms"]
    assert status["watermark"] == 7
    assert status["lateness"]["released"] == 1
    schedule = status["schedule"]
    assert (schedule["tail_rows"], schedule["wheel_rows"], schedule["cancelled_rows"]) == (1, 0, 1)
    assert schedule["table_rows"] == 4
    assert status["table"]["version"] == 1
    assert not status["clock_suspect"]
