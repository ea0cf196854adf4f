"""Expired leases: a message counts as returned only when its copy is durable, and each row is read once."""

from __future__ import annotations

import asyncio
import logging

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.consuming.test_leases import lease_positions, leases_of_queue
from tests.broker.on_node import batch, column, on_node
from tests.crash.world import World
from tests.log.test_recovery import flip

from timeball.broker.consuming import redelivery, retry
from timeball.broker.consuming.engine import Consuming
from timeball.broker.consuming.redelivery import SWEEP_ENTRIES_MIN, SWEPT_AT_ONCE, Deadlines
from timeball.broker.consuming.requests import Received, ReceiveRequest
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.log.format import read_frame
from timeball.model import limits
from timeball.model.errors import OverLimit

MINUTE_MS = 60_000
ASK = ReceiveRequest("g", "orders")


def engine(world: World) -> Consuming:
    """The broker's consuming engine."""
    consuming: Consuming = world.broker.consuming
    return consuming


async def send_and_receive(world: World, rows: int = 1, **columns: object) -> Received:
    """Send messages to a topic with one queue, and lease them for one minute."""
    await world.broker.create_topic("orders", 1)
    await world.broker.send(batch(rows, **columns))
    return await engine(world).receive(ASK, 0)


async def read_retry_topic(world: World) -> pa.RecordBatch:
    """Wait for a copy in the retry topic, and read all of its copies."""
    topic = "%RETRY%g_orders"
    await world.until(lambda: topic in world.broker.topics() and world.broker.queues(topic)[0][1], "a copy")
    return await world.broker.read_queue(topic, 0, 0, 100)


@on_node()
async def test_a_message_that_cannot_be_written_again_keeps_its_receipt_and_is_written_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts = (await send_and_receive(world, 2)).receipts
    queue = engine(world).leases.all()[0]
    with monkeypatch.context() as full:
        full.setattr(limits, "APPEND_BYTES_IN_FLIGHT_MAX", -1)
        world.clock.advance(MINUTE_MS)
        engine(world).wake()
        await world.until(lambda: queue.in_flight[0].deadline_ms > world.clock.wall, "a write has failed")
        assert engine(world).acknowledge_now(receipts[:1]) == [True]
    world.clock.advance(10_000)
    engine(world).wake()
    assert column(await read_retry_topic(world), "unique_key") == [None]
    await world.until(lambda: queue.is_idle, "both are done")
    assert world.broker.offsets("g", "orders") == {0: 2}


@on_node(strategy="timer_wheel", timer_congest_num_each_slot=1)
async def test_the_limit_of_a_timer_slot_refuses_sends_but_no_returned_messages(world: World) -> None:
    receipts = (await send_and_receive(world, 3)).receipts
    await asyncio.gather(*(engine(world).nack(receipt, 10_000) for receipt in receipts))
    due_ms = world.clock.wall + 10_000
    with pytest.raises(OverLimit, match="timer-congest-num-each-slot"):
        await world.broker.send(batch(1, due_ms=[due_ms]))
    await world.advance(10_000)
    assert (await read_retry_topic(world)).num_rows == 3


@on_node()
async def test_a_dead_letter_that_is_refused_leaves_the_lease_valid(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (receipt,) = (await send_and_receive(world)).receipts
    with monkeypatch.context() as full:
        full.setattr(limits, "APPEND_BYTES_IN_FLIGHT_MAX", -1)
        with pytest.raises(OverLimit):
            await engine(world).dead_letter(receipt)
    assert engine(world).acknowledge_now([receipt]) == [True]


@on_node()
async def test_many_expired_leases_are_written_in_chunks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timeball.broker.consuming.redelivery.PART_ROWS", 3)
    monkeypatch.setattr("timeball.broker.consuming.redelivery.PART_BYTES", 400)
    await send_and_receive(world, 20, body=[b"%03d" % i * 20 for i in range(20)])
    world.clock.advance(MINUTE_MS)
    engine(world).wake()
    await world.until(lambda: engine(world).leases.count.rows == 0, "all messages are back")
    assert sorted(column(await read_retry_topic(world), "body")) == [b"%03d" % i * 20 for i in range(20)]


@on_node()
async def test_an_acknowledgement_during_redelivery_is_not_valid(world: World) -> None:
    (receipt,) = (await send_and_receive(world)).receipts
    giving_up = asyncio.create_task(engine(world).dead_letter(receipt))
    lease = engine(world).leases.all()[0].in_flight[0]
    while not lease.is_void:  # its batch begins at the end of a turn
        await asyncio.sleep(0)
    assert not giving_up.done()
    assert engine(world).acknowledge_now([receipt]) == [False]
    assert await engine(world).change_invisible_time(receipt, 1) is None
    assert await giving_up


@on_node()
async def test_positions_before_an_offset_that_was_moved_forward_do_not_come_back(world: World) -> None:
    await send_and_receive(world, 2)
    await world.broker.commit_offsets("g", "orders", {0: 2})
    assert not (await engine(world).receive(ASK, 0)).rows.num_rows
    world.clock.advance(MINUTE_MS)
    engine(world).wake()
    await world.broker.send(batch(1))
    assert (await engine(world).receive(ASK, 0)).rows.num_rows == 1
    assert "%RETRY%g_orders" not in world.broker.topics()


@on_node()
async def test_leases_end_after_the_clock_was_set_forward_without_a_wake(world: World) -> None:
    await send_and_receive(world)
    world.clock.advance(MINUTE_MS)
    assert column(await read_retry_topic(world), "reconsume_times") == [1]


@on_node(failing=True)
async def test_a_failed_write_of_returned_messages_stops_the_node(world: World) -> None:
    await send_and_receive(world)
    world.files.fail_at(world.files.calls + 1, OSError(5, "broken"), forever=True)
    world.clock.advance(MINUTE_MS)
    engine(world).wake()
    with pytest.raises(OSError, match="broken"):
        await world.until(lambda: False, "the node stops")


@on_node()
async def test_a_message_with_full_properties_comes_back_with_the_properties_that_fit(world: World) -> None:
    """The properties of message A2 are as long as they may be, so no property of a copy fits."""
    longest = "a\x01" + "x" * (limits.PROPERTIES_BYTES_MAX - 3) + "\x02"
    ids = [f"A{n}" for n in range(7)]
    first = await send_and_receive(
        world, 7, unique_key=ids, properties=[longest if n == 2 else "" for n in range(7)]
    )
    assert first.rows.num_rows == 7
    world.clock.advance(MINUTE_MS)
    engine(world).wake()
    queue = engine(world).leases.all()[0]
    await world.until(lambda: not queue.in_flight, "all messages are back")
    copies = await read_retry_topic(world)
    assert sorted(column(copies, "unique_key")) == ids
    assert column(copies, "properties")[column(copies, "unique_key").index("A2")] == longest


@on_node()
async def test_a_message_in_a_damaged_frame_is_logged_as_lost_and_the_others_come_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    logging.disable(logging.NOTSET)
    await world.broker.create_topic("orders", 1)
    seqs = [(await world.broker.send(batch(1, unique_key=[f"A{n}"]))).first_seq for n in range(5)]
    received = await engine(world).receive(ASK, 0)
    assert received.rows.num_rows == 5
    reader = world.broker.log.reader
    segment = reader.segments.last
    positions = segment.frame_positions
    frame = next(at for at in positions if read_frame(segment.buffer, at).first_seq == seqs[2])
    flip(world.files, segment.name, frame + 60)  # a byte within the frame
    reader._cache._frames.clear()
    world.clock.advance(MINUTE_MS)
    engine(world).wake()
    queue = engine(world).leases.all()[0]
    await world.until(lambda: queue.is_idle, "no message is tried for ever")
    assert sorted(column(await read_retry_topic(world), "unique_key")) == ["A0", "A1", "A3", "A4"]
    assert world.broker.offsets("g", "orders") == {0: 5}
    (record,) = [line for line in caplog.records if line.message.startswith("message lost")]
    assert (
        record.levelname == "ERROR" and f"seq={seqs[2]} " in record.message and "offset=2 " in record.message
    )


@pytest.mark.parametrize(
    ("group", "topic"), [("g" * 60, "t" * 59), ("g" * 60, "t" * 60), ("g" * 120, "t" * 127)]
)
@on_node()
async def test_every_attempt_is_counted_however_long_the_names_are(
    world: World, group: str, topic: str
) -> None:
    """With these names, the name of the retry topic is about as long as a user's topic may be, or longer."""
    world.broker.tables.groups.update(SubscriptionGroup(group, retry_max_times=2))
    await world.broker.create_topic(topic, 1)
    await world.broker.send(batch(1, topic=[topic]))
    for times in range(3):
        rows = (await engine(world).receive(ReceiveRequest(group, topic), 0)).rows
        assert column(rows, "reconsume_times") == [times]
        world.clock.advance(MINUTE_MS)
        engine(world).wake()
        await world.until(
            lambda: all(queue.is_idle for queue in engine(world).leases.all()), "it has come back"
        )
    assert (await engine(world).receive(ReceiveRequest(group, topic), 0)).rows.num_rows == 0
    dead = await world.broker.read_queue(f"%DLQ%{group}", 0, 0, 9)
    assert column(dead, "reconsume_times") == [3]


@pytest.mark.parametrize("times_max", [2, 0])
@on_node()
async def test_each_message_of_a_batch_is_returned_by_its_own_number_of_attempts(
    world: World, times_max: int
) -> None:
    world.broker.tables.groups.update(SubscriptionGroup("g", retry_max_times=times_max))
    tried = [2, 0, 1, 99, retry.INT_MAX]
    await send_and_receive(
        world, 5, unique_key=[str(n) for n in range(5)], reconsume_times=pa.array(tried, pa.int32())
    )
    world.clock.advance(MINUTE_MS)
    engine(world).wake()
    await world.until(lambda: engine(world).leases.count.rows == 0, "all are back")
    dead = await world.broker.read_queue("%DLQ%g", 0, 0, 9)
    counted = {str(n): min(times + 1, retry.INT_MAX) for n, times in enumerate(tried)}
    expected = {key: times for key, times in counted.items() if times > times_max}
    assert dict(zip(column(dead, "unique_key"), column(dead, "reconsume_times"), strict=True)) == expected
    if expected != counted:
        back = await read_retry_topic(world)
        times_by_key = dict(zip(column(back, "unique_key"), column(back, "reconsume_times"), strict=True))
        assert times_by_key == {key: times for key, times in counted.items() if key not in expected}


def test_add_tells_whether_its_deadline_is_the_earliest_one() -> None:
    queue_leases = leases_of_queue()
    deadlines = Deadlines(queue_leases.count)
    lease_positions(queue_leases, [0], 10)
    lease_positions(queue_leases, [1], 5)
    assert deadlines.next_ms() is None
    assert deadlines.add(queue_leases, [0], 10, 20)
    assert deadlines.add(queue_leases, [1], 5, 15)
    assert not deadlines.add(queue_leases, [1], 5, 15)
    assert deadlines.next_ms() == 15


def test_the_first_lease_end_ignores_acknowledged_leases() -> None:
    queue_leases = leases_of_queue()
    deadlines = Deadlines(queue_leases.count)
    for offset, pop_ms in enumerate((1, 2, 3)):
        lease_positions(queue_leases, [offset], pop_ms)
        deadlines.add(queue_leases, [offset], pop_ms, pop_ms + 10)
    queue_leases.mark_done(0)
    assert (deadlines.next_ms(), deadlines.first_lease_end_ms()) == (11, 12)
    queue_leases.mark_done(2)
    assert deadlines.first_lease_end_ms() == 12
    queue_leases.mark_done(1)
    assert deadlines.first_lease_end_ms() is None


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=20), st.integers(0, 50))
def test_a_lease_that_has_ended_is_popped_once_unless_it_is_done(
    pops: list[tuple[int, bool]], now_ms: int
) -> None:
    queue_leases = leases_of_queue()
    deadlines = Deadlines(queue_leases.count)
    for offset, (pop_ms, _) in enumerate(pops):
        lease_positions(queue_leases, [offset], pop_ms)
        deadlines.add(queue_leases, [offset], pop_ms, pop_ms + 10)
    for offset, (_, is_done) in enumerate(pops):
        if is_done:
            queue_leases.mark_done(offset)
    due = [offset for _, offsets in deadlines.pop_due(now_ms) for offset in offsets]
    assert sorted(due) == [
        offset for offset, (pop_ms, is_done) in enumerate(pops) if not is_done and pop_ms + 10 <= now_ms
    ]
    assert deadlines.pop_due(now_ms) == []


def test_a_lease_whose_deadline_was_changed_and_changed_back_is_popped_once() -> None:
    queue_leases = leases_of_queue()
    deadlines = Deadlines(queue_leases.count)
    lease_positions(queue_leases, [0, 1], 1)
    deadlines.add(queue_leases, [0, 1], 1, 11)
    deadlines.add(queue_leases, [0], 1, 11)
    assert deadlines.pop_due(11) == [(queue_leases, [0, 1])]
    assert deadlines.pop_due(11) == []


def test_a_prolonged_lease_is_not_popped_at_its_earlier_deadline() -> None:
    queue_leases = leases_of_queue()
    deadlines = Deadlines(queue_leases.count)
    lease_positions(queue_leases, [0], 1)
    deadlines.add(queue_leases, [0], 1, 11)
    queue_leases.in_flight[0].deadline_ms = 30
    deadlines.add(queue_leases, [0], 1, 30)
    assert deadlines.pop_due(11) == []
    assert deadlines.pop_due(30) == [(queue_leases, [0])]


def test_entries_of_acknowledged_leases_are_swept() -> None:
    queue_leases = leases_of_queue()
    deadlines = Deadlines(queue_leases.count)
    for offset in range(5 * SWEEP_ENTRIES_MIN):
        lease_positions(queue_leases, [offset], 1)
        deadlines.add(queue_leases, [offset], 1, 11)
        assert len(deadlines) <= SWEEP_ENTRIES_MIN + 2 * queue_leases.count.rows
        if offset % 10:
            queue_leases.mark_done(offset)
    assert sum(len(offsets) for _, offsets in deadlines.pop_due(11)) == queue_leases.count.rows


def test_a_lease_is_popped_at_its_deadline_before_a_sweep_has_ended() -> None:
    """Consumers hold many leases and acknowledge them all: a sweep in one step would block the event loop."""
    queue_leases = leases_of_queue()
    deadlines = Deadlines(queue_leases.count)
    held = 4 * SWEEP_ENTRIES_MIN
    for offset in range(held):
        lease_positions(queue_leases, [offset], 1)
        deadlines.add(queue_leases, [offset], 1, 11)
    for offset in range(held):
        queue_leases.mark_done(offset)
    for offset in range(held, 2 * held):
        before = len(deadlines)
        lease_positions(queue_leases, [offset], 1)
        deadlines.add(queue_leases, [offset], 1, 11)
        queue_leases.mark_done(offset)
        assert before + 1 - len(deadlines) <= SWEPT_AT_ONCE
    assert len(deadlines) <= SWEEP_ENTRIES_MIN


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), min_size=40, max_size=90))
def test_during_sweeps_each_lease_ends_once_at_its_deadline(steps: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as small:
        small.setattr(redelivery, "SWEEP_ENTRIES_MIN", 4)
        small.setattr(redelivery, "SWEPT_AT_ONCE", 1)
        queue_leases = leases_of_queue()
        deadlines, ends_ms, now_ms = Deadlines(queue_leases.count), dict[int, int](), 0
        for offset, (step, number) in enumerate(steps):
            held = sorted(ends_ms)
            if step < 6:
                lease_positions(queue_leases, [offset], 1)
                ends_ms[offset] = queue_leases.in_flight[offset].deadline_ms = now_ms + number
                is_first = deadlines.add(queue_leases, [offset], 1, ends_ms[offset])
                # An entry that is not live any more may be earlier.
                assert not is_first or ends_ms[offset] == min(ends_ms.values())
            elif step == 6:
                now_ms += number // 9
                due = [position for _, offsets in deadlines.pop_due(now_ms) for position in offsets]
                assert sorted(due) == [position for position in held if ends_ms[position] <= now_ms]
                for position in due:
                    queue_leases.mark_done(position)
                    del ends_ms[position]
            elif held and step < 9:
                queue_leases.mark_done(held[number % len(held)])
                del ends_ms[held[number % len(held)]]
            elif held:
                position = held[number % len(held)]
                ends_ms[position] = queue_leases.in_flight[position].deadline_ms = now_ms + number
                deadlines.add(queue_leases, [position], 1, ends_ms[position])
            next_ms = deadlines.next_ms()
            assert not ends_ms or (next_ms is not None and next_ms <= min(ends_ms.values()))
        assert deadlines.first_lease_end_ms() == min(ends_ms.values(), default=None)
