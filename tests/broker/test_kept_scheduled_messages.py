"""The broker's operations with the other strategies, and after a change of the strategy."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.broker.on_node import batch, column, on_node
from tests.crash.checker import check
from tests.crash.lives import run
from tests.crash.world import BOUND_S, HOUR_MS, SECOND_MS, CutFiles, World

from timeball.io.clock import ManualClock
from timeball.model.errors import OverLimit, RequestError
from timeball.model.message import Kind, stored_sizes
from timeball.schedule import scheduler as scheduler_module

# Strategies that keep pending messages in files of their own.
KEEPERS = ["timer_wheel", "level_cascade"]
MINUTE_MS = 60 * SECOND_MS
BODY_BYTES = 100_000  # ten to a segment

kept_by = pytest.mark.parametrize("schedule", KEEPERS)


async def begin(world: World, schedule: str, **settings: object) -> None:
    """Restart the node with a strategy and a retention of 1 ms."""
    await world.restart(strategy=schedule, timer_wheel_ms=MINUTE_MS, retention_ms=1, **settings)


async def count_rows(world: World, kind: Kind) -> int:
    """Count the rows of a kind in the log."""
    reader = world.broker.log.reader
    return sum(rows.num_rows for rows in reader.coalesced(reader.first_seq, reader.next_seq, [kind], 1_000))


async def move_on(world: World, minutes: int) -> None:
    """Advance the clock in steps of 6 s, so that the strategy works as in real time."""
    for _ in range(minutes * 10):
        await world.advance(6 * SECOND_MS)


async def fill_a_segment(world: World) -> None:
    """Append messages that the test ignores, so that retention may remove older segments."""
    await world.send("filler", [None] * 12, BODY_BYTES)


async def delivered_keys(world: World) -> list[str]:
    """List the keys of delivered messages, without the messages of `fill_a_segment`."""
    rows = (await world.outcome()).rows
    return sorted(row.key for row in rows if row.place.topic != "filler")


# ---- pending messages -----------------------------------------------------------------------------------------


@kept_by
@on_node(compact_rows=1)
async def test_a_strategy_with_own_files_stores_scheduled_messages_and_nothing_is_compacted(
    world: World, schedule: str
) -> None:
    await begin(world, schedule)
    await world.send("a", [None, 500, HOUR_MS])
    status = world.broker.status()
    assert status["strategy"] == schedule
    assert (status["schedule"]["waiting_rows"], status["schedule"]["tail_rows"]) == (2, 0)
    with pytest.raises(RequestError, match=f"--strategy {schedule}"):
        await world.broker.compact()
    assert world.node is not None
    await world.node.maintenance.compact_if_worth()
    assert world.broker.status()["schedule"]["table_files"] == 0


@kept_by
@on_node()
async def test_files_of_a_bulk_job_are_released_beside_the_strategys_own_messages(
    world: World, schedule: str
) -> None:
    await begin(world, schedule)
    sent = await world.send("a", [40 * SECOND_MS])
    bulk = await world.bulk("a", [20 * SECOND_MS, 50 * SECOND_MS], 1)
    await world.cancel([bulk[1]])
    await move_on(world, 1)
    assert await delivered_keys(world) == sorted([sent[0], bulk[0]])
    assert check(world.observed, await world.outcome()) == []


# ---- retention, and cancels of messages whose rows it has removed -----------------------------------------------


@kept_by
@on_node()
async def test_old_segments_are_removed_although_one_of_their_messages_is_pending(
    world: World, schedule: str
) -> None:
    await begin(world, schedule)
    keys = await world.send("a", [12 * MINUTE_MS, 12 * MINUTE_MS])  # at the levels of ten minutes and of two
    seq = (await world.broker.send(batch(1, delay_ms=[12 * MINUTE_MS], topic=["a"]))).first_seq
    for _ in range(11):
        await fill_a_segment(world)
        await move_on(world, 1)
        await world.checkpoint()
        await world.apply_retention()
    reader = world.broker.log.reader
    assert reader.first_seq > seq, "a segment was removed"
    assert world.broker.status()["watermark"] >= reader.first_seq
    assert await count_rows(world, Kind.MOVED) > 0
    by_id = (await world.broker.cancel(ids=[keys[0]]))[0]
    by_number = (await world.broker.cancel(seqs=[seq]))[0]
    assert (by_id.verdict, by_number.verdict, by_number.seq) == ("cancelled", "cancelled", seq)
    assert (await world.broker.cancel(seqs=[seq]))[0].verdict == "already_cancelled"
    await world.restart()
    await move_on(world, 4)
    assert await delivered_keys(world) == [keys[1]]


@kept_by
@on_node()
async def test_retention_keeps_the_segments_of_pending_messages(world: World, schedule: str) -> None:
    await begin(world, schedule)
    await world.send("a", [30 * SECOND_MS])
    await fill_a_segment(world)
    await fill_a_segment(world)
    await world.advance(SECOND_MS)
    await world.checkpoint()
    await world.apply_retention()
    assert world.broker.log.reader.first_seq == 1
    await world.advance(40 * SECOND_MS)
    await world.checkpoint()
    await world.apply_retention()
    await world.advance(MINUTE_MS)
    await world.checkpoint()
    await world.apply_retention()
    assert world.broker.log.reader.first_seq > 1


@pytest.mark.parametrize("cancels", [False, True])
@on_node()
async def test_retention_removes_rows_of_cancelled_and_rescheduled_messages_of_a_cascade(
    world: World, cancels: bool
) -> None:
    """A MOVED row contains the whole message, and a cancelled message needs no row."""
    await begin(world, "level_cascade")
    keys = await world.send("a", [10 * HOUR_MS] * 3)
    await fill_a_segment(world)
    later = await world.send("a", [10 * HOUR_MS])
    if cancels:
        await world.cancel(keys)
    else:
        await world.reschedule(keys, 11 * HOUR_MS)
    await fill_a_segment(world)
    await world.advance(SECOND_MS)
    await world.checkpoint()
    await world.apply_retention()
    reader = world.broker.log.reader
    assert reader.first_seq > 1, "the first segment was removed"
    rows = world.broker.read_log(reader.first_seq, reader.next_seq, [Kind.SCHEDULED])
    assert [key for part in rows for key in column(part, "unique_key")] == later, "and no more"
    await world.restart()
    await world.advance(11 * HOUR_MS)
    await world.consume()
    assert await delivered_keys(world) == sorted(later if cancels else [*keys, *later])


# ---- flow control -------------------------------------------------------------------------------------------------


@on_node()
async def test_a_send_to_a_full_timer_slot_is_refused(world: World) -> None:
    await begin(world, "timer_wheel", timer_congest_num_each_slot=3)
    at_ms = world.clock.wall // 1_000 * 1_000 + 30 * SECOND_MS
    await world.broker.send(batch(3, due_ms=[at_ms, at_ms + 1, at_ms + 999]))
    before = world.broker.log.reader.next_seq
    with pytest.raises(OverLimit, match="timer-congest-num-each-slot"):
        await world.broker.send(batch(2, due_ms=[at_ms + 5, at_ms + 2_000]))
    assert world.broker.log.reader.next_seq == before, "a batch is taken whole or not at all"
    await world.broker.send(batch(4, due_ms=[None, None, at_ms + 1_000, at_ms + 1_001]))
    await world.advance(MINUTE_MS)
    assert len((await world.outcome()).rows) == 7


# ---- the property of a cascade ------------------------------------------------------------------------------------


@on_node()
async def test_only_pending_messages_have_the_property_of_a_cascade(world: World) -> None:
    await begin(world, "level_cascade")
    await world.broker.send(
        batch(
            3,
            properties=["a\x01b\x02", "c\x01d\x02", None],
            due_ms=[None, world.clock.wall + HOUR_MS + MINUTE_MS, None],
        )
    )
    texts: dict[int, str | None] = {}
    for rows in world.broker.read_log(1, 10):
        texts |= dict(zip(column(rows, "kind"), column(rows, "properties"), strict=True))
    scheduled_row = texts[Kind.SCHEDULED]
    assert scheduled_row is not None and "TIMING-LIST" in scheduled_row and "c\x01d" in scheduled_row
    assert "TIMING-LIST" not in (texts[Kind.MESSAGE] or "")
    await move_on(world, 62)
    rows = await world.broker.pull("orders", dict.fromkeys(world.broker.queues("orders"), 0), 10, 0)
    assert sorted(text.strip("\x02") for text in column(rows, "properties") if text) == ["a\x01b", "c\x01d"]


# ---- a change of strategy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_strategy", ["hour_log", *KEEPERS])
@kept_by
@on_node()
async def test_another_strategy_releases_pending_and_overdue_messages_after_a_restart(
    world: World, schedule: str, next_strategy: str
) -> None:
    await begin(world, schedule)
    keys = await world.send("a", [5 * SECOND_MS, 50 * SECOND_MS, 5 * MINUTE_MS, HOUR_MS, 5 * MINUTE_MS])
    await move_on(world, 2)
    await world.cancel([keys[4]])
    late = await world.send("a", [-HOUR_MS, 5 * SECOND_MS])
    await world.stop()
    world.clock.advance(10 * SECOND_MS)
    await world.start()
    await world.restart(strategy=next_strategy)
    await world.settled()
    assert await delivered_keys(world) == sorted([*keys[:2], *late])
    await world.cancel([keys[3]])
    await move_on(world, 4)
    await world.restart()
    await world.advance(2 * HOUR_MS)
    await world.consume()
    assert await delivered_keys(world) == sorted([*keys[:3], *late])
    assert check(world.observed, await world.outcome()) == []
    if schedule == "timer_wheel" and next_strategy == "hour_log":
        assert world.broker.status()["watermark"] > 1, "MOVED rows were compacted"


@pytest.mark.parametrize("compacts", [False, True])
@pytest.mark.parametrize("next_strategy", ["hour_log", *KEEPERS])
@on_node()
async def test_the_property_of_a_cascade_is_not_delivered(
    world: World, next_strategy: str, compacts: bool
) -> None:
    """Its TIMING-LIST is in the rows of the log, and in the files that compaction writes from them."""
    await begin(world, "level_cascade")
    for delay_ms in (11_100, 5 * MINUTE_MS + 17 * SECOND_MS):
        text = "TIMING\x0108:00:00\x02"
        await world.broker.send(batch(1, due_ms=[world.clock.wall + delay_ms], properties=[text]))
    if compacts:
        await world.restart(strategy="hour_log")
        await world.compact()
    await world.restart(strategy=next_strategy)
    await move_on(world, 6)
    rows = await world.broker.pull("orders", dict.fromkeys(world.broker.queues("orders"), 0), 10, 0)
    assert [text.strip("\x02") for text in column(rows, "properties")] == ["TIMING\x0108:00:00"] * 2
    # The index counts the sizes of properties. An index that is rebuilt from the log must have the same sizes.
    queues = world.broker.tables.topics.get("orders").queues
    indexed = [queue.index.read(queue.index.min_offset, 10)["size"].tolist() for queue in queues]
    assert sorted(size for sizes in indexed for size in sizes) == sorted(stored_sizes(rows).tolist())


# ---- sends while a slot of the backlog is opened -----------------------------------------------------------


async def delivered_after_settling(world: World) -> list[str]:
    """Let everything become due, and return the keys that were delivered, also after a restart."""
    for _ in range(3):
        await asyncio.sleep(0)
    await world.advance(10_000)
    await world.advance(HOUR_MS)
    await world.restart()
    await world.advance(HOUR_MS)
    return sorted(row.key for row in (await world.outcome()).rows)


@pytest.mark.parametrize("strategy", ["hour_log", "timer_wheel", "level_cascade"])
def test_a_message_that_is_sent_when_a_slot_begins_to_open_is_released(strategy: str) -> None:
    """An earlier version lost the message: it read the bound of the opening before the message arrived."""

    async def main() -> None:
        world = World(CutFiles(), ManualClock(), strategy=strategy)
        await world.start()
        far = await world.send("t", [HOUR_MS])
        scheduler, busy = world.broker.scheduling.scheduler, threading.Event()
        # The backlog is opened a millisecond later.
        world.clock.advance(HOUR_MS - scheduler._ahead_ms // 2 - 1)
        await asyncio.sleep(0)
        add = scheduler.add

        def add_after_a_tick(*args: Any) -> None:
            scheduler.add = add
            world.broker.ticker.tick()  # begins the opening, which has not run yet when the scheduled message is added
            add(*args)

        scheduler.add = add_after_a_tick
        world.clock.advance(1)
        assert world.node is not None
        # The reader thread is busy, and the opening waits for it.
        world.node._threads[1].submit(busy.wait, BOUND_S)
        near = await world.send("late", [3])
        world.clock.advance(1_500)
        world.broker.ticker.tick()
        busy.set()
        assert await delivered_after_settling(world) == sorted(far + near)
        await world.stop()

    run(main())


def test_a_message_that_is_sent_between_two_slices_of_an_opening_slot_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An earlier version lost the message: it counted all of the slot as settled after the first slice."""
    monkeypatch.setattr(scheduler_module, "SORT_ROWS", 4)

    async def main() -> None:
        world, busy = World(CutFiles(), ManualClock()), threading.Event()
        await world.start()
        far = await world.bulk("t", [HOUR_MS] * 12, 0)
        scheduler = world.broker.scheduling.scheduler
        world.clock.advance(HOUR_MS - scheduler._ahead_ms // 2)
        assert world.node is not None
        world.node._threads[1].submit(busy.wait, BOUND_S)
        world.broker.ticker.tick()
        await asyncio.sleep(0)  # the opening asks the reader thread, which is busy
        near = await world.send("late", [3])
        world.clock.advance(1_500)
        take_over, slices = scheduler._take_over, []

        def take_over_before_a_tick(*args: Any) -> None:
            take_over(*args)
            slices.append(args)
            asyncio.get_running_loop().call_soon(world.broker.ticker.tick)

        scheduler._take_over = take_over_before_a_tick
        busy.set()
        async with asyncio.timeout(BOUND_S):
            while scheduler._openings:
                await asyncio.sleep(0)
        assert await delivered_after_settling(world) == sorted(far + near)
        assert len(slices) > 3
        await world.stop()

    run(main())
