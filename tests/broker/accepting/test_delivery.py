"""A scheduled message that is due becomes a release record; many large ones become several frames."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.broker.revoking.test_cancel import delivered, said
from tests.crash.world import HOUR_MS, SECOND_MS, World
from tests.node_fixture import eventually, running_node

from timeball.broker.accepting.delivery import (
    FEW_ROWS,
    Brought,
    Lateness,
    moved_rows,
    release_rows,
    split_into_frames,
)
from timeball.broker.registry.selections import SelectionFacts
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.errors import InvalidMessage, OutOfRange, OverLimit
from timeball.model.limits import DAY_MS
from timeball.model.message import TABLE_SCHEMA, Int64Array, Kind, build_rows, lateness_ms, with_seq
from timeball.schedule.backlog import Bools
from timeball.schedule.locations import as_scheduled
from timeball.schedule.outcomes import Outcomes


def scheduled_rows(sizes: list[int]) -> pa.RecordBatch:
    """Build scheduled messages with bodies of these sizes: numbers from 17 on, due times 0, 1, … ms."""
    rows = build_rows(
        len(sizes),
        kind=int(Kind.SCHEDULED),
        topic="orders",
        body=[bytes(size) for size in sizes],
        due_ms=list(range(len(sizes))),
        store_ms=[5] * len(sizes),
    )
    return with_seq(rows, 17)


def released(rows: pa.RecordBatch, now_ms: int = 1_000) -> pa.RecordBatch:
    """Build the release records of these rows, in queue n with the offset 40 + n for row n."""
    queue = np.arange(rows.num_rows, dtype=np.int64)
    return release_rows(rows, now_ms=now_ms, queue_id=queue, queue_offset=queue + 40)


def test_a_release_row_has_the_message_and_the_number_of_its_scheduled_message() -> None:
    rows = released(scheduled_rows([1, 2, 3]))
    assert set(rows.column("kind").to_pylist()) == {int(Kind.RELEASE)}
    assert rows.column("source_seq").to_pylist() == [17, 18, 19]
    assert rows.column("queue_offset").to_pylist() == [40, 41, 42]
    assert rows.column("accepted_ms").to_pylist() == [5, 5, 5]
    assert rows.column("store_ms").to_pylist() == [1_000] * 3
    assert rows.column("body").equals(scheduled_rows([1, 2, 3]).column("body"))


def test_a_rewritten_scheduled_message_keeps_its_number_and_accept_time() -> None:
    rows = moved_rows(scheduled_rows([1, 2, 3]), now_ms=1_000)
    assert set(rows.column("kind").to_pylist()) == {int(Kind.MOVED)}
    assert rows.column("source_seq").to_pylist() == [17, 18, 19]
    assert rows.column("accepted_ms").to_pylist() == [5, 5, 5]
    assert rows.column("store_ms").to_pylist() == [1_000] * 3
    assert rows.column("queue_offset").null_count == 3
    assert as_scheduled(with_seq(rows, 90)).equals(scheduled_rows([1, 2, 3]))


def test_releasing_before_the_due_time_fails_an_assertion() -> None:
    released(scheduled_rows([1, 1]), now_ms=1)
    with pytest.raises(AssertionError, match="before its due time"):
        released(scheduled_rows([1, 1]), now_ms=0)


@given(st.lists(st.integers(0, 5_000), min_size=1, max_size=40))
def test_rows_are_split_into_frames_in_their_order(sizes: list[int]) -> None:
    rows = scheduled_rows(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "REQUEST_BYTES_MAX", 8_192)
        parts = list(split_into_frames(rows))
    assert pa.Table.from_batches(parts).combine_chunks().to_batches()[0].equals(rows)
    assert all(part.nbytes <= 8_192 or part.num_rows == 1 for part in parts)


def test_rows_that_fit_into_a_frame_are_not_split() -> None:
    assert len(list(split_into_frames(scheduled_rows([100] * 100)))) == 1


def test_lateness_counts_each_release_once() -> None:
    lateness = Lateness()
    lateness.add(np.array([0, 1, 3, 70_000], dtype=np.int64))
    summary = lateness.summary()
    assert (summary["released"], summary["max_ms"]) == (4, 70_000)
    assert summary["buckets"] == {"<=0ms": 1, "<=1ms": 1, "<=5ms": 1, ">60000ms": 1}


def test_more_bytes_due_at_once_than_a_frame_holds_are_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FRAME_BYTES_MAX", 1 << 18)
    monkeypatch.setattr(limits, "REQUEST_BYTES_MAX", 1 << 17)

    clock = ManualClock()
    due_ms = clock.wall + 5_000

    def large_batch(count: int) -> pa.RecordBatch:
        columns = {"topic": ["large"] * count, "body": [bytes(10_000)] * count}
        return pa.RecordBatch.from_pydict({**columns, "due_ms": pa.array([due_ms] * count)})

    with running_node(tmp_path, clock) as node:
        for _ in range(10):
            node.run(node.broker.send(large_batch(10)))
        clock.advance(5_000)
        eventually(lambda: node.broker.lateness.released == 100, "all are released")
        assert sum(high - low for low, high in node.broker.queues("large").values()) == 100
        with pytest.raises(OverLimit, match="split it"):
            node.run(node.broker.send(large_batch(14)))


@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS + 1])
@on_node()
async def test_a_message_due_before_its_acceptance_is_not_late(world: World, rows: int) -> None:
    due_ms = pa.array([world.clock.wall - DAY_MS] * rows, pa.int64())
    await world.broker.send(batch(rows, due_ms=due_ms))
    await world.until(lambda: world.broker.lateness.released == rows, "all are released")
    assert world.broker.lateness.max_ms == world.broker.lateness.sum_ms == 0
    reader = world.broker.log.reader
    logged = [row for part in world.broker.read_log(1, reader.next_seq) for row in part.to_pylist()]
    released = [row for row in logged if row["kind"] == Kind.RELEASE]
    assert {row["due_ms"] for row in released} == {due_ms[0].as_py()}  # the due time of the send
    assert {lateness_ms(row["due_ms"], row["accepted_ms"], row["store_ms"]) for row in released} == {0}


@on_node()
async def test_a_held_message_that_was_cancelled_gets_only_a_wake_up_beside_a_cancelled_one(
    world: World,
) -> None:
    """A selection holds a topic, another one cancels all messages. Its undo must restore the held message."""
    due_ms = world.clock.wall + HOUR_MS
    for topic in ("held", "free"):
        await world.broker.send(batch(1, topic=[topic], due_ms=[due_ms]))
    selections, first_seq = world.broker.selections, world.broker.log.reader.next_seq
    await selections.select(SelectionFacts(seq=0, at_ms=0, action="pause", topics=["held"]), ANONYMOUS)
    cancel = await selections.select(SelectionFacts(seq=0, at_ms=0), ANONYMOUS)
    await world.advance(HOUR_MS)
    [moved] = log_rows_of(world, first_seq, Kind.MOVED)
    assert [row["topic"] for row in log_rows_of(world, first_seq, Kind.CANCEL)] == ["free"]
    newest = world.broker.scheduling.outcomes.moved.newest(moved["source_seq"])
    assert newest == (moved["due_ms"], moved["seq"]), "memory refers to the wake-up's own row"
    await selections.undo(cancel, ANONYMOUS)
    await selections.select(SelectionFacts(seq=0, at_ms=0, action="release"), ANONYMOUS)
    await world.broker.wakers.wake()
    await world.advance(SECOND_MS)
    assert [row["topic"] for row in log_rows_of(world, first_seq, Kind.RELEASE)] == ["held"]


def log_rows_of(world: World, first_seq: int, kind: Kind) -> list[dict[str, Any]]:
    """The rows of a kind from a number on."""
    parts = world.broker.read_log(first_seq, world.broker.log.reader.next_seq, [kind])
    return [row for part in parts for row in part.to_pylist()]


# ---- releases by a dispatcher --------------------------------------------------------------------------------------


LEAD_MS = 30 * SECOND_MS
GRACE_MS = 2 * SECOND_MS
LEASE_MS = 600 * SECOND_MS


async def load_dispatched(world: World, delays_ms: list[int]) -> tuple[list[str], pa.RecordBatch]:
    """Schedule messages that a dispatcher is to release, `delays_ms` after LEAD_MS. Return their ids and rows."""
    world.broker.delivery.lease_to_dispatcher(LEASE_MS)
    keys = await world.campaign("spring", "a", [LEAD_MS + ms for ms in delays_ms])
    await advance_and_wake(world, LEAD_MS - SECOND_MS)
    await world.until(lambda: dispatched(world) == len(keys), "all are left to the dispatcher")
    (file,) = world.broker.scheduling.hour_log.pending.all()
    rows = file.rows_between((0, 0), (1 << 62, 0)).combine_chunks().to_batches()[0]
    return keys, pa.RecordBatch.from_arrays(rows.select(TABLE_SCHEMA.names).columns, schema=TABLE_SCHEMA)


async def advance_and_wake(world: World, ms: int) -> None:
    """Advance the clock and wake the ticker."""
    world.clock.advance(ms)
    world.broker.ticker.wake()
    await asyncio.sleep(0)


def dispatched(world: World) -> int:
    """Count the messages that are left to the dispatcher."""
    return world.broker.schedule_statistics()["dispatched_rows"]


@on_node()
async def test_rows_from_the_dispatcher_are_released_once(world: World) -> None:
    keys, rows = await load_dispatched(world, [0, 1, 2, 5_000])
    await advance_and_wake(world, SECOND_MS + 2)
    release = world.broker.delivery.release_dispatched
    assert await release(rows.slice(1, 2)) == Brought(2, 0)
    assert await release(rows.slice(0, 3)) == Brought(1, 2)
    assert await release(pa.concat_batches([rows.slice(0, 3)] * 2)) == Brought(0, 6)
    assert sorted(await delivered(world)) == sorted(keys[:3])
    assert world.broker.status()["lateness"]["released"] == 3
    assert dispatched(world) == 1


@on_node()
async def test_a_dispatched_batch_with_a_row_not_due_is_refused_as_a_whole(world: World) -> None:
    keys, rows = await load_dispatched(world, [0, 1])
    await advance_and_wake(world, SECOND_MS)
    with pytest.raises(OutOfRange, match="send it then"):
        await world.broker.delivery.release_dispatched(rows)
    assert await delivered(world) == []
    await advance_and_wake(world, 1)
    assert await world.broker.delivery.release_dispatched(rows) == Brought(2, 0)
    assert sorted(await delivered(world)) == sorted(keys)


@on_node()
async def test_dispatched_rows_of_a_paused_campaign_are_released_after_its_resume(world: World) -> None:
    keys, rows = await load_dispatched(world, [0, 1])
    await world.pause("spring")
    assert dispatched(world) == 0
    await advance_and_wake(world, SECOND_MS + 1)
    assert await world.broker.delivery.release_dispatched(rows) == Brought(0, 2)
    await advance_and_wake(world, 2 * GRACE_MS)
    assert await world.resume("spring", keys, shift=True) == 2
    assert await world.broker.delivery.release_dispatched(rows) == Brought(
        0, 2
    )  # the resume has changed their due times
    await world.advance(2 * GRACE_MS)
    await world.advance(GRACE_MS)
    assert sorted(await delivered(world)) == sorted(keys)


@on_node()
async def test_messages_that_the_dispatcher_omits_are_late_by_the_grace_time(world: World) -> None:
    keys, rows = await load_dispatched(world, [0])
    await advance_and_wake(world, SECOND_MS + GRACE_MS - 1)
    assert await delivered(world) == []
    await advance_and_wake(world, 1)
    await world.settled()
    assert await delivered(world) == keys
    assert await world.broker.delivery.release_dispatched(rows) == Brought(0, 1)


@on_node()
async def test_dispatched_rows_of_unknown_messages_are_not_released(world: World) -> None:
    keys, rows = await load_dispatched(world, [0, 0, 0])
    await advance_and_wake(world, SECOND_MS)
    for name, change in (("seq", 1_000), ("due_ms", -1)):
        index = rows.schema.get_field_index(name)
        changed_rows = rows.set_column(index, rows.schema.field(name), pc.add(rows[name], change))
        assert await world.broker.delivery.release_dispatched(changed_rows) == Brought(0, 3)
    assert await delivered(world) == []
    assert await world.broker.delivery.release_dispatched(rows) == Brought(3, 0)
    assert sorted(await delivered(world)) == sorted(keys)


@on_node()
async def test_a_cancel_during_a_dispatch_has_one_winner(world: World) -> None:
    keys, rows = await load_dispatched(world, [0, 0, 0])
    await advance_and_wake(world, SECOND_MS)
    assert await said(world, ids=keys[:1]) == ["cancelled"]
    result, verdicts = await asyncio.gather(
        world.broker.delivery.release_dispatched(rows), said(world, ids=keys[1:])
    )
    assert result.released == verdicts.count("released")
    assert result.left == 1 + verdicts.count("cancelled")
    assert await said(world, ids=keys[:1]) == ["already_cancelled"]
    assert len(await delivered(world)) == result.released


@on_node()
async def test_a_restart_neither_repeats_nor_loses_dispatched_rows(world: World) -> None:
    keys, rows = await load_dispatched(world, [0, 0, 0])
    await advance_and_wake(world, SECOND_MS)
    assert await world.broker.delivery.release_dispatched(rows.slice(1, 1)) == Brought(1, 0)
    await world.stop()
    await world.start()
    assert await world.broker.delivery.release_dispatched(rows.slice(1, 1)) == Brought(0, 1)
    await world.settled()
    assert sorted(await delivered(world)) == sorted(keys)
    assert await world.broker.delivery.release_dispatched(rows) == Brought(0, 3)


@on_node()
async def test_a_dispatch_waits_while_too_many_releases_are_in_flight(
    world: World,
) -> None:
    keys, rows = await load_dispatched(world, [0] * 50)
    await advance_and_wake(world, SECOND_MS)
    before, limits.RELEASE_ROWS_IN_FLIGHT_MAX = limits.RELEASE_ROWS_IN_FLIGHT_MAX, 10
    in_flight_max = 0
    try:
        release = world.broker.delivery.release_dispatched
        tasks = [asyncio.create_task(release(rows.slice(begin, 5))) for begin in range(0, 50, 5)]
        while not all(task.done() for task in tasks):
            in_flight_max = max(in_flight_max, world.broker.scheduling.scheduler.in_flight_rows)
            await asyncio.sleep(0)
    finally:
        limits.RELEASE_ROWS_IN_FLIGHT_MAX = before
    assert 0 < in_flight_max <= 15
    assert sum(task.result().released for task in tasks) == len(await delivered(world)) == len(keys)


@on_node()
async def test_a_dispatched_row_with_an_invalid_topic_is_refused_before_any_release(world: World) -> None:
    keys, rows = await load_dispatched(world, [0])
    await advance_and_wake(world, SECOND_MS)
    changed_rows = rows.set_column(
        rows.schema.get_field_index("topic"), "topic", pa.array(["no/topic"] * len(keys))
    )
    with pytest.raises(InvalidMessage, match="no/topic"):
        await world.broker.delivery.release_dispatched(changed_rows)
    assert await world.broker.delivery.release_dispatched(rows) == Brought(1, 0)


@on_node(strategy="timer_wheel")
async def test_with_another_strategy_messages_in_files_are_dispatched(world: World) -> None:
    keys, rows = await load_dispatched(world, [0, 1])
    await advance_and_wake(world, SECOND_MS + 1)
    assert await world.broker.delivery.release_dispatched(rows) == Brought(2, 0)
    assert sorted(await delivered(world)) == sorted(keys)


@on_node()
async def test_a_dispatcher_lease_of_zero_ends_the_lease(world: World) -> None:
    keys, _ = await load_dispatched(world, [0])
    world.broker.delivery.lease_to_dispatcher(0)
    assert dispatched(world) == 0
    await world.until(lambda: world.broker.schedule_statistics()["wheel_rows"] == 1, "the message is loaded")
    await world.advance(SECOND_MS)
    assert await delivered(world) == keys
    assert world.broker.schedule_statistics()["fetched_rows"] == 0


@on_node()
async def test_redeliveries_with_long_names_are_dispatched(world: World) -> None:
    """A redelivery is pending in the retry topic of its group, whose name may be longer than a user's topic name."""
    _, rows = await load_dispatched(world, [0])
    await advance_and_wake(world, SECOND_MS)
    name = f"%RETRY%{'g' * limits.GROUP_BYTES_MAX}_{'t' * limits.TOPIC_BYTES_MAX}"
    for topic, is_allowed in ((name + "x", False), (name, True)):
        renamed = rows.set_column(
            rows.schema.get_field_index("topic"), "topic", pa.array([topic], rows.schema.field("topic").type)
        )
        if is_allowed:
            assert await world.broker.delivery.release_dispatched(renamed) == Brought(1, 0)
        else:
            with pytest.raises(InvalidMessage, match="topic"):
                await world.broker.delivery.release_dispatched(renamed)
    assert name in world.broker.topics()


# ---- many bytes due at one time ------------------------------------------------------------------------------


async def keep_in_log(world: World) -> None:
    """Leave the messages in the tail of the log."""


async def move_to_files(world: World) -> None:
    """Move the messages to data files."""
    await world.compact()


@pytest.mark.parametrize("place", [keep_in_log, move_to_files])
def test_messages_due_at_one_time_are_released_in_frames_of_limited_bytes(
    place: Callable[[World], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RELEASE_BYTES_MAX", 64 * 1024)
    monkeypatch.setattr(limits, "RELEASE_BYTES_IN_FLIGHT_MAX", 128 * 1024)
    rows, body_bytes = 45, 10 * 1024

    @on_node()
    async def check(world: World) -> None:
        due_ms = world.clock.wall + DAY_MS
        bodies = [bytes([row]) * body_bytes for row in range(rows)]
        for begin in range(0, rows, 15):
            await world.broker.send(batch(15, due_ms=[due_ms] * 15, body=bodies[begin : begin + 15]))
        await place(world)
        await world.advance(DAY_MS - SECOND_MS)
        loaded = world.broker.scheduling.scheduler.loaded
        await world.until(lambda: loaded.wheel_rows == rows, "all bodies are in memory")
        writer, first_seq = world.broker.log.writer, world.broker.log.writer.next_seq
        commits = writer.statistics.commits
        await world.advance(SECOND_MS)
        frames = [frame for _, frame in world.broker.log.reader.frames(first_seq, writer.next_seq)]
        releases = [frame.filter(pc.equal(frame.column("kind"), int(Kind.RELEASE))) for frame in frames]
        # Six bodies have less than 64 KiB, seven have more.
        assert [frame.num_rows for frame in releases if frame.num_rows] == [6] * 7 + [3]
        assert writer.statistics.commits - commits >= 8
        released = [body for frame in releases for body in frame.column("body").to_pylist()]
        assert released == bodies  # each message once, in the order of the sends

    check()


def test_released_messages_become_visible_frame_by_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "RELEASE_BYTES_MAX", 64 * 1024)
    monkeypatch.setattr(limits, "RELEASE_BYTES_IN_FLIGHT_MAX", 128 * 1024)

    @on_node()
    async def check(world: World) -> None:
        due_ms = world.clock.wall + SECOND_MS
        await world.broker.send(batch(45, due_ms=[due_ms] * 45, body=[b"x" * 10 * 1024] * 45))
        outcomes, visible, in_flight = world.broker.scheduling.outcomes, list[int](), list[int]()
        count_released = type(outcomes).released

        def record_and_release(self: Outcomes, seq: Int64Array, cancelled: Bools | None) -> None:
            in_flight.append(self.in_flight_rows)
            count_released(self, seq, cancelled)
            visible.append(sum(high for _, high in world.broker.queues("orders").values()))

        monkeypatch.setattr(type(outcomes), "released", record_and_release)
        await world.advance(SECOND_MS)
        assert visible == [6, 12, 18, 24, 30, 36, 42, 45]
        assert max(in_flight) <= 12
        assert (outcomes.in_flight_rows, outcomes.in_flight_bytes) == (0, 0)

    check()
