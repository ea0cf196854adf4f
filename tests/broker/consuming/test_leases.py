"""Leases of one queue: the open positions, of which the first is never passed. Leases of all groups in all
queues: the start of a group, the stored offsets, and idle groups that are removed before there are too many.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.crash_files import CrashFiles

from timeball.broker.consuming.lease_saver import LeaseSaver
from timeball.broker.consuming.leases import (
    NO_RECEIPT,
    PART_POSITIONS,
    SWEEP_POSITIONS_MIN,
    Lease,
    Leases,
    OpenCount,
    QueueLeases,
)
from timeball.log.queue_index import QueueIndex, QueueIndexes
from timeball.model import limits
from timeball.model.errors import OverLimit


def leases_of_queue(next_offset: int = 0, index: QueueIndex | None = None) -> QueueLeases:
    """The leases of a group that begins at `next_offset` of a queue, which is empty without an `index`."""
    index = index or QueueIndexes(CrashFiles()).queue("t", 0)
    return QueueLeases("g", "t", 0, index, next_offset, next_offset, OpenCount())


def lease_positions(queue: QueueLeases, offsets: list[int], pop_ms: int = 1) -> None:
    """Lease new positions for 10 ms, and advance the queue. Offset n has the number 100 + n and 10 bytes."""
    seqs, sizes_bytes = [100 + offset for offset in offsets], [10] * len(offsets)
    queue.lease_next(offsets, seqs, sizes_bytes, pop_ms, pop_ms + 10, since_ms=pop_ms, in_order=False)
    queue.advance(offsets[-1] + 1)


def test_a_lease_is_found_only_by_its_offset_and_pop_time() -> None:
    queue_leases = leases_of_queue()
    lease_positions(queue_leases, [0, 1], pop_ms=5)
    held = queue_leases.lease_of(1, 5)
    assert held is not None and (held.seq, held.size_bytes, held.deadline_ms) == (101, 10, 15)
    assert queue_leases.lease_of(1, 6) is None and queue_leases.lease_of(2, 5) is None
    queue_leases.mark_done(1)
    assert queue_leases.lease_of(1, 5) is None


def test_a_returned_position_is_open_without_a_receipt_and_the_lowest_one_is_leased_first() -> None:
    queue_leases = leases_of_queue()
    lease_positions(queue_leases, [0, 1, 2])
    for offset in (2, 0):
        queue_leases.give_back(offset)
    assert queue_leases.lease_of(0, 1) is None and queue_leases.lease_of(0, NO_RECEIPT) is None
    assert queue_leases.first_open == 0 and queue_leases.open_rows == 3
    assert queue_leases.lease_returned(1, 7, 17, since_ms=7, in_order=True) == [0]
    assert queue_leases.lease_of(0, 7) is queue_leases.in_flight[0] and queue_leases.in_flight[0].in_order
    assert queue_leases.lease_returned(9, 8, 18, since_ms=8, in_order=True) == [2]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 19)), max_size=60))
def test_positions_that_came_back_are_leased_in_their_order(steps: list[tuple[int, int]]) -> None:
    queue_leases, returned, first_seq = leases_of_queue(), set[int](), 100
    lease_positions(queue_leases, list(range(20)))
    for step, number in steps:  # the number is an offset, for the last two steps a count and a row
        if step < 2 and number in queue_leases.in_flight:
            queue_leases.give_back(number)
            returned.add(number)
        elif step == 2 and number in queue_leases.in_flight:
            queue_leases.park(number)
        elif step == 3 and number in queue_leases.parked:
            queue_leases.unpark(number)
            returned.add(number)
        elif step == 4:
            expected = sorted(returned)[: number // 4]
            assert queue_leases.returned_sizes(number // 4) == [10] * len(expected)
            assert queue_leases.lease_returned(number // 4, 7, 17, since_ms=7, in_order=False) == expected
            returned -= set(expected)
        elif step == 5:
            first_seq = max(first_seq, 95 + number)
            queue_leases.drop_before(first_seq)
            returned = {offset for offset in returned if 100 + offset >= first_seq}
        assert set(queue_leases.returned) == returned
        assert not returned or queue_leases.first_seq == 100 + min(returned)
    queue_leases.forget()
    assert queue_leases.lease_returned(99, 8, 18, since_ms=8, in_order=False) == []


def test_positions_acknowledged_ahead_count_as_open_until_next_offset_passes_them() -> None:
    queue_leases = leases_of_queue(5)
    for offset in (6, 6, 9):
        queue_leases.ack_ahead(offset)
    assert queue_leases.count.rows == 2 and not queue_leases.is_idle and queue_leases.first_open == 5
    queue_leases.advance(8)
    assert queue_leases.acked_ahead == {9} and queue_leases.count.rows == 1
    queue_leases.advance(10)
    assert queue_leases.is_idle and queue_leases.count.rows == 0


def test_forget_removes_all_positions_from_the_count() -> None:
    queue_leases = leases_of_queue()
    lease_positions(queue_leases, [0, 1, 2])
    queue_leases.give_back(1)
    queue_leases.ack_ahead(9)
    queue_leases.forget()
    assert queue_leases.is_idle and queue_leases.count.rows == 0 and queue_leases.lease_of(0, 1) is None


@given(
    st.lists(st.tuples(st.sampled_from(["take", "done", "back", "again"]), st.integers(0, 9)), max_size=60)
)
def test_the_first_open_position_is_the_lowest_one_in_flight_or_returned(
    steps: list[tuple[str, int]],
) -> None:
    queue_leases, done = leases_of_queue(), set()
    for step, n in steps:
        if step == "take":
            lease_positions(
                queue_leases, list(range(queue_leases.next_offset, queue_leases.next_offset + n + 1, 2))
            )
        elif step == "again":
            queue_leases.lease_returned(n, 1, 11, since_ms=1, in_order=False)
        elif queue_leases.in_flight:
            offset = sorted(queue_leases.in_flight)[n % len(queue_leases.in_flight)]
            if step == "done":
                queue_leases.mark_done(offset)
                done.add(offset)
            else:
                queue_leases.give_back(offset)
        open_offsets = [*queue_leases.in_flight, *queue_leases.returned]
        assert queue_leases.first_open == min([*open_offsets, queue_leases.next_offset])
        assert not done & set(open_offsets)
        assert queue_leases.open_rows == queue_leases.count.rows == len(open_offsets)


def test_only_the_parts_of_changed_positions_are_marked() -> None:
    queue_leases = leases_of_queue()
    lease_positions(queue_leases, list(range(2 * PART_POSITIONS + 1)))

    def marked() -> set[int]:
        """The parts that were marked since the last call."""
        parts = set(queue_leases.changed_parts)
        assert (queue_leases in queue_leases.count.changed) == bool(parts)
        queue_leases.changed_parts.clear()
        queue_leases.count.changed.clear()
        return parts

    assert marked() == {0, 1, 2}
    queue_leases.mark_done(PART_POSITIONS)
    assert marked() == {1}
    queue_leases.prolong(3, 99, 1, counts=True)
    assert marked() == {0}
    queue_leases.nack(2 * PART_POSITIONS, 1)
    assert marked() == {2}
    queue_leases.give_back(5)
    queue_leases.give_back(PART_POSITIONS - 1)
    assert marked() == {0}
    queue_leases.lease_returned(1, 7, 17, since_ms=7, in_order=False)
    assert marked() == {0}
    queue_leases.ack_ahead(7 * PART_POSITIONS)
    assert marked() == {7}
    queue_leases.advance(4 * PART_POSITIONS)
    assert marked() == {3}
    queue_leases.drop_before(100 + PART_POSITIONS)
    assert marked() == {0}, "the position before the first row is done"
    queue_leases.mark_done(PART_POSITIONS)
    assert marked() == set(), "it was done before"


def test_on_change_is_called_once_for_the_changes_of_a_queue() -> None:
    queue_leases, calls = leases_of_queue(), []
    queue_leases.count.on_change = lambda: calls.append(queue_leases)
    lease_positions(queue_leases, [0, 1])
    queue_leases.mark_done(0)
    assert calls == [queue_leases]


def test_an_advance_of_an_idle_queue_needs_no_save() -> None:
    queue_leases = leases_of_queue()
    queue_leases.advance(5)
    assert not queue_leases.changed_parts and not queue_leases.count.changed


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)), st.sets(st.integers(21, 40)))
def test_after_a_start_a_queue_has_the_open_positions_that_were_saved(
    in_flight: set[int], returned: set[int], ahead: set[int]
) -> None:
    queue_leases, returned = leases_of_queue(21), returned - in_flight
    leases = {offset: Lease(100 + offset, 10, 1, 11, 1) for offset in in_flight | returned}
    for offset in returned:
        leases[offset].pop_ms = NO_RECEIPT
    queue_leases.restore(
        {offset: leases[offset] for offset in in_flight},
        {offset: leases[offset] for offset in returned},
        set(ahead),
        {0},
    )
    assert queue_leases.first_open == min([*in_flight, *returned, 21])
    assert queue_leases.open_rows == len(in_flight) + len(returned)
    assert queue_leases.count.rows == queue_leases.open_rows + len(ahead)
    assert {offset for offset in range(41) if queue_leases.lease_of(offset, 1)} == in_flight
    assert not queue_leases.changed_parts, "the log contains the leases"
    queue_leases.advance(41)
    for offset in sorted(in_flight):
        queue_leases.mark_done(offset)
    assert queue_leases.first_open == min([*returned, 41])
    assert queue_leases.lease_returned(30, 9, 19, since_ms=9, in_order=False) == sorted(returned)


def test_a_position_that_stays_open_does_not_keep_the_heap_entries_of_later_ones() -> None:
    queue_leases = leases_of_queue()
    lease_positions(queue_leases, [0])
    for offset in range(1, 5_000):
        lease_positions(queue_leases, [offset])
        queue_leases.mark_done(offset)
    assert (queue_leases.first_open, queue_leases.open_rows) == (0, 1)
    assert len(queue_leases._order) <= SWEEP_POSITIONS_MIN + 4
    queue_leases.mark_done(0)
    assert queue_leases.first_open == queue_leases.next_offset == 5_000


# ---- all groups and queues --------------------------------------------------------------------------------


async def empty_leases(world: World, rows: int = 3) -> Leases:
    """Leases of no group, beside a topic with one queue and `rows` messages."""
    await world.broker.create_topic("orders", 1)
    if rows:
        await world.broker.send(batch(rows))
    return Leases(world.broker.tables.offsets, world.broker.waiters, OpenCount())


def queue(world: World, leases: Leases, group: str = "g", *, from_max: bool = False) -> QueueLeases:
    """Open the leases of a group in the only queue of the topic."""
    return leases.open(group, world.broker.tables.topics.get("orders"), [0], from_max=from_max)[0]


@on_node()
async def test_the_first_offset_of_a_new_group_is_stored_when_its_leases_are_opened(world: World) -> None:
    leases = await empty_leases(world)
    assert queue(world, leases).next_offset == 0
    assert world.broker.offsets("g", "orders") == {0: 0}
    assert queue(world, leases, "young", from_max=True).next_offset == 0
    # Without the first message, the queue has the offsets 1 and 2.
    index = world.broker.tables.topics.get("orders").queues[0].index
    index.hide(int(index.read(1, 1)["seq"][0]))
    assert queue(world, leases, "h").next_offset == 1
    assert queue(world, leases, "old", from_max=True).next_offset == 2


@on_node()
async def test_the_leases_of_a_queue_are_replaced_when_its_stored_offset_is_changed_elsewhere(
    world: World,
) -> None:
    leases = await empty_leases(world)
    first = queue(world, leases)
    lease_positions(first, [0, 1])
    assert queue(world, leases) is first and leases.count.rows == 2
    await world.broker.commit_offsets("g", "orders", {0: 1})
    other = queue(world, leases)
    assert other is not first and other.next_offset == 1 and leases.count.rows == 0
    first.mark_done(0)
    leases.store(first)  # this queue belongs to no group any more: it must not undo the stored offsets
    assert world.broker.offsets("g", "orders") == {0: 1}


@on_node()
async def test_an_acknowledgement_does_not_overwrite_an_offset_that_was_changed_elsewhere(
    world: World,
) -> None:
    leases = await empty_leases(world)
    queue_leases = queue(world, leases)
    lease_positions(queue_leases, [0, 1])
    await world.broker.commit_offsets("g", "orders", {0: 2})
    queue_leases.mark_done(0)
    leases.store(queue_leases)
    assert world.broker.offsets("g", "orders") == {0: 2}
    assert leases.get("g", "orders", 0) is None and leases.count.rows == 0


@on_node()
async def test_idle_queues_are_dropped_at_the_limit_and_busy_ones_are_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POP_WINDOWS_MAX", 2)
    leases = await empty_leases(world)
    lease_positions(queue(world, leases, "a"), [0])
    queue(world, leases, "b")
    lease_positions(queue(world, leases, "c"), [0])
    assert {queue_leases.group for queue_leases in leases.all()} == {"a", "c"}
    with pytest.raises(OverLimit):
        queue(world, leases, "d")


@on_node()
async def test_a_save_removes_a_forgotten_queue_from_the_changed_ones(world: World) -> None:
    leases = await empty_leases(world)
    forgotten = queue(world, leases)
    await world.broker.commit_offsets("g", "orders", {0: 1})
    queue(world, leases)
    lease_positions(forgotten, [0])
    assert forgotten in leases.count.changed
    saver = LeaseSaver(
        leases, clock=world.broker.clock, writer=world.broker.log.writer, tables=world.broker.tables, save_ms=50,
        on_failure=lambda _: None,
    )  # fmt: skip
    saver.save()
    assert forgotten not in leases.count.changed


@on_node()
async def test_an_acknowledgement_ahead_is_accepted_only_for_positions_of_the_queue_that_were_not_leased(
    world: World,
) -> None:
    leases = await empty_leases(world)
    queue_leases = queue(world, leases)
    lease_positions(queue_leases, [0])
    # The queue has the offsets 0 to 2.
    assert [leases.ack_ahead(queue_leases, offset) for offset in (-1, 0, 1, 2, 3)] == [
        False, False, True, True, False,
    ]  # fmt: skip


@on_node()
async def test_queues_whose_offset_was_changed_elsewhere_are_forgotten_and_the_others_stay(
    world: World,
) -> None:
    leases = await empty_leases(world)
    queues = {group: queue(world, leases, group) for group in ("popped", "moved")}
    for queue_leases in queues.values():
        lease_positions(queue_leases, [0, 1, 2])
        queue_leases.saved_parts = {0}
    await world.broker.commit_offsets("moved", "orders", {0: 2})
    assert [leases.is_live(queue_leases) for queue_leases in queues.values()] == [True, False]
    for group in queues:
        leases.forget_moved(group, "orders")
    assert leases.all() == [queues["popped"]] and leases.count.rows == 3
    assert queues["moved"] not in leases.count.changed
    assert leases.orphaned_parts == {("moved", "orders", 0): {0}}, "its row must be deleted"
    again = queue(world, leases, "moved")
    assert leases.orphaned_parts == {("moved", "orders", 0): {0}}, "before its new rows are written"
    assert (again.next_offset, again.saved_parts, again.changed_parts) == (2, set(), set())


@on_node()
async def test_a_queue_in_use_is_not_dropped_for_another_topic(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POP_WINDOWS_MAX", 2)
    leases = await empty_leases(world)
    used, idle = queue(world, leases, "a"), queue(world, leases, "b")
    topic = world.broker.tables.topics.get("orders")
    leases.open("c", topic, [0], from_max=False, queues_in_use=[used])
    assert leases.get("a", "orders", 0) is used and leases.get("b", "orders", 0) is None
    assert idle.is_idle


@on_node()
async def test_a_new_group_is_listed_until_its_first_offset_is_saved(world: World) -> None:
    leases = await empty_leases(world)
    assert not leases.new_units
    queue(world, leases)
    assert leases.new_units == {("g", "orders")}
    leases.new_units.clear()
    queue(world, leases)
    assert not leases.new_units
