"""Receive: a leased message comes back when its lease ends, and has at most one lease at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.consuming.subscriber import (
    AGAIN,
    DEAD,
    GROUP,
    MINUTE_MS,
    TOPIC,
    acknowledge,
    attempts,
    bodies,
    engine,
    in_queue,
    pass_time,
    receive,
    send,
    try_at_most,
)
from tests.broker.on_node import InTurn, column, on_node, settled
from tests.crash.world import World

from timeball.broker.consuming import engine as consuming_engine
from timeball.broker.consuming.leases import QueueLeases
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.filters import SQL92, compile_filter
from timeball.model.access import ANONYMOUS
from timeball.model.errors import NotFound, OutOfRange, OverLimit
from timeball.model.message import Kind, encode_properties

# The kinds of rows that contain, release, move or end a message.
MESSAGES = [Kind.MESSAGE, Kind.SCHEDULED, Kind.RELEASE, Kind.CANCEL, Kind.MOVED]


@on_node()
async def test_a_receive_appends_no_message_row_and_does_not_advance_the_offset(world: World) -> None:
    await send(world, [b"a", b"b"], tag=["x", None], keys=["k", None])
    received = await receive(world, invisible_ms=5_000)
    assert sorted(bodies(received)) == [b"a", b"b"] and attempts(received) == [1, 1]
    assert engine(world).leases.count.rows == 2
    ends = {lease.deadline_ms for queue in engine(world).leases.all() for lease in queue.in_flight.values()}
    assert ends == {world.broker.clock.elapsed_ms() + 5_000}
    assert world.broker.offsets(GROUP, TOPIC) == {0: 0, 1: 0}
    await world.broker.log.writer.flushed()
    reader, last_seq = world.broker.log.reader, received.rows.column("seq")[-1].as_py()
    assert not list(reader.rows(last_seq + 1, reader.next_seq, MESSAGES))
    assert await in_queue(world, AGAIN) == [] and world.broker.redeliveries.waiting_rows == 0


@on_node(ack_save_ms=0)
async def test_with_ack_save_ms_0_the_leases_are_durable_before_the_answer(world: World) -> None:
    await send(world, [b"a", b"b"])
    received = await receive(world)
    log, rows = world.broker.log, world.broker.tables.leases.values
    assert log.reader.next_seq == log.writer.next_seq and len(rows) == 2
    await acknowledge(world, received)
    assert log.reader.next_seq == log.writer.next_seq and not rows


@on_node()
async def test_a_receipt_is_void_after_its_group_was_moved_back_in_the_same_millisecond(world: World) -> None:
    await send(world, [b"a", b"b"])
    first = await receive(world)
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 1, 1: 1})
    assert bodies(await receive(world)) == []
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 0, 1: 0})
    second = await receive(world)
    assert sorted(bodies(second)) == [b"a", b"b"]
    assert await acknowledge(world, first) == [False, False]
    assert await acknowledge(world, second) == [True, True]


@on_node()
async def test_a_receipt_is_void_after_a_nack_and_a_new_receive_in_the_same_millisecond(world: World) -> None:
    await send(world, [b"a"])
    first = await receive(world)
    assert await engine(world).nack(first.receipts[0], 0, "", counts=False)
    await settled(world)
    second = await receive(world)
    assert bodies(second) == [b"a"]
    assert await acknowledge(world, first) == [False]
    assert await acknowledge(world, second) == [True]


@on_node()
async def test_an_unacknowledged_message_is_redelivered_once_and_counted(world: World) -> None:
    await send(world, [b"a", b"b"])
    received = await receive(world, 1)
    await acknowledge(world, await receive(world, 1))
    await pass_time(world, MINUTE_MS - 1)
    assert bodies(await receive(world)) == []
    await pass_time(world, 1)
    again = await receive(world)
    assert bodies(again) == bodies(received) and attempts(again) == [2]
    assert await acknowledge(world, received) == [False], "its lease had ended"
    assert await acknowledge(world, again) == [True]
    await pass_time(world, 2 * MINUTE_MS)
    assert bodies(await receive(world)) == []


@on_node()
async def test_a_message_whose_last_attempt_ends_unacknowledged_becomes_a_dead_letter(world: World) -> None:
    try_at_most(world, 1)
    await send(world, [b"a"])
    for attempt in (1, 2):
        received = await receive(world)
        assert attempts(received) == [attempt]
        await pass_time(world, MINUTE_MS)
    assert bodies(await receive(world)) == [] and await in_queue(world, DEAD) == [b"a"]
    assert column(await world.broker.read_queue(DEAD, 0, 0, 9), "reconsume_times") == [2]


@on_node()
async def test_a_last_attempt_acknowledged_in_time_leaves_no_dead_letter(world: World) -> None:
    try_at_most(world, 0)
    await send(world, [b"a"])
    assert await acknowledge(world, await receive(world)) == [True]
    await pass_time(world, MINUTE_MS)
    assert await in_queue(world, DEAD) == []


@on_node()
async def test_a_waiting_receive_gets_the_first_message(world: World) -> None:
    await world.broker.create_topic(TOPIC, 2)
    waiting = [asyncio.create_task(receive(world, wait_ms=30_000)) for _ in range(3)]
    await asyncio.sleep(0.01)
    await send(world, [b"a"])
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [bodies(task.result()) for task in done] == [[b"a"]]
    for body in (b"b", b"c"):
        await send(world, [body])
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        assert [bodies(task.result()) for task in done] == [[body]]
    assert not pending


@on_node()
async def test_a_receive_without_messages_returns_after_its_wait_time(world: World) -> None:
    await world.broker.create_topic(TOPIC, 2)
    assert (await receive(world, wait_ms=10)).receipts == []


@on_node()
async def test_concurrent_receives_get_each_message_once(world: World) -> None:
    await send(world, [b"%d" % i for i in range(60)])
    received = await asyncio.gather(*(receive(world, 7) for _ in range(12)))
    all_bodies = [body for answer in received for body in bodies(answer)]
    assert len(all_bodies) == len(set(all_bodies)) == 60
    receipts = [receipt for answer in received for receipt in answer.receipts]
    assert all(await engine(world).acknowledge(receipts))
    assert world.broker.offsets(GROUP, TOPIC) == {0: 30, 1: 30}


@on_node()
async def test_a_message_that_comes_back_is_handed_out_whatever_the_filter_is(world: World) -> None:
    await send(world, [b"a", b"b", b"c", b"d"], tag=["x", "y", "x", "y"])
    wanted = compile_filter("y")
    assert sorted(bodies(await receive(world, wanted=wanted))) == [b"b", b"d"]
    assert engine(world).leases.count.rows == 2, "messages that the filter excludes are done"
    await pass_time(world, MINUTE_MS)
    assert world.broker.offsets(GROUP, TOPIC) == {0: 2, 1: 2}
    assert sorted(bodies(await receive(world, wanted=compile_filter("z")))) == [b"b", b"d"]


@on_node(InTurn, ack_save_ms=0)
async def test_a_receive_that_is_cancelled_at_any_turn_leaves_no_lease_and_counts_no_attempt(
    world: World,
) -> None:
    """The cancel comes after each number of turns of the event loop that a receive takes."""
    turns, is_done = 0, False
    while not is_done:
        await send(world, [b"%d" % turns])
        receiving = asyncio.create_task(receive(world))
        for _ in range(turns):
            await asyncio.sleep(0)
        is_done = receiving.done()
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        assert receiving.cancelled() != is_done
        if not is_done:
            again = await receive(world)
            assert bodies(again) == [b"%d" % turns] and attempts(again) == [1]
            await acknowledge(world, again)
        turns += 1
    assert turns > 3, "otherwise no receive was cancelled while it ran"
    assert await in_queue(world, AGAIN) == []


@on_node()
async def test_positions_whose_rows_cannot_be_read_are_leased_again_without_an_attempt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(world, [b"a"])

    async def broken(*_: object, **__: object) -> None:
        raise OSError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(consuming_engine, "selected_rows", broken)
        with pytest.raises(OSError, match="broken"):
            await receive(world)
    again = await receive(world)
    assert bodies(again) == [b"a"] and attempts(again) == [1]


@on_node()
async def test_a_full_disk_does_not_prevent_receives_and_acknowledgements(world: World) -> None:
    """Leases are in memory, and are saved later. So a receive needs no space on the disk."""
    await send(world, [b"a", b"b"])
    await acknowledge(world, await receive(world, 1))
    writer = world.broker.log.writer
    writer.next_segment.disk_full_error = OverLimit("full")
    received = await receive(world)
    assert await acknowledge(world, received) == [True]
    writer.next_segment.disk_full_error = None


@on_node()
async def test_invalid_receive_requests_are_refused(world: World) -> None:
    await send(world, [b"a"])
    with pytest.raises(NotFound, match="'nothing' does not exist"):
        await receive(world, topic="nothing")
    for invalid_field in ({"rows": 0}, {"invisible_ms": 0}, {"queue_id": 2}):
        with pytest.raises(OutOfRange):
            await receive(world, **invalid_field)
    (receipt,) = (await receive(world)).receipts
    with pytest.raises(OutOfRange, match="between 0 and"):
        await engine(world).change_invisible_time(receipt, -1)


@on_node()
async def test_an_ordered_message_without_attempts_left_becomes_a_dead_letter_and_the_next_one_follows(
    world: World,
) -> None:
    try_at_most(world, 1)
    await send(world, [b"a", b"b"], queue_id=pa.array([0, 0], pa.int32()))
    for attempt in (1, 2):
        received = await receive(world, 1, in_order=True)
        assert (bodies(received), attempts(received)) == ([b"a"], [attempt])
        assert await engine(world).change_invisible_time(received.receipts[0], 0) == received.receipts[0]
        world.broker.consuming.wake()
        await world.until(
            lambda: not any(queue.in_flight for queue in world.broker.consuming.leases.all()),
            "the message is back",
        )
    received = await receive(world, 1, in_order=True)
    assert (bodies(received), attempts(received)) == ([b"b"], [1])
    assert await in_queue(world, DEAD) == [b"a"]
    assert await acknowledge(world, received) == [True]


@on_node()
async def test_an_ordered_message_can_become_a_dead_letter_or_be_given_back(world: World) -> None:
    await send(world, [b"a"])
    received = await receive(world, in_order=True)
    assert await engine(world).dead_letter(received.receipts[0])
    assert await in_queue(world, DEAD) == [b"a"]
    await send(world, [b"b"])
    received = await receive(world, in_order=True)
    await engine(world).give_back(received.receipts)
    assert bodies(await receive(world, in_order=True)) == [b"b"]


@on_node()
async def test_an_acknowledgement_of_one_group_does_not_end_the_message_for_another_group(
    world: World,
) -> None:
    await send(world, [b"a"])
    mine = await receive(world)
    theirs = await engine(world).receive(
        ReceiveRequest("other", TOPIC, invisible_ms=MINUTE_MS, counts_times=True), 0
    )
    assert await acknowledge(world, mine) == [True]
    await pass_time(world, MINUTE_MS)
    assert bodies(await receive(world)) == []
    again = await engine(world).receive(
        ReceiveRequest("other", TOPIC, invisible_ms=MINUTE_MS, counts_times=True), 0
    )
    assert bodies(again) == bodies(theirs) == [b"a"]


@on_node()
async def test_a_cancel_of_a_leased_message_is_refused_and_its_receipt_stays_valid(world: World) -> None:
    await send(world, [b"now"], unique_key=["u1"], keys=["k"])
    later = pa.array([1_000], pa.int64())
    await send(world, [b"later"], unique_key=["u2"], keys=["k"], delay_ms=later)
    await pass_time(world, 1_000)
    received = await receive(world)
    assert len(received.receipts) == 2
    verdicts = await world.broker.cancel(ids=["u1", "u2"])
    assert [verdict.verdict for verdict in verdicts] == ["not_found", "released"]
    assert {verdict.verdict for verdict in await world.broker.cancel(keys=["k"])} == {"released"}
    moved = await world.broker.reschedule(ids=["u1", "u2"], delay_ms=5_000)
    assert [verdict.verdict for verdict in moved] == ["not_found", "released"]
    assert await acknowledge(world, received) == [True, True], "the consumer still has the leases"
    assert (await receive(world)).receipts == []


@on_node()
async def test_a_cancel_that_names_the_retry_topic_cancels_a_message_that_waits_for_its_redelivery(
    world: World,
) -> None:
    await send(world, [b"a"], unique_key=["u1"])
    received = await receive(world)
    verdicts = await world.broker.cancel(ids=["u1"], topic=AGAIN)
    assert [verdict.verdict for verdict in verdicts] == ["not_found"], "a leased message has no copy yet"
    assert await engine(world).nack(received.receipts[0], MINUTE_MS) is not None
    verdicts = await world.broker.cancel(ids=["u1"], topic=AGAIN)
    assert [verdict.verdict for verdict in verdicts] == ["cancelled"]
    assert world.broker.redeliveries.waiting_rows == 0
    await pass_time(world, MINUTE_MS)
    assert bodies(await receive(world)) == []


# ---- a filter that the index does not help ------------------------------------------------------------------------


@on_node()
async def test_consumers_with_sql_get_each_match_once(world: World) -> None:
    """Two members skip the same messages at the same time: no match is skipped, and none comes twice."""
    numbers = [n % 97 for n in range(600)]  # 13 and 14 in every 97 messages
    properties = [encode_properties({"n": str(number)}) for number in numbers]
    await send(world, [b"%d" % n for n in range(600)], properties=properties)
    wanted = compile_filter("n BETWEEN 13 AND 14", SQL92)
    seen: list[bytes] = []

    async def consume() -> None:
        while True:
            received = await receive(world, rows=3, wanted=wanted)
            if not received.receipts:
                return
            seen.extend(bodies(received))
            await acknowledge(world, received)

    await asyncio.gather(consume(), consume())
    assert sorted(seen) == sorted(b"%d" % n for n, number in enumerate(numbers) if number in (13, 14))
    assert world.broker.offsets(GROUP, TOPIC) == {0: 300, 1: 300}


@on_node()
async def test_messages_that_the_sql_filter_skips_are_not_leased(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = [encode_properties({"n": str(n)}) for n in range(500)]
    await send(world, [b"%d" % n for n in range(500)], properties=properties)
    leased = []
    lease_next = QueueLeases.lease_next

    def record_offsets(self: QueueLeases, offsets: list[int], *args: object, **kwargs: object) -> None:
        leased.extend(offsets)
        lease_next(self, offsets, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(QueueLeases, "lease_next", record_offsets)
    received = await receive(world, rows=1, wanted=compile_filter("n = 450", SQL92))
    # The first message is leased and then read. Message 450 is at offset 225 of queue 0.
    assert bodies(received) == [b"450"] and leased == [0, 225]


@on_node()
async def test_the_stored_offset_passes_messages_that_the_sql_filter_skips(world: World) -> None:
    """Otherwise the group would read the messages again after a restart, and count them as its lag."""
    properties = [encode_properties({"n": str(n)}) for n in range(50)]
    await send(world, [b"%d" % n for n in range(50)], properties=properties)
    assert bodies(await receive(world, rows=1, wanted=compile_filter("n = 90", SQL92))) == []
    assert world.broker.offsets(GROUP, TOPIC) == {0: 25, 1: 25}


@on_node()
async def test_a_topic_deleted_during_a_skip_leaves_no_offset(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A skip moves the group past messages that the filter excludes (`Consuming._skip_unmatched`)."""
    properties = [encode_properties({"n": str(n)}) for n in range(50)]
    await send(world, [b"%d" % n for n in range(50)], properties=properties)
    in_thread = consuming_engine.in_thread

    async def delete_meanwhile(*args: Any) -> Any:
        counted = await in_thread(*args)
        if TOPIC in world.broker.topics():
            await world.broker.administration.delete_topic(TOPIC, ANONYMOUS)
        return counted

    monkeypatch.setattr(consuming_engine, "in_thread", delete_meanwhile)
    with pytest.raises(NotFound):
        await receive(world, rows=1, wanted=compile_filter("n = 90", SQL92))
    assert world.broker.offsets(GROUP, TOPIC) == {}


@on_node()
async def test_an_offset_that_is_committed_during_a_skip_is_not_overwritten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = [encode_properties({"n": str(n)}) for n in range(50)]
    await send(world, [b"%d" % n for n in range(50)], properties=properties)
    in_thread, moves = consuming_engine.in_thread, [{0: 3, 1: 20}]

    async def move_meanwhile(*args: Any) -> Any:
        counted = await in_thread(*args)
        if moves:
            world.broker.tables.offsets.commit(GROUP, TOPIC, moves.pop(), {0: 25, 1: 25})
        return counted

    monkeypatch.setattr(consuming_engine, "in_thread", move_meanwhile)
    received = await receive(world, rows=1, wanted=compile_filter("n BETWEEN 4 AND 8", SQL92))
    assert bodies(received) == [b"6"], "the first of queue 0 after the move"
    assert world.broker.offsets(GROUP, TOPIC) == {0: 3, 1: 20}
