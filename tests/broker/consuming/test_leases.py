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
    index = index or QueueIndexes(CrashFiles()).queue("t", 0)
    return QueueLeases("g", "t", 0, index, next_offset, next_offset, OpenCount())


def take(into: QueueLeases, offsets: list[int], pop_ms: int = 1) -> None:
    seqs, sizes_bytes = [100 + offset for offset in offsets], [10] * len(offsets)
    into.lease_next(offsets, seqs, sizes_bytes, pop_ms, pop_ms + 10, since_ms=pop_ms, in_order=False)
    into.advance(offsets[-1] + 1)


def test_a_lease_is_found_by_offset_and_pop_time() -> None:
    w = leases_of_queue()
    take(w, [0, 1], pop_ms=5)
    held = w.lease_of(1, 5)
    assert held is not None and (held.seq, held.size_bytes, held.deadline_ms) == (101, 10, 15)
    assert w.lease_of(1, 6) is None and w.lease_of(2, 5) is None
    w.done(1)
    assert w.lease_of(1, 5) is None


def test_a_returned_position_is_open_without_receipt_and_leased_lowest_first() -> None:
    w = leases_of_queue()
    take(w, [0, 1, 2])
    for offset in (2, 0):
        w.give_back(offset)
    assert w.lease_of(0, 1) is None and w.lease_of(0, NO_RECEIPT) is None
    assert w.first_open == 0 and w.open_rows == 3
    assert w.lease_returned(1, 7, 17, since_ms=7, in_order=True) == [0]
    assert w.lease_of(0, 7) is w.in_flight[0] and w.in_flight[0].in_order
    assert w.lease_returned(9, 8, 18, since_ms=8, in_order=True) == [2]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 19)), max_size=60))
def test_positions_that_came_back_are_leased_in_their_order(steps: list[tuple[int, int]]) -> None:
    w, back, first_seq = leases_of_queue(), set[int](), 100  # `take` leases offset n with number 100 + n
    take(w, list(range(20)))
    for step, number in steps:
        if step < 2 and number in w.in_flight:
            w.give_back(number)
            back.add(number)
        elif step == 2 and number in w.in_flight:
            w.park(number)
        elif step == 3 and number in w.parked:
            w.unpark(number)
            back.add(number)
        elif step == 4:
            expected = sorted(back)[: number // 4]
            assert w.returned_sizes(number // 4) == [10] * len(expected)
            assert w.lease_returned(number // 4, 7, 17, since_ms=7, in_order=False) == expected
            back -= set(expected)
        elif step == 5:
            first_seq = max(first_seq, 95 + number)
            w.drop_before(first_seq)
            back = {offset for offset in back if 100 + offset >= first_seq}
        assert set(w.returned) == back
        assert not back or w.first_seq == 100 + min(back)
    w.forget()
    assert w.lease_returned(99, 8, 18, since_ms=8, in_order=False) == []


def test_positions_done_ahead_count_until_they_are_passed() -> None:
    w = leases_of_queue(5)
    for offset in (6, 6, 9):
        w.ack_ahead(offset)
    assert w.count.rows == 2 and not w.idle and w.first_open == 5
    w.advance(8)
    assert w.acked_ahead == {9} and w.count.rows == 1
    w.advance(10)
    assert w.idle and w.count.rows == 0


def test_forget_removes_all_positions_from_the_count() -> None:
    w = leases_of_queue()
    take(w, [0, 1, 2])
    w.give_back(1)
    w.ack_ahead(9)
    w.forget()
    assert w.idle and w.count.rows == 0 and w.lease_of(0, 1) is None


@given(
    st.lists(st.tuples(st.sampled_from(["take", "done", "back", "again"]), st.integers(0, 9)), max_size=60)
)
def test_the_first_open_position_is_the_least_that_is_neither_done_nor_unseen(
    steps: list[tuple[str, int]],
) -> None:
    w, done = leases_of_queue(), set()
    for step, n in steps:
        if step == "take":
            take(w, list(range(w.next_offset, w.next_offset + n + 1, 2)))
        elif step == "again":
            w.lease_returned(n, 1, 11, since_ms=1, in_order=False)
        elif w.in_flight:
            offset = sorted(w.in_flight)[n % len(w.in_flight)]
            if step == "done":
                w.done(offset)
                done.add(offset)
            else:
                w.give_back(offset)
        open_ones = [*w.in_flight, *w.returned]
        assert w.first_open == min([*open_ones, w.next_offset])
        assert not done & set(open_ones)
        assert w.open_rows == w.count.rows == len(open_ones)


def test_only_the_parts_of_changed_positions_are_marked() -> None:
    w = leases_of_queue()
    take(w, list(range(2 * PART_POSITIONS + 1)))

    def marked() -> set[int]:
        found = set(w.changed_parts)
        assert (w in w.count.changed) == bool(found)
        w.changed_parts.clear()
        w.count.changed.clear()
        return found

    assert marked() == {0, 1, 2}
    w.done(PART_POSITIONS)
    assert marked() == {1}
    w.prolong(3, 99, 1, counts=True)
    assert marked() == {0}
    w.nack(2 * PART_POSITIONS, 1)
    assert marked() == {2}
    w.give_back(5)
    w.give_back(PART_POSITIONS - 1)
    assert marked() == {0}
    w.lease_returned(1, 7, 17, since_ms=7, in_order=False)
    assert marked() == {0}
    w.ack_ahead(7 * PART_POSITIONS)
    assert marked() == {7}
    w.advance(4 * PART_POSITIONS)
    assert marked() == {3}
    w.drop_before(100 + PART_POSITIONS)
    assert marked() == {0}, "the position before the first row is done"
    w.done(PART_POSITIONS)
    assert marked() == set(), "it was done before"


def test_the_first_change_of_a_queue_is_told_once() -> None:
    w, told = leases_of_queue(), []
    w.count.on_change = lambda: told.append(w)
    take(w, [0, 1])
    w.done(0)
    assert told == [w]


def test_a_search_that_finds_nothing_changes_nothing_that_must_be_saved() -> None:
    w = leases_of_queue()
    w.advance(5)
    assert not w.changed_parts and not w.count.changed


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)), st.sets(st.integers(21, 40)))
def test_after_a_start_a_queue_has_the_open_positions_that_were_saved(
    held: set[int], back: set[int], ahead: set[int]
) -> None:
    w, back = leases_of_queue(21), back - held
    leases = {offset: Lease(100 + offset, 10, 1, 11, 1) for offset in held | back}
    for offset in back:
        leases[offset].pop_ms = NO_RECEIPT
    w.restore({o: leases[o] for o in held}, {o: leases[o] for o in back}, set(ahead), {0})
    assert w.first_open == min([*held, *back, 21])
    assert w.count.rows == w.open_rows + len(ahead) == len(held) + len(back) + len(ahead)
    assert {o for o in range(41) if w.lease_of(o, 1)} == held
    assert not w.changed_parts, "the log contains it"
    w.advance(41)
    for offset in sorted(held):
        w.done(offset)
    assert w.first_open == min([*back, 41])
    assert w.lease_returned(30, 9, 19, since_ms=9, in_order=False) == sorted(back)


def test_one_that_is_never_given_back_does_not_keep_the_places_of_all_behind_it() -> None:
    w = leases_of_queue()
    take(w, [0])
    for offset in range(1, 5_000):
        take(w, [offset])
        w.done(offset)
    assert (w.first_open, w.open_rows) == (0, 1)
    assert len(w._order) <= SWEEP_POSITIONS_MIN + 4
    w.done(0)
    assert w.first_open == w.next_offset == 5_000


# ---- all groups and queues --------------------------------------------------------------------------------


async def opened(world: World, rows: int = 3) -> Leases:
    await world.broker.create_topic("orders", 1)
    if rows:
        await world.broker.send(batch(rows))
    return Leases(world.broker.tables.offsets, world.broker.waiters, OpenCount())


def queue(world: World, leases: Leases, group: str = "g", *, from_max: bool = False) -> QueueLeases:
    return leases.open(group, world.broker.tables.topics.get("orders"), [0], from_max=from_max)[0]


@on_node()
async def test_a_new_group_begins_and_that_is_stored(world: World) -> None:
    leases = await opened(world)
    assert queue(world, leases).next_offset == 0
    assert world.broker.offsets("g", "orders") == {0: 0}
    assert queue(world, leases, "young", from_max=True).next_offset == 0
    index = world.broker.tables.topics.get("orders").queues[0].index
    index.hide(int(index.read(1, 1)["seq"][0]))
    assert queue(world, leases, "h").next_offset == 1
    assert queue(world, leases, "old", from_max=True).next_offset == 2


@on_node()
async def test_a_window_stays_until_somebody_else_stores_an_offset(world: World) -> None:
    leases = await opened(world)
    first = queue(world, leases)
    take(first, [0, 1])
    assert queue(world, leases) is first and leases.count.rows == 2
    await world.broker.commit_offsets("g", "orders", {0: 1})
    other = queue(world, leases)
    assert other is not first and other.next_offset == 1 and leases.count.rows == 0
    first.done(0)
    leases.store(first)  # this queue belongs to no group any more: it must not undo the stored offsets
    assert world.broker.offsets("g", "orders") == {0: 1}


@on_node()
async def test_an_ack_does_not_undo_what_somebody_else_has_stored(world: World) -> None:
    leases = await opened(world)
    one = queue(world, leases)
    take(one, [0, 1])
    await world.broker.commit_offsets("g", "orders", {0: 2})
    one.done(0)
    leases.store(one)
    assert world.broker.offsets("g", "orders") == {0: 2}
    assert leases.get("g", "orders", 0) is None and leases.count.rows == 0


@on_node()
async def test_idle_windows_make_room_for_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POP_WINDOWS_MAX", 2)
    leases = await opened(world)
    take(queue(world, leases, "a"), [0])
    queue(world, leases, "b")
    take(queue(world, leases, "c"), [0])
    assert {w.group for w in leases.all()} == {"a", "c"}
    with pytest.raises(OverLimit):
        queue(world, leases, "d")


@on_node()
async def test_a_forgotten_queue_that_changes_is_not_saved_for_ever(world: World) -> None:
    leases = await opened(world)
    former = queue(world, leases)
    await world.broker.commit_offsets("g", "orders", {0: 1})
    queue(world, leases)
    take(former, [0])
    assert former in leases.count.changed
    saver = LeaseSaver(
        leases, clock=world.broker.clock, writer=world.broker.log.writer, tables=world.broker.tables, save_ms=50,
        on_failure=lambda _: None,
    )  # fmt: skip
    saver.save()
    assert former not in leases.count.changed


@on_node()
async def test_only_what_is_ahead_and_exists_is_done_ahead(world: World) -> None:
    leases = await opened(world)
    one = queue(world, leases)
    take(one, [0])
    assert [leases.ack_ahead(one, offset) for offset in (-1, 0, 1, 2, 3)] == [
        False, False, True, True, False,
    ]  # fmt: skip


@on_node()
async def test_queues_whose_offset_was_changed_elsewhere_are_forgotten_and_the_others_stay(
    world: World,
) -> None:
    leases = await opened(world)
    queues = {group: queue(world, leases, group) for group in ("popped", "moved")}
    for one in queues.values():
        take(one, [0, 1, 2])
        one.saved_parts = {0}
    await world.broker.commit_offsets("moved", "orders", {0: 2})
    assert [leases.is_live(one) for one in queues.values()] == [True, False]
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
    leases = await opened(world)
    used, idle = queue(world, leases, "a"), queue(world, leases, "b")
    topic = world.broker.tables.topics.get("orders")
    leases.open("c", topic, [0], from_max=False, kept=[used])
    assert leases.get("a", "orders", 0) is used and leases.get("b", "orders", 0) is None
    assert idle.idle


@on_node()
async def test_where_a_group_begins_is_fresh_until_somebody_has_saved_it(world: World) -> None:
    leases = await opened(world)
    assert not leases.begun
    queue(world, leases)
    assert leases.begun == {("g", "orders")}
    leases.begun.clear()
    queue(world, leases)
    assert not leases.begun
