"""Reschedule: a message is moved in one step, wherever it is, and a race with its due time has one winner.

The places of a message and the harness for races are those of test_cancel.py. tests/crash cuts the power at any call
of a reschedule, in the scenarios called `moves`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import InTurn, batch, column, on_node
from tests.broker.revoking.test_cancel import (
    MOMENTS,
    PLACES,
    SOON_MS,
    TURNS,
    delivered,
    faults,
    remove_all_rows,
    said,
    wait_turns,
)
from tests.broker.test_kept_scheduled_messages import begin, kept_by, move_on
from tests.crash.lives import run
from tests.crash.scenarios import FAR_MS
from tests.crash.world import HOUR_MS, SECOND_MS, World
from tests.crash_files import CrashFiles
from tests.schedule.test_moved import entries_of

from timeball.broker.revoking import reschedule
from timeball.io.clock import ManualClock
from timeball.io.threads import SLICE_ROWS
from timeball.log import writer
from timeball.log.reader import LogReader
from timeball.log.recovery import open_log
from timeball.log.row_encoder import as_batch
from timeball.log.segment import segment_name
from timeball.log.writer import Commit, Entry, LogWriter
from timeball.model import limits
from timeball.model.answers import Verdict
from timeball.model.config import MIB
from timeball.model.errors import InvalidDelay, OutOfRange, OverLimit, RequestError
from timeball.model.message import Int64Array, Kind, decode_properties, encode_properties
from timeball.schedule.scheduler import Scheduler

LATER_MS = 2 * HOUR_MS


async def log_rows(world: World, *kinds: Kind) -> list[dict[str, object]]:
    """Read all rows of these kinds from the log."""
    reader = world.broker.log.reader
    return [
        row for part in world.broker.read_log(reader.first_seq, 1 << 62, kinds) for row in part.to_pylist()
    ]


# ---- the message in each place ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@on_node()
async def test_a_rescheduled_message_is_delivered_at_its_new_due_time_only(
    world: World, place: Callable
) -> None:
    key = await place(world)
    due_ms = world.clock.wall + LATER_MS
    [verdict] = await world.broker.reschedule(ids=[key], due_ms=due_ms)
    assert (verdict.subject, verdict.verdict, verdict.due_ms) == (key, "rescheduled", due_ms)
    assert verdict.at_ms == world.clock.wall
    await world.advance(LATER_MS - 1)
    assert await delivered(world) == []
    await world.advance(1)
    assert await delivered(world) == [key]
    released = await world.broker.reschedule(ids=[key], due_ms=due_ms + HOUR_MS)
    assert released == [Verdict(key, "released", verdict.seq, world.clock.wall)]
    await world.advance(HOUR_MS)
    assert await delivered(world) == [key]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("survival", ["nothing", "everything"])
@on_node()
async def test_a_move_to_an_earlier_due_time_survives_a_power_failure(
    world: World, survival: str, place: Callable
) -> None:
    key = await place(world)
    [verdict] = await world.broker.reschedule(ids=[key], delay_ms=1_000)
    assert verdict.due_ms == world.clock.wall + 1_000
    image = world.files.crash(survival=survival)
    await world.abandon()
    after_cut = World(image, world.clock)
    await after_cut.start()
    await after_cut.advance(999)
    assert await delivered(after_cut) == []
    await after_cut.advance(1)
    assert await delivered(after_cut) == [key]
    await after_cut.advance(LATER_MS)
    assert await delivered(after_cut) == [key]
    await after_cut.stop()


@on_node()
async def test_a_rescheduled_message_keeps_all_its_columns(world: World) -> None:
    sent = {
        "topic": ["a"], "body": [b"\x00 body"], "tag": ["t"], "keys": ["k1 k2"], "unique_key": ["x"],
        "properties": [encode_properties({"mine": "1", "TIMER_DELIVER_MS": "5", "WAIT": "true"})],
        "queue_id": np.array([1], dtype=np.int32), "born_ms": [7], "born_host": ["10.0.0.1:5"],
        "flag": np.array([3], dtype=np.int32), "sys_flag": np.array([4], dtype=np.int32),
        "reconsume_times": np.array([2], dtype=np.int32),
    }  # fmt: skip
    await world.broker.send(batch(1, **sent, delay_ms=[FAR_MS]))
    await world.broker.reschedule(ids=["x"], delay_ms=SOON_MS)
    await world.advance(SOON_MS)
    [row] = (await world.broker.read_queue("a", 1, 0, 10)).to_pylist()
    for name in (
        "topic",
        "body",
        "tag",
        "keys",
        "unique_key",
        "queue_id",
        "born_ms",
        "born_host",
        "flag",
        "sys_flag",
    ):
        assert row[name] == sent[name][0], name
    assert row["reconsume_times"] == 2
    # Properties of the first due time are removed.
    assert decode_properties(row["properties"]) == {"mine": "1", "WAIT": "true"}


@pytest.mark.parametrize("is_delay", [True, False], ids=["delay", "due"])
@on_node()
async def test_a_few_messages_and_many_are_moved_by_equal_rows(
    world: World, monkeypatch: pytest.MonkeyPatch, *, is_delay: bool
) -> None:
    ids = ["few", "many"]
    when = {"delay_ms": LATER_MS} if is_delay else {"due_ms": world.clock.wall + LATER_MS}
    columns = {
        "topic": ["a"], "body": [b"\x00 body"], "tag": ["t"], "keys": ["k1 k2"], "born_ms": [7], "born_host": ["host"],
        "properties": [encode_properties({"mine": "1", "TIMER_DELIVER_MS": "5", "WAIT": "true"})],
        "queue_id": np.array([1], dtype=np.int32), "flag": np.array([3], dtype=np.int32),
    }  # fmt: skip
    for name in ids:
        await world.broker.send(batch(1, **columns, unique_key=[name], delay_ms=[FAR_MS]))
    for _ in range(2):  # the second move begins with a MOVED row
        await world.broker.reschedule(ids=["few"], **when)
        with monkeypatch.context() as patch:
            patch.setattr(reschedule, "FEW_ROWS", 0)
            await world.broker.reschedule(ids=["many"], **when)
    await world.advance(LATER_MS)
    rows = await log_rows(world, Kind.MOVED, Kind.RELEASE)
    numbers = {row["source_seq"] for row in rows}
    assert len(rows) == 6 and len(numbers) == 2, "two MOVED rows and a RELEASE row of each message"
    different = {"seq", "unique_key", "source_seq", "version_seq", "queue_offset"}
    few, many = ([row for row in rows if row["unique_key"] == message_id] for message_id in ids)
    equal_columns = few[0].keys() - different
    assert [{name: row[name] for name in equal_columns} for row in few] == [
        {name: row[name] for name in equal_columns} for row in many
    ]
    for message_rows in (few, many):
        assert [row["version_seq"] is None for row in message_rows] == [True, False, False]


@on_node()
async def test_a_rescheduled_message_of_a_delay_level_loses_its_level(world: World) -> None:
    levels = np.array([5, 5], dtype=np.int32)
    properties = [encode_properties({"UNIQ_KEY": key, "DELAY": "5"}) for key in "xy"]
    await world.broker.send(batch(2, delay_level=levels, unique_key=["x", "y"], properties=properties))
    [verdict] = await world.broker.reschedule(ids=["x"], delay_ms=SOON_MS)
    assert verdict.verdict == "rescheduled"
    await world.advance(SOON_MS)
    visible = [
        row
        for queue_id in world.broker.queues("orders")
        for row in (await world.broker.read_queue("orders", queue_id, 0, 9)).to_pylist()
    ]
    assert [(row["unique_key"], decode_properties(row["properties"])) for row in visible] == [
        ("x", {"UNIQ_KEY": "x"})
    ]
    await world.advance(HOUR_MS)
    assert (await world.broker.cancel(ids=["x"]))[0].verdict == "released"
    assert len(await log_rows(world, Kind.RELEASE)) == 2


@kept_by
@on_node()
async def test_messages_are_rescheduled_with_every_strategy(world: World, schedule: str) -> None:
    await begin(world, schedule)
    keys = await world.send("a", [12 * 60_000, 12 * 60_000, 5_000, HOUR_MS])
    bulk = await world.bulk("a", [40 * SECOND_MS, 50 * SECOND_MS], 1)
    await move_on(world, 1)
    verdicts = await world.broker.reschedule(ids=[keys[0], keys[3]], delay_ms=3 * 60_000)
    assert [verdict.verdict for verdict in verdicts] == ["rescheduled"] * 2
    assert await said(world, ids=[bulk[0], keys[2]]) == ["released"] * 2
    await move_on(world, 2)
    await world.restart()
    assert keys[0] not in await delivered(world)
    await move_on(world, 2)
    assert await delivered(world) == sorted([keys[0], keys[2], keys[3], *bulk])
    await move_on(world, 61)
    await world.restart()
    assert await delivered(world) == sorted([*keys, *bulk])


@on_node()
async def test_a_full_slot_of_the_timer_wheel_refuses_a_move(world: World) -> None:
    await begin(world, "timer_wheel", timer_congest_num_each_slot=1)
    at_ms = world.clock.wall // 1_000 * 1_000 + 30_000
    await world.broker.send(batch(1, unique_key=["x"], due_ms=[at_ms]))
    await world.broker.send(batch(1, unique_key=["y"], due_ms=[at_ms + 5_000]))
    before = world.broker.log.reader.next_seq
    with pytest.raises(OverLimit, match="timer-congest-num-each-slot"):
        await world.broker.reschedule(ids=["y"], due_ms=at_ms)
    assert world.broker.log.reader.next_seq == before
    assert await said(world, ids=["y"]) == ["cancelled"]


# ---- look-ups after a move -------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_table", [False, True])
@on_node()
async def test_a_rescheduled_message_is_found_by_all_its_names(world: World, in_table: bool) -> None:
    first = (await world.broker.send(batch(1, unique_key=["x"], keys=["k"], delay_ms=[FAR_MS]))).first_seq
    all_names: tuple[dict[str, list], ...] = ({"ids": ["x"]}, {"keys": ["k"]}, {"seqs": [first]})
    for delay_ms in (HOUR_MS, SOON_MS, LATER_MS):
        for names in all_names:
            if in_table:
                await world.compact()
            [verdict] = await world.broker.reschedule(**names, delay_ms=delay_ms)
            assert (verdict.verdict, verdict.seq) == ("rescheduled", first), names
    [verdict] = await world.broker.cancel(seqs=[first])
    assert (verdict.subject, verdict.verdict, verdict.seq) == (str(first), "cancelled", first)
    for names in all_names:
        [verdict] = await world.broker.cancel(**names)
        assert (verdict.verdict, verdict.seq) == ("already_cancelled", first)
    await world.advance(2 * LATER_MS)
    assert await delivered(world) == []


@on_node()
async def test_a_message_without_id_and_keys_keeps_its_number_when_it_is_moved(world: World) -> None:
    first = (await world.broker.send(batch(2, delay_ms=[FAR_MS, FAR_MS]))).first_seq
    for delay_ms in (HOUR_MS, LATER_MS):
        [verdict] = await world.broker.reschedule(seqs=[first], delay_ms=delay_ms)
        assert (verdict.verdict, verdict.seq) == ("rescheduled", first)
    [verdict] = await world.broker.cancel(seqs=[first])
    assert (verdict.verdict, verdict.seq) == ("cancelled", first)
    assert await said(world, seqs=[first]) == ["already_cancelled"]


@on_node(retention_ms=1)
async def test_a_moved_message_is_found_by_id_after_retention_removed_its_moved_row(world: World) -> None:
    [key] = await world.send("a", [HOUR_MS])
    await world.compact()
    [moved] = await world.broker.reschedule(ids=[key], delay_ms=LATER_MS)
    await remove_all_rows(world)
    assert world.broker.log.reader.first_seq > moved.seq
    [again] = await world.broker.reschedule(ids=[key], delay_ms=LATER_MS)
    assert again.verdict == "rescheduled"
    [verdict] = await world.broker.cancel(ids=[key])
    assert (verdict.verdict, verdict.seq) == ("cancelled", again.seq)
    await world.advance(2 * LATER_MS)
    assert key not in await delivered(world)


@pytest.mark.parametrize("without_checkpoint", [False, True])
@on_node()
async def test_a_restart_keeps_the_newest_version_of_a_moved_message(
    world: World, without_checkpoint: bool
) -> None:
    first = (await world.broker.send(batch(1, unique_key=["x"], delay_ms=[LATER_MS]))).first_seq
    moved = [await world.broker.reschedule(ids=["x"], delay_ms=ms) for ms in (HOUR_MS, 2 * LATER_MS)]
    newest = world.broker.scheduling.outcomes.moved.newest(first)
    assert newest is not None and newest[0] == moved[-1][0].due_ms and newest[1] > first
    await world.stop()
    if without_checkpoint:
        world.files.remove("checkpoint")
    await world.start()
    moved_after = world.broker.scheduling.outcomes.moved
    assert moved_after.newest(first) == newest
    assert entries_of(moved_after).shape == (4, 1), "one entry of four columns: that of the newest version"


@on_node(retention_ms=1)
async def test_a_number_finds_a_moved_message_after_retention_and_a_restart(world: World) -> None:
    """Retention has removed the rows of the moves, and the first due time has passed."""
    key, cancelled = await world.send("a", [LATER_MS, LATER_MS])
    without_id = (await world.broker.send(batch(1, delay_ms=[LATER_MS]))).first_seq
    await world.compact()
    for seq in (2, without_id):
        await world.broker.reschedule(seqs=[seq], delay_ms=SOON_MS)
        await world.broker.reschedule(seqs=[seq], delay_ms=2 * LATER_MS)
    await world.cancel([cancelled])
    await world.advance(2 * SOON_MS)
    await remove_all_rows(world)
    await world.restart()
    assert await said(world, seqs=[3]) == ["already_cancelled"]
    verdicts = await world.broker.reschedule(seqs=[2, without_id], delay_ms=3 * LATER_MS)
    assert [verdict.verdict for verdict in verdicts] == ["rescheduled"] * 2
    await world.advance(LATER_MS)
    await world.send("a", [1_500])
    await world.advance(1_500)  # the first due times have passed
    assert await said(world, seqs=[2]) == ["cancelled"]
    assert await said(world, ids=[key]) == ["already_cancelled"]
    await world.advance(3 * LATER_MS)
    topics = [row.place.topic for row in (await world.outcome()).rows]
    # "a": the message that was sent last. "orders": the one without id.
    assert sorted(topic for topic in topics if topic != "filler") == ["a", "orders"]


@on_node(retention_ms=1)
async def test_a_moved_and_released_message_without_log_rows_is_expired_and_not_cancelled(
    world: World,
) -> None:
    [key] = await world.send("a", [LATER_MS])
    await world.compact()
    [moved] = await world.broker.reschedule(ids=[key], delay_ms=SOON_MS)
    await world.advance(SOON_MS)
    await remove_all_rows(world)
    assert await world.broker.cancel(ids=[key]) == [Verdict(key, "expired", moved.seq)]
    assert await world.broker.cancel(seqs=[2]) == [Verdict("2", "expired", moved.seq)]


@on_node()
async def test_a_message_that_a_large_request_names_twice_is_moved_once(world: World) -> None:
    keys = await world.send("a", [FAR_MS] * (2 * SLICE_ROWS + 5))
    names = [*keys[::-1], keys[3], "nobody"]
    verdicts = await world.broker.reschedule(ids=names, delay_ms=LATER_MS)
    assert [verdict.subject for verdict in verdicts] == names
    assert [verdict.verdict for verdict in verdicts] == [*["rescheduled"] * (len(keys) + 1), "not_found"]
    assert verdicts[-2].seq == verdicts[len(keys) - 4].seq
    assert len(await log_rows(world, Kind.MOVED)) == len(keys) and not await log_rows(world, Kind.CANCEL)
    await world.advance(FAR_MS)
    assert await delivered(world) == []
    await world.advance(LATER_MS)
    assert await delivered(world) == sorted(keys)


@on_node()
async def test_a_move_is_one_frame_with_number_version_and_due_times(world: World) -> None:
    [key] = await world.send("a", [FAR_MS])
    before = world.broker.log.reader.next_seq
    [verdict] = await world.broker.reschedule(ids=[key], delay_ms=LATER_MS)
    frames = list(world.broker.log.reader.frames(before, 1 << 62))
    assert len(frames) == 1
    [moved] = frames[0][1].to_pylist()
    assert (moved["kind"], moved["source_seq"], moved["version_seq"]) == (Kind.MOVED, 2, None)
    assert (verdict.seq, moved["due_ms"], moved["store_ms"]) == (2, verdict.due_ms, world.clock.wall)
    assert (moved["accepted_ms"], moved["from_due_ms"]) == (world.clock.wall, world.clock.wall + FAR_MS)
    await world.broker.reschedule(ids=[key], delay_ms=SOON_MS)
    [again] = next(iter(world.broker.log.reader.frames(before + 1, 1 << 62)))[1].to_pylist()
    assert (again["source_seq"], again["version_seq"], again["from_due_ms"]) == (2, before, verdict.due_ms)
    await world.advance(SOON_MS)
    [released] = await log_rows(world, Kind.RELEASE)
    assert (released["source_seq"], released["version_seq"]) == (2, before + 1)


# ---- refused moves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "when",
    [
        {"due_ms": -1}, {"due_ms": 5}, {"due_ms": 1_800_000_000}, {"due_ms": 20_300_131},
        {"due_ms": 1 << 62}, {"delay_ms": -1}, {"delay_ms": limits.DELAY_MS_MAX + 1},
        {"delay_ms": 1 << 62}, {}, {"due_ms": 5, "delay_ms": 5},
    ],
)  # fmt: skip
@on_node()
async def test_a_due_time_that_a_send_would_refuse_is_refused(world: World, when: dict[str, int]) -> None:
    [key] = await world.send("a", [FAR_MS])
    with pytest.raises(InvalidDelay if len(when) == 1 else RequestError):
        await world.broker.reschedule(ids=[key], **when)
    assert await said(world, ids=[key]) == ["cancelled"]


@on_node()
async def test_a_past_due_time_becomes_now(world: World) -> None:
    [key] = await world.send("a", [FAR_MS])
    [verdict] = await world.broker.reschedule(ids=[key], due_ms=limits.DUE_MS_MIN)
    assert verdict.due_ms == world.clock.wall
    await world.advance(0)
    assert await delivered(world) == [key]
    assert world.broker.lateness.max_ms == 0


@on_node()
async def test_a_request_with_too_many_names_moves_nothing(world: World) -> None:
    [key] = await world.send("a", [FAR_MS])
    with pytest.raises(OutOfRange, match="split it"):
        await world.broker.reschedule(ids=[key] * (limits.CANCELS_PER_REQUEST_MAX + 1), delay_ms=5)
    assert await log_rows(world, Kind.CANCEL, Kind.MOVED) == []


@on_node()
async def test_a_move_creates_a_deleted_topic_again_even_without_auto_create(world: World) -> None:
    """The message has been accepted, so its delivery needs the topic."""
    [key] = await world.send("a", [FAR_MS])
    await world.restart(auto_create_topics=False)
    world.broker.tables.topics.delete("a", world.broker.log.writer.next_seq)
    [verdict] = await world.broker.reschedule(ids=[key], delay_ms=5)
    assert verdict.verdict == "rescheduled"
    await world.advance(10)
    assert sum(high for _, high in world.broker.queues("a").values()) == 1


@on_node()
async def test_a_move_is_refused_while_the_disk_is_full(world: World) -> None:
    [key] = await world.send("a", [FAR_MS])
    log = world.broker.log.writer
    log.next_segment.disk_full_error = OverLimit("no room")
    with pytest.raises(OverLimit, match="no room"):
        await world.broker.reschedule(ids=[key], delay_ms=5)
    log.next_segment.disk_full_error = None
    assert await said(world, ids=[key]) == ["cancelled"]


# ---- races --------------------------------------------------------------------------------------------------

# Requests: the index of a message, the turns of the event loop before the request, and its kind.
ACTS = st.lists(
    st.tuples(st.integers(0, 5), TURNS, st.sampled_from(["cancel", "sooner", "later"])),
    min_size=1,
    max_size=14,
)


async def race(
    world: World, acts: list[tuple[int, int, str]], due_after: int, in_table: bool = False
) -> list[str]:
    """Six messages become due after `due_after` turns. The requests `acts` cancel and move some of them."""
    keys = await world.send("a", [SOON_MS + i // 3 for i in range(6)])
    if in_table:
        await world.compact()

    async def act(index: int, turns: int, what: str) -> None:
        await wait_turns(turns)
        if what == "cancel":
            await world.cancel([keys[index]])
        else:
            await world.reschedule([keys[index]], SOON_MS + 1 if what == "sooner" else HOUR_MS)

    async def become_due() -> None:
        await wait_turns(due_after)
        world.clock.advance(SOON_MS)
        world.broker.ticker.wake()

    await asyncio.gather(become_due(), *(act(index, turns, what) for index, turns, what in acts))
    await world.advance(1)
    return keys


def contradictions(world: World) -> list[str]:
    """List the messages with verdicts that cannot all be true."""
    wrong = []
    for key, verdicts in world.observed.verdicts.items():
        if not set(verdicts) <= {"cancelled", "already_cancelled", "rescheduled", "released"}:
            wrong.append(f"{key}: {verdicts}")
        if "released" in verdicts and {"cancelled", "already_cancelled"} & set(verdicts):
            wrong.append(f"{key} is released and cancelled: {verdicts}")
        if "already_cancelled" in verdicts and verdicts.count("cancelled") != 1:
            wrong.append(f"{key} is already cancelled, but not by exactly one request: {verdicts}")
    return wrong


@settings(max_examples=60)
@given(ACTS, TURNS, st.booleans())
@on_node(InTurn)
async def test_a_race_of_moves_cancels_and_a_release_has_one_winner(
    world: World, acts: list[tuple[int, int, str]], due_after: int, in_table: bool
) -> None:
    """`faults` reports messages that were delivered although cancelled, twice, not at all, or at another time."""
    await race(world, acts, due_after, in_table)
    assert contradictions(world) == []
    await world.advance(HOUR_MS)
    assert await faults(world) == []


@settings(max_examples=25)
@given(MOMENTS)
@on_node(InTurn)
async def test_moves_during_a_compaction_all_succeed(world: World, moments: list[tuple[int, int]]) -> None:
    keys = await world.send("a", [FAR_MS] * 10)

    async def move(index: int, turns: int) -> None:
        await wait_turns(turns)
        await world.reschedule([keys[index]], HOUR_MS)

    await asyncio.gather(world.compact(), *(move(*moment) for moment in moments))
    assert {verdict for verdicts in world.observed.verdicts.values() for verdict in verdicts} == {
        "rescheduled"
    }
    await world.advance(HOUR_MS)
    assert await faults(world) == []


def run_races() -> tuple[set[str], set[str]]:
    """Return the verdicts and the kinds of faults of 15 races."""
    verdicts: set[str] = set()
    kinds: set[str] = set()

    @on_node(InTurn)
    async def run_race(world: World, due_after: int) -> None:
        await race(world, [(i % 6, i, ("cancel", "later")[i % 2]) for i in range(12)] * 2, due_after)
        await world.advance(HOUR_MS)
        verdicts.update(*world.observed.verdicts.values())
        kinds.update(fault.kind for fault in await faults(world))

    for due_after in range(15):
        run_race(due_after=due_after)
    return verdicts, kinds


def test_moves_cancels_and_releases_all_win_some_races() -> None:
    """Otherwise the race above might always have the same winner."""
    verdicts, kinds = run_races()
    assert verdicts == {"cancelled", "already_cancelled", "rescheduled", "released"}
    assert kinds == set()


def test_a_schedule_that_moves_what_it_has_handed_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the decision of `Scheduler.cancel`, the checker reports faults."""

    def cancel_any(self: Scheduler, due_ms: Int64Array, seq: Int64Array) -> np.ndarray:
        return np.ones(len(seq), dtype=np.bool_)

    monkeypatch.setattr(Scheduler, "cancel", cancel_any)
    _, kinds = run_races()
    assert kinds >= {"doubled", "resurrected"}


# ---- a power cut after any byte of the write -------------------------------------------------------------------


def kinds_after_cuts(step: int) -> list[tuple[CrashFiles, list[int]]]:
    """Cut the power after each number of bytes of a move of two messages. Return the disk, and the kinds of its rows.

    Of the numbers, the first and the last hundred are used, and of the others one in `step`.
    """
    images = []

    async def main() -> None:
        files = CrashFiles()
        world = World(files, ManualClock())
        await world.start()
        keys = await world.send("a", [FAR_MS, FAR_MS, FAR_MS])
        before = files.content(segment_name(1))
        await world.reschedule(keys[:2], HOUR_MS)
        after = files.content(segment_name(1))
        await world.abandon()
        changed = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
        begin, end = int(changed[0]), int(changed[-1]) + 1
        for at in range(begin, end + 1):
            if at - begin > 100 and end - at > 100 and at % step:
                continue
            image = files.crash(survival="everything")
            with contextlib.closing(image.open(segment_name(1))) as file:
                file.write_at(0, after[:at] + before[at:])
                file.sync()
            reader = LogReader(open_log(image, segment_bytes=MIB, now_ms=0).segments)
            images.append(
                (image, [kind for rows in reader.rows(1, 1 << 62) for kind in column(rows, "kind")])
            )

    run(main())
    return images


WAITING = [Kind.META, *[Kind.SCHEDULED] * 3]
MOVED = [*WAITING, Kind.MOVED, Kind.MOVED]


def test_a_power_cut_during_a_move_leaves_all_messages_at_their_old_due_times() -> None:
    images = kinds_after_cuts(11)
    assert len(images) > 250
    assert all(kinds == WAITING for _, kinds in images[:-1]) and images[-1][1] == MOVED

    async def main() -> None:
        for image, kinds in (images[0], images[len(images) // 2], images[-2], images[-1]):
            after_cut = World(image, ManualClock())
            await after_cut.start()
            await after_cut.advance(FAR_MS)
            assert len(await delivered(after_cut)) == (3 if kinds == WAITING else 1)
            await after_cut.advance(HOUR_MS)
            assert len(await delivered(after_cut)) == 3
            await after_cut.stop()

    run(main())


def test_a_frame_for_each_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if the rows of a move are in separate frames, a power cut leaves one of them."""
    write = LogWriter._write

    def write_each_row_as_a_frame(self: LogWriter, entries: list[Entry]) -> Commit:
        parts = list[Entry]()
        for entry in entries:
            if Kind.MOVED in column(as_batch(entry.rows), "kind"):
                for at in range(entry.rows.num_rows):
                    row = as_batch(entry.rows).slice(at, 1)
                    parts.append(replace(entry, rows=row, first_seq=entry.first_seq + at, span=1))
            else:
                parts.append(entry)
        return write(self, parts)

    monkeypatch.setattr(LogWriter, "_write", write_each_row_as_a_frame)
    monkeypatch.setattr(writer, "group_entries", lambda entries: entries)
    assert any(kinds == [*WAITING, Kind.MOVED] for _, kinds in kinds_after_cuts(50))
