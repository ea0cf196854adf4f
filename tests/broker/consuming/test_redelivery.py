"""Expired leases: a message counts as returned only when its copy is durable, and each row is read once."""

from __future__ import annotations

import asyncio
import logging

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.consuming.test_leases import leases_of_queue, take
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
    found: Consuming = world.broker.consuming
    return found


async def popped(world: World, rows: int = 1, **columns: object) -> Received:
    await world.broker.create_topic("orders", 1)
    await world.broker.send(batch(rows, **columns))
    return await engine(world).receive(ASK, 0)


async def retries(world: World) -> pa.RecordBatch:
    topic = "%RETRY%g_orders"
    await world.until(lambda: topic in world.broker.topics() and world.broker.queues(topic)[0][1], "a copy")
    return await world.broker.read_queue(topic, 0, 0, 100)


@on_node()
async def test_a_copy_that_cannot_be_written_now_is_written_later_and_the_receipt_counts_till_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts = (await popped(world, 2)).receipts
    queue = engine(world).leases.all()[0]
    with monkeypatch.context() as full:
        full.setattr(limits, "APPEND_BYTES_IN_FLIGHT_MAX", -1)
        world.clock.advance(MINUTE_MS)
        engine(world).wake()
        await world.until(lambda: queue.in_flight[0].deadline_ms > world.clock.wall, "it has been tried")
        assert engine(world).acknowledge_now(receipts[:1]) == [True]
    world.clock.advance(10_000)
    engine(world).wake()
    assert column(await retries(world), "unique_key") == [None]
    await world.until(lambda: queue.idle, "both are done")
    assert world.broker.offsets("g", "orders") == {0: 2}


@on_node(strategy="timer_wheel", timer_congest_num_each_slot=1)
async def test_the_limit_of_a_slot_refuses_sends_and_no_returned_messages(world: World) -> None:
    receipts = (await popped(world, 3)).receipts
    await asyncio.gather(*(engine(world).nack(receipt, 10_000) for receipt in receipts))
    due_ms = world.clock.wall + 10_000
    with pytest.raises(OverLimit, match="timer-congest-num-each-slot"):
        await world.broker.send(batch(1, due_ms=[due_ms]))
    await world.advance(10_000)
    assert (await retries(world)).num_rows == 3


@on_node()
async def test_a_refused_request_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (receipt,) = (await popped(world)).receipts
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
    await popped(world, 20, body=[b"%03d" % i * 20 for i in range(20)])
    world.clock.advance(MINUTE_MS)
    engine(world).wake()
    await world.until(lambda: engine(world).leases.count.rows == 0, "all are back")
    found = column(await retries(world), "body")
    assert sorted(found) == [b"%03d" % i * 20 for i in range(20)]


@on_node()
async def test_an_acknowledgement_during_redelivery_is_not_valid(world: World) -> None:
    (receipt,) = (await popped(world)).receipts
    giving_up = asyncio.create_task(engine(world).dead_letter(receipt))
    lease = engine(world).leases.all()[0].in_flight[0]
    while not lease.is_void:  # its batch begins at the end of a turn
        await asyncio.sleep(0)
    assert not giving_up.done()
    assert engine(world).acknowledge_now([receipt]) == [False]
    assert await engine(world).change_invisible_time(receipt, 1) is None
    assert await giving_up


@on_node()
async def test_positions_before_a_reset_do_not_come_back(world: World) -> None:
    await popped(world, 2)
    await world.broker.commit_offsets("g", "orders", {0: 2})
    assert not (await engine(world).receive(ASK, 0)).rows.num_rows
    world.clock.advance(MINUTE_MS)
    engine(world).wake()
    await world.broker.send(batch(1))
    assert (await engine(world).receive(ASK, 0)).rows.num_rows == 1
    assert "%RETRY%g_orders" not in world.broker.topics()


@on_node()
async def test_the_clock_set_forward_is_noticed_without_being_told(world: World) -> None:
    await popped(world)
    world.clock.advance(MINUTE_MS)
    assert column(await retries(world), "reconsume_times") == [1]


@on_node(failing=True)
async def test_a_disk_that_fails_stops_the_node_and_not_only_this(world: World) -> None:
    await popped(world)
    world.files.fail_at(world.files.calls + 1, OSError(5, "broken"), forever=True)
    world.clock.advance(MINUTE_MS)
    engine(world).wake()
    with pytest.raises(OSError, match="broken"):
        await world.until(lambda: False, "the node stops")


@on_node()
async def test_a_message_whose_properties_are_full_comes_back_with_what_fits(world: World) -> None:
    """Its properties are as long as they may be, and a copy has more of them."""
    longest = "a\x01" + "x" * (limits.PROPERTIES_BYTES_MAX - 3) + "\x02"
    ids = [f"A{n}" for n in range(7)]
    first = await popped(world, 7, unique_key=ids, properties=[longest if n == 2 else "" for n in range(7)])
    assert first.rows.num_rows == 7
    world.clock.advance(MINUTE_MS)
    engine(world).wake()
    queue = engine(world).leases.all()[0]
    await world.until(lambda: not queue.in_flight, "all have come back")
    found = await retries(world)
    assert sorted(column(found, "unique_key")) == ids
    assert column(found, "properties")[column(found, "unique_key").index("A2")] == longest


@on_node()
async def test_a_message_whose_frame_is_damaged_is_given_up_and_recorded_and_the_others_come_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    logging.disable(logging.NOTSET)
    await world.broker.create_topic("orders", 1)
    seqs = [(await world.broker.send(batch(1, unique_key=[f"A{n}"]))).first_seq for n in range(5)]
    received = await engine(world).receive(ASK, 0)
    assert received.rows.num_rows == 5
    reader = world.broker.log.reader
    segment = reader.segments.last
    frame = next(f for f in segment.frame_positions if read_frame(segment.buffer, f).first_seq == seqs[2])
    flip(world.files, segment.name, frame + 60)
    reader._cache._frames.clear()
    world.clock.advance(MINUTE_MS)
    engine(world).wake()
    queue = engine(world).leases.all()[0]
    await world.until(lambda: queue.idle, "none is tried for ever")
    assert sorted(column(await retries(world), "unique_key")) == ["A0", "A1", "A3", "A4"]
    assert world.broker.offsets("g", "orders") == {0: 5}
    (record,) = [one for one in caplog.records if one.message.startswith("message lost")]
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
    """From 120 characters on the retry topic's name is longer than a user's may be."""
    world.broker.tables.groups.update(SubscriptionGroup(group, retry_max_times=2))
    await world.broker.create_topic(topic, 1)
    await world.broker.send(batch(1, topic=[topic]))
    for times in range(3):
        rows = (await engine(world).receive(ReceiveRequest(group, topic), 0)).rows
        assert column(rows, "reconsume_times") == [times]
        world.clock.advance(MINUTE_MS)
        engine(world).wake()
        await world.until(lambda: all(queue.idle for queue in engine(world).leases.all()), "it has come back")
    assert (await engine(world).receive(ReceiveRequest(group, topic), 0)).rows.num_rows == 0
    dead = await world.broker.read_queue(f"%DLQ%{group}", 0, 0, 9)
    assert column(dead, "reconsume_times") == [3]


@pytest.mark.parametrize("times_max", [2, 0])
@on_node()
async def test_each_message_is_judged_by_its_own_attempts(world: World, times_max: int) -> None:
    world.broker.tables.groups.update(SubscriptionGroup("g", retry_max_times=times_max))
    tried = [2, 0, 1, 99, retry.INT_MAX]
    await popped(world, 5, unique_key=[str(n) for n in range(5)], reconsume_times=pa.array(tried, pa.int32()))
    world.clock.advance(MINUTE_MS)
    engine(world).wake()
    await world.until(lambda: engine(world).leases.count.rows == 0, "all are back")
    dead = await world.broker.read_queue("%DLQ%g", 0, 0, 9)
    counted = {str(n): min(times + 1, retry.INT_MAX) for n, times in enumerate(tried)}
    expected = {key: times for key, times in counted.items() if times > times_max}
    assert dict(zip(column(dead, "unique_key"), column(dead, "reconsume_times"), strict=True)) == expected
    if expected != counted:
        back = await retries(world)
        found = dict(zip(column(back, "unique_key"), column(back, "reconsume_times"), strict=True))
        assert found == {key: times for key, times in counted.items() if key not in expected}


def test_the_earliest_deadline_is_told_to_whoever_adds_it() -> None:
    w = leases_of_queue()
    deadlines = Deadlines(w.count)
    take(w, [0], 10)
    take(w, [1], 5)
    assert deadlines.next_ms() is None
    assert deadlines.add(w, [0], 10, 20)
    assert deadlines.add(w, [1], 5, 15)
    assert not deadlines.add(w, [1], 5, 15)
    assert deadlines.next_ms() == 15


def test_the_first_end_of_a_lease_is_not_that_of_an_acknowledged_one() -> None:
    w = leases_of_queue()
    deadlines = Deadlines(w.count)
    for offset, pop_ms in enumerate((1, 2, 3)):
        take(w, [offset], pop_ms)
        deadlines.add(w, [offset], pop_ms, pop_ms + 10)
    w.done(0)
    assert (deadlines.next_ms(), deadlines.first_lease_end_ms()) == (11, 12)
    w.done(2)
    assert deadlines.first_lease_end_ms() == 12
    w.done(1)
    assert deadlines.first_lease_end_ms() is None


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=20), st.integers(0, 50))
def test_a_due_lease_is_returned_once_unless_it_is_done(pops: list[tuple[int, bool]], now_ms: int) -> None:
    w = leases_of_queue()
    deadlines = Deadlines(w.count)
    for offset, (pop_ms, _) in enumerate(pops):
        take(w, [offset], pop_ms)
        deadlines.add(w, [offset], pop_ms, pop_ms + 10)
    for offset, (_, is_done) in enumerate(pops):
        if is_done:
            w.done(offset)
    due = [offset for of, offsets in deadlines.pop_due(now_ms) if of is w for offset in offsets]
    expected = [o for o, (pop_ms, is_done) in enumerate(pops) if not is_done and pop_ms + 10 <= now_ms]
    assert sorted(due) == expected
    assert deadlines.pop_due(now_ms) == []


def test_a_time_that_was_changed_to_what_it_had_been_is_told_once() -> None:
    w = leases_of_queue()
    deadlines = Deadlines(w.count)
    take(w, [0, 1], 1)
    deadlines.add(w, [0, 1], 1, 11)
    deadlines.add(w, [0], 1, 11)
    assert [(of is w, offsets) for of, offsets in deadlines.pop_due(11)] == [(True, [0, 1])]
    assert deadlines.pop_due(11) == []


def test_more_time_makes_the_earlier_deadline_void() -> None:
    w = leases_of_queue()
    deadlines = Deadlines(w.count)
    take(w, [0], 1)
    deadlines.add(w, [0], 1, 11)
    w.in_flight[0].deadline_ms = 30
    deadlines.add(w, [0], 1, 30)
    assert deadlines.pop_due(11) == []
    assert deadlines.pop_due(30) == [(w, [0])]


def test_early_returns_do_not_fill_the_memory() -> None:
    w = leases_of_queue()
    deadlines = Deadlines(w.count)
    for offset in range(5 * SWEEP_ENTRIES_MIN):
        take(w, [offset], 1)
        deadlines.add(w, [offset], 1, 11)
        assert len(deadlines) <= SWEEP_ENTRIES_MIN + 2 * w.count.rows
        if offset % 10:
            w.done(offset)
    assert sum(len(offsets) for _, offsets in deadlines.pop_due(11)) == w.count.rows


def test_no_lease_waits_until_all_entries_are_swept() -> None:
    """Consumers hold many leases and acknowledge them all: a sweep in one step would block the event loop."""
    w = leases_of_queue()
    deadlines = Deadlines(w.count)
    held = 4 * SWEEP_ENTRIES_MIN
    for offset in range(held):
        take(w, [offset], 1)
        deadlines.add(w, [offset], 1, 11)
    for offset in range(held):
        w.done(offset)
    for offset in range(held, 2 * held):
        before = len(deadlines)
        take(w, [offset], 1)
        deadlines.add(w, [offset], 1, 11)
        w.done(offset)
        assert before + 1 - len(deadlines) <= SWEPT_AT_ONCE
    assert len(deadlines) <= SWEEP_ENTRIES_MIN


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), min_size=40, max_size=90))
def test_during_sweeps_each_lease_ends_once_at_its_deadline(steps: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as small:
        small.setattr(redelivery, "SWEEP_ENTRIES_MIN", 4)
        small.setattr(redelivery, "SWEPT_AT_ONCE", 1)
        w = leases_of_queue()
        deadlines, ends_ms, now_ms = Deadlines(w.count), dict[int, int](), 0
        for offset, (step, number) in enumerate(steps):
            held = sorted(ends_ms)
            if step < 6:
                take(w, [offset], 1)
                ends_ms[offset] = w.in_flight[offset].deadline_ms = now_ms + number
                is_first = deadlines.add(w, [offset], 1, ends_ms[offset])
                # An entry that is not live any more may be earlier.
                assert not is_first or ends_ms[offset] == min(ends_ms.values())
            elif step == 6:
                now_ms += number // 9
                due = [each for _, offsets in deadlines.pop_due(now_ms) for each in offsets]
                assert sorted(due) == [each for each in held if ends_ms[each] <= now_ms]
                for each in due:
                    w.done(each)
                    del ends_ms[each]
            elif held and step < 9:
                w.done(held[number % len(held)])
                del ends_ms[held[number % len(held)]]
            elif held:
                each = held[number % len(held)]
                ends_ms[each] = w.in_flight[each].deadline_ms = now_ms + number
                deadlines.add(w, [each], 1, ends_ms[each])
            next_ms = deadlines.next_ms()
            assert not ends_ms or (next_ms is not None and next_ms <= min(ends_ms.values()))
        assert deadlines.first_lease_end_ms() == min(ends_ms.values(), default=None)
