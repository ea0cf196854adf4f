"""Leases after a restart: those saved before a crash are exact, and a clean stop loses no lease."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np
import pytest
from tests.broker.consuming.subscriber import (
    AGAIN,
    GROUP,
    MINUTE_MS,
    TOPIC,
    acknowledge,
    attempts,
    bodies,
    engine,
    in_queue,
    pass_time,
    power_cut,
    receive,
    send,
)
from tests.broker.on_node import batch, on_node
from tests.broker.registry.state_rows import StateRows
from tests.crash.world import World
from tests.crash_files import CrashFiles

from timeball.broker.consuming import engine as consuming_engine
from timeball.broker.consuming.lease_saver import restored_queues
from timeball.broker.consuming.leases import Key, OpenCount, QueueLeases
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.broker.registry.tables import LeaseRun, SavedPart
from timeball.broker.registry.topics import Queues, Topic, TopicFacts
from timeball.log.format import ENTRY
from timeball.log.queue_index import QueueIndexes
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.errors import OverLimit


async def save_offsets(world: World) -> None:
    """Save all changed offsets and leases, durably, as the broker does from time to time."""
    assert world.node is not None
    await world.node.maintenance.save_offsets()


@on_node(ack_save_ms=0)
async def test_a_lease_survives_a_crash_until_its_end(
    world: World,
) -> None:
    await send(world, [b"%d" % i for i in range(10)])
    first = await receive(world, 4)
    await save_offsets(world)
    second = await receive(world, 4)
    await acknowledge(world, second)
    await power_cut(world)
    third = await receive(world)
    assert sorted(bodies(first) + bodies(second) + bodies(third)) == [b"%d" % i for i in range(10)]
    assert attempts(third) == [1, 1]
    await pass_time(world, MINUTE_MS)
    again = await receive(world)
    assert sorted(bodies(again)) == sorted(bodies(first) + bodies(third)) and set(attempts(again)) == {2}


@on_node()
async def test_an_unsaved_acknowledgement_is_lost_in_a_crash(world: World) -> None:
    """The first message was leased and the others were not when the leases were saved. So it is after the crash."""
    await send(world, [b"%d" % i for i in range(4)])
    first = await receive(world, 1)
    await save_offsets(world)
    second = await receive(world)
    assert await acknowledge(world, first) == [True]
    assert await acknowledge(world, second) == [True] * 3
    await power_cut(world)
    again = await receive(world)
    assert sorted(bodies(again)) == sorted(bodies(second)) and set(attempts(again)) == {1}, "at once"
    await pass_time(world, MINUTE_MS)
    late = await receive(world)
    assert sorted(bodies(late)) == sorted(bodies(first) + bodies(again)), "when its lease ends"
    assert set(attempts(late)) == {2}


@on_node(ack_save_ms=0)
async def test_messages_are_handed_out_twice_if_the_leases_are_not_restored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a start that does not restore the leases."""
    await send(world, [b"a"])
    await receive(world)
    with monkeypatch.context() as patch:
        patch.setattr(consuming_engine, "restored_queues", lambda *_: ([], {}))
        await power_cut(world)
    assert bodies(await receive(world)) == [b"a"], "handed out again during its lease"


@on_node(ack_save_ms=0)
async def test_the_lease_of_a_second_attempt_survives_a_crash(world: World) -> None:
    await send(world, [b"a"])
    await receive(world)
    await pass_time(world, MINUTE_MS)
    assert attempts(await receive(world)) == [2]
    await power_cut(world)
    assert bodies(await receive(world)) == []
    await pass_time(world, MINUTE_MS)
    assert attempts(await receive(world)) == [3]


@on_node()
async def test_a_group_that_was_moved_back_stays_there_after_a_crash(world: World) -> None:
    await send(world, [b"a", b"b"])
    received = await receive(world)
    await acknowledge(world, received)
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 0, 1: 0})
    await save_offsets(world)
    await power_cut(world)
    assert sorted(bodies(await receive(world))) == [b"a", b"b"]


@on_node()
async def test_a_group_that_was_moved_while_it_had_leases_stays_there_after_a_crash(world: World) -> None:
    await send(world, [b"%d" % i for i in range(6)])
    received = await receive(world)
    firsts = [receipt for receipt in received.receipts if not receipt.offset]
    assert await engine(world).acknowledge(firsts) == [True, True]
    await save_offsets(world)
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 0, 1: 2})
    await save_offsets(world)
    assert world.broker.tables.leases.values == {}
    await power_cut(world)
    again = await receive(world)
    assert sorted(bodies(again)) == [b"0", b"2", b"4", b"5"] and set(attempts(again)) == {1}


@pytest.mark.parametrize("writes", ["save", "nack"])
@on_node()
async def test_a_save_of_another_queue_keeps_the_moved_offset_of_a_queue(world: World, writes: str) -> None:
    """The leases of queue 1 are saved, with the offsets of the topic, before the engine has used the moved queue 0."""
    await send(world, [b"%d" % i for i in range(6)])
    received = await receive(world)
    firsts = [receipt for receipt in received.receipts if not receipt.offset]
    assert await engine(world).acknowledge(firsts) == [True, True]
    await save_offsets(world)
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 0})
    (receipt,) = [receipt for receipt in received.receipts if (receipt.queue_id, receipt.offset) == (1, 1)]
    if writes == "nack":
        assert await engine(world).nack(receipt, MINUTE_MS) == receipt
    else:
        assert await engine(world).acknowledge([receipt]) == [True]
        await engine(world).saver.save_and_wait()
    await power_cut(world)
    assert sorted(bodies(await receive(world))) == [b"0", b"2", b"4"], "the moved queue begins again"


@on_node()
async def test_a_save_of_another_group_keeps_a_moved_offset(world: World) -> None:
    """After the move, an acknowledgement makes the engine forget the leases of queue 0, but not those of queue 1."""
    await send(world, [b"%d" % i for i in range(6)])
    received = await receive(world)
    firsts = [receipt for receipt in received.receipts if not receipt.offset]
    assert await engine(world).acknowledge(firsts) == [True, True]
    others = await engine(world).receive(ReceiveRequest("other", TOPIC), 0)
    await save_offsets(world)
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 0, 1: 0})
    moved = [receipt for receipt in received.receipts if (receipt.queue_id, receipt.offset) == (0, 1)]
    await engine(world).acknowledge(moved)
    await acknowledge(world, others)
    await engine(world).saver.save_and_wait()
    await power_cut(world)
    assert sorted(bodies(await receive(world))) == [b"%d" % i for i in range(6)]


@on_node()
async def test_leases_of_a_deleted_group_are_not_restored(world: World) -> None:
    await send(world, [b"a"])
    await receive(world)
    await save_offsets(world)
    world.broker.tables.offsets.forget_group(GROUP)
    await save_offsets(world)
    assert world.broker.tables.leases.values == {}
    await power_cut(world)
    assert world.broker.offsets(GROUP, TOPIC) == {}
    assert bodies(await receive(world)) == [b"a"]


@on_node(ack_save_ms=0)
async def test_after_a_crash_only_the_unacknowledged_message_is_handed_out_again(world: World) -> None:
    """The group's offset is that of the message. The saved leases show that all later positions are done."""
    await send(world, [b"%d" % i for i in range(8)])
    held = await receive(world, 1, queue_id=0)
    received = await receive(world)
    assert len(received.receipts) == 7
    await acknowledge(world, received)
    assert world.broker.offsets(GROUP, TOPIC) == {0: 0, 1: 4}
    await power_cut(world)
    assert bodies(await receive(world)) == []
    await pass_time(world, MINUTE_MS)
    again = await receive(world)
    assert bodies(again) == bodies(held) and attempts(again) == [2]


@on_node()
async def test_an_orderly_stop_keeps_all_leases(world: World) -> None:
    await send(world, [b"a", b"b", b"c", b"d"])
    received = await receive(world, 3)
    assert await engine(world).acknowledge(received.receipts[:1]) == [True]
    await world.restart()
    assert len(bodies(await receive(world))) == 1
    assert await acknowledge(world, received) == [False, True, True]


@on_node()
async def test_the_first_offset_of_a_group_survives_a_crash_after_its_first_receive(world: World) -> None:
    await send(world, [b"%d" % i for i in range(6)])
    ask = ReceiveRequest(GROUP, TOPIC, rows=1, invisible_ms=MINUTE_MS, from_max=True, counts_times=True)
    await engine(world).receive(ask, 0)
    await power_cut(world)
    assert set(world.broker.offsets(GROUP, TOPIC)) >= {0} and await in_queue(world, AGAIN) == []
    total = 1
    while (got := await engine(world).receive(ask, 0)).receipts:
        total += len(got.receipts)
    assert total == 6


@on_node()
async def test_leases_of_a_reset_queue_are_forgotten(world: World) -> None:
    await world.broker.create_topic("orders", 1)
    await world.broker.send(batch(3))
    await engine(world).receive(ReceiveRequest("g", "orders"), 0)
    await world.restart()
    await world.broker.commit_offsets("g", "orders", {0: 1})
    assert (await engine(world).receive(ReceiveRequest("g", "orders"), 0)).rows.num_rows == 2


@on_node(ack_save_ms=0)
async def test_a_crash_keeps_the_count_delay_and_reason_of_an_ordered_nack(world: World) -> None:
    await send(world, [b"a", b"b"])
    for _ in range(2):
        received = await receive(world, 1, in_order=True, queue_id=0)
        await engine(world).nack(received.receipts[0], MINUTE_MS, "no stock")
        await power_cut(world)
        assert bodies(await receive(world, in_order=True, queue_id=0)) == []
        await pass_time(world, MINUTE_MS)
    again = await receive(world, 1, in_order=True, queue_id=0)
    assert attempts(again) == [3]
    assert "NACK_REASON\x01no stock" in again.rows.column("properties")[0].as_py()
    assert again.receipts[0].pop_ms > received.receipts[0].pop_ms
    await power_cut(world)
    assert await acknowledge(world, received) == [False]
    assert await acknowledge(world, again) == [True]


@on_node(ack_save_ms=0)
async def test_a_repeated_attempt_id_gets_the_same_ordered_messages_after_a_crash(world: World) -> None:
    await send(world, [b"a", b"b"])
    first = await receive(world, in_order=True, attempt_id="x")
    await power_cut(world)
    assert bodies(await receive(world, in_order=True, attempt_id="y")) == []
    again = await receive(world, in_order=True, attempt_id="x")
    assert sorted(bodies(again)) == sorted(bodies(first))


# ---- a start from given rows -----------------------------------------------------------------------------------

NOW_MS = 1_000


def restored(
    part: SavedPart, stored: int | None = 0, topics: tuple[str, ...] = (TOPIC,)
) -> tuple[list[QueueLeases], dict[Key, set[int]]]:
    """Restore from one saved part. The topics have one empty queue, and `stored` is the group's stored offset."""
    queues = Queues(QueueIndexes(CrashFiles()), TOPIC, 1)

    def find_topic(name: str) -> Topic | None:
        return Topic(name, queues, TopicFacts(1)) if name in topics else None

    def table(meta: MetaLog) -> MetaTable[SavedPart]:
        return MetaTable(meta, "leases", SavedPart)

    log = StateRows()
    log.opened(table).put([("a name", part)])
    return restored_queues(log.opened(table), find_topic, lambda *_: stored, OpenCount(), NOW_MS)


def test_leases_of_a_deleted_topic_or_group_or_queue_are_not_restored() -> None:
    part = SavedPart(GROUP, TOPIC, 0, 0, 0, [], [])
    assert len(restored(part)[0]) == 1
    # Their rows are deleted, so that a new topic or group of this name does not find them.
    deleted = [], {(GROUP, TOPIC, 0): {0}}
    assert restored(part, topics=()) == deleted
    assert restored(part, stored=None) == deleted
    assert restored(SavedPart(GROUP, TOPIC, 1, 0, 0, [], [])) == ([], {(GROUP, TOPIC, 1): {0}})


def test_positions_that_the_queue_does_not_have_are_not_restored() -> None:
    """Retention has removed the messages, or a disk that ignores syncs has lost them."""
    part = SavedPart(GROUP, TOPIC, 0, 0, 9, [LeaseRun(3, 5, 7, 17, 7)], [12])
    ((queue,), _) = restored(part)
    assert (queue.next_offset, queue.in_flight, queue.returned) == (0, {}, {})  # type: ignore[attr-defined]


def test_a_stored_offset_that_is_newer_than_the_saved_leases_decides() -> None:
    """The offsets of a group are also saved without the leases of all its queues."""
    queues = Queues(QueueIndexes(CrashFiles()), TOPIC, 1)
    topic = Topic(TOPIC, queues, TopicFacts(1))
    entries = np.zeros(9, ENTRY)
    entries["seq"] = np.arange(9)
    topic.queues[0].index.extend(entries)
    log = StateRows()
    log.opened(lambda meta: MetaTable(meta, "leases", SavedPart)).put(
        [("a name", SavedPart(GROUP, TOPIC, 0, 0, 5, [LeaseRun(1, 4, 7, 17, 7)], []))]
    )
    saved = log.opened(lambda meta: MetaTable(meta, "leases", SavedPart))
    ((behind,), _) = restored_queues(saved, lambda _: topic, lambda *_: 3, OpenCount(), NOW_MS)
    assert (behind.next_offset, sorted(behind.in_flight), behind.first_open) == (5, [3, 4], 3)
    ((ahead,), _) = restored_queues(saved, lambda _: topic, lambda *_: 8, OpenCount(), NOW_MS)
    assert (ahead.next_offset, ahead.in_flight, ahead.first_open) == (8, {}, 8)


@on_node()
async def test_a_topic_that_is_created_again_has_no_leases_of_the_deleted_one(world: World) -> None:
    await send(world, [b"a"])
    await receive(world)
    await engine(world).saver.save_and_wait()
    await world.broker.administration.delete_topic(TOPIC, ANONYMOUS)
    await power_cut(world)
    await save_offsets(world)
    assert not world.broker.tables.leases.values, "the rows are deleted"


@on_node()
async def test_all_queues_of_a_moved_group_stay_moved_if_a_save_of_one_queue_is_durable(
    world: World,
) -> None:
    await send(world, [b"%d" % i for i in range(8)])
    received = await receive(world)
    await acknowledge(world, received)
    await send(world, [b"held 0", b"held 1"])
    held = await receive(world)
    await engine(world).saver.save_and_wait()
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 0, 1: 0})
    again = await receive(world)  # both queues begin again
    assert len(bodies(again)) == 10 and held.receipts
    await engine(world).saver.save_and_wait([world.broker.consuming.leases.get(GROUP, TOPIC, 0)])
    await power_cut(world)
    rest = await receive(world)
    saved_bodies = {
        body for body, receipt in zip(bodies(again), again.receipts, strict=True) if not receipt.queue_id
    }
    assert set(bodies(rest)) == set(bodies(again)) - saved_bodies, "queue 1 begins where it was moved"


@on_node()
async def test_the_first_offset_of_a_group_is_durable_before_any_of_its_messages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(world, [b"%d" % i for i in range(4)])
    ask = ReceiveRequest(GROUP, TOPIC, rows=1, invisible_ms=MINUTE_MS, counts_times=True)
    log, are_durable, saved_ends = world.broker.log, list[bool](), list[int]()
    save = engine(world).saver.save_new_groups

    def save_and_record_end(queues: Iterable[QueueLeases]) -> asyncio.Future[int] | None:
        future = save(queues)
        saved_ends.append(log.writer.next_seq)
        return future

    monkeypatch.setattr(engine(world).saver, "save_new_groups", save_and_record_end)

    async def receive_and_check() -> None:
        await engine(world).receive(ask, 0)
        are_durable.append(log.reader.next_seq >= saved_ends[0])

    await asyncio.gather(receive_and_check(), receive_and_check(), receive_and_check())
    assert are_durable == [True] * 3


@on_node()
async def test_a_group_whose_first_receive_a_full_disk_refused_begins_durably_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(world, [b"a"])
    with monkeypatch.context() as full:
        full.setattr(limits, "APPEND_BYTES_IN_FLIGHT_MAX", -1)
        with pytest.raises(OverLimit):
            await receive(world)
    assert bodies(await receive(world)) == [b"a"]
    await power_cut(world)
    assert world.broker.offsets(GROUP, TOPIC), "its first offset is in the log"


@on_node(ack_save_ms=0)
async def test_a_lease_after_the_clock_was_set_back_lasts_at_most_its_invisible_time(world: World) -> None:
    """The clock was set back while no broker ran."""
    await send(world, [b"a"])
    await receive(world)
    files = world.files
    await world.abandon()
    world.clock.step_wall(-10 * MINUTE_MS)
    world.files = files.crash(survival="nothing")
    await world.start()
    await pass_time(world, MINUTE_MS - 1)
    assert await in_queue(world, AGAIN) == []
    await pass_time(world, 1)
    assert await in_queue(world, AGAIN) == [b"a"]
