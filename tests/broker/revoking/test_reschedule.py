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
    after,
    delivered,
    faults,
    let_go_of_all,
    said,
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
    reader = world.broker.log.reader
    return [
        row for part in world.broker.read_log(reader.first_seq, 1 << 62, kinds) for row in part.to_pylist()
    ]


# ---- wherever it waits --------------------------------------------------------------------------------------


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
    left = World(image, world.clock)
    await left.start()
    await left.advance(999)
    assert await delivered(left) == []
    await left.advance(1)
    assert await delivered(left) == [key]
    await left.advance(LATER_MS)
    assert await delivered(left) == [key]
    await left.stop()


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
    # What once said when it was due is not true any more.
    assert decode_properties(row["properties"]) == {"mine": "1", "WAIT": "true"}


@pytest.mark.parametrize("is_delay", [True, False], ids=["delay", "due"])
@on_node()
async def test_a_few_messages_are_moved_as_many_are(
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
    for _ in range(2):  # the second move is one of a MOVED row
        await world.broker.reschedule(ids=["few"], **when)
        with monkeypatch.context() as patch:
            patch.setattr(reschedule, "FEW_ROWS", 0)
            await world.broker.reschedule(ids=["many"], **when)
    await world.advance(LATER_MS)
    rows = await log_rows(world, Kind.MOVED, Kind.RELEASE)
    numbers = {row["source_seq"] for row in rows}
    assert len(rows) == 6 and len(numbers) == 2
    own = {"seq", "unique_key", "source_seq", "version_seq", "queue_offset"}
    few, many = (
        [{name: row[name] for name in row.keys() - own} for row in rows if row["unique_key"] == name]
        for name in ids
    )
    assert few == many
    versions = [[row["version_seq"] is None for row in rows if row["unique_key"] == name] for name in ids]
    assert versions == [[True, False, False]] * 2


@on_node()
async def test_a_scheduled_message_of_a_delay_level_becomes_an_ordinary_one(world: World) -> None:
    levels = np.array([5, 5], dtype=np.int32)
    properties = [encode_properties({"UNIQ_KEY": key, "DELAY": "5"}) for key in "xy"]
    await world.broker.send(batch(2, delay_level=levels, unique_key=["x", "y"], properties=properties))
    [verdict] = await world.broker.reschedule(ids=["x"], delay_ms=SOON_MS)
    assert verdict.verdict == "rescheduled"
    await world.advance(SOON_MS)
    found = [
        r
        for q in world.broker.queues("orders")
        for r in (await world.broker.read_queue("orders", q, 0, 9)).to_pylist()
    ]
    assert [(row["unique_key"], decode_properties(row["properties"])) for row in found] == [
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
    moved = await world.broker.reschedule(ids=[keys[0], keys[3]], delay_ms=3 * 60_000)
    assert [v.verdict for v in moved] == ["rescheduled"] * 2
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


# ---- what names find afterwards -----------------------------------------------------------------------------


@pytest.mark.parametrize("filed", [False, True])
@on_node()
async def test_a_rescheduled_message_is_found_by_all_its_names(world: World, filed: bool) -> None:
    first = (await world.broker.send(batch(1, unique_key=["x"], keys=["k"], delay_ms=[FAR_MS]))).first_seq
    all_names: tuple[dict[str, list], ...] = ({"ids": ["x"]}, {"keys": ["k"]}, {"seqs": [first]})
    for delay_ms in (HOUR_MS, SOON_MS, LATER_MS):
        for names in all_names:
            if filed:
                await world.compact()
            [verdict] = await world.broker.reschedule(**names, delay_ms=delay_ms)
            assert (verdict.verdict, verdict.seq) == ("rescheduled", first), names
    [verdict] = await world.broker.cancel(seqs=[first])
    assert (verdict.subject, verdict.verdict, verdict.seq) == (str(first), "cancelled", first)
    for names in all_names:
        found = await world.broker.cancel(**names)
        assert [(v.verdict, v.seq) for v in found] == [("already_cancelled", first)]
    await world.advance(2 * LATER_MS)
    assert await world.broker.pull("orders", {0: 0, 1: 0}, 9, 0) == batch(0) or await delivered(world) == []


@on_node()
async def test_a_scheduled_message_without_a_name_is_followed_by_its_number(world: World) -> None:
    first = (await world.broker.send(batch(2, delay_ms=[FAR_MS, FAR_MS]))).first_seq
    [a] = await world.broker.reschedule(seqs=[first], delay_ms=HOUR_MS)
    [b] = await world.broker.reschedule(seqs=[first], delay_ms=LATER_MS)
    assert (a.verdict, b.verdict) == ("rescheduled", "rescheduled")
    assert (a.seq, b.seq) == (first, first)
    assert [(v.verdict, v.seq) for v in await world.broker.cancel(seqs=[first])] == [("cancelled", first)]
    assert await said(world, seqs=[first]) == ["already_cancelled"]


@on_node(retention_ms=1)
async def test_a_moved_message_is_found_by_id_after_retention_removed_its_moved_row(world: World) -> None:
    """Then an id still names the pending message. No verdict claims more than the log shows."""
    [key] = await world.send("a", [HOUR_MS])
    await world.compact()
    [moved] = await world.broker.reschedule(ids=[key], delay_ms=LATER_MS)
    await let_go_of_all(world)
    assert world.broker.log.reader.first_seq > moved.seq
    again = await world.broker.reschedule(ids=[key], delay_ms=LATER_MS)
    assert [v.verdict for v in again] == ["rescheduled"]
    assert [(v.verdict, v.seq) for v in await world.broker.cancel(ids=[key])] == [("cancelled", again[0].seq)]
    await world.advance(2 * LATER_MS)
    assert key not in await delivered(world)


@pytest.mark.parametrize("without_checkpoint", [False, True])
@on_node()
async def test_where_it_went_is_remembered_through_a_restart(world: World, without_checkpoint: bool) -> None:
    first = (await world.broker.send(batch(1, unique_key=["x"], delay_ms=[LATER_MS]))).first_seq
    moved = [await world.broker.reschedule(ids=["x"], delay_ms=ms) for ms in (HOUR_MS, 2 * LATER_MS)]
    newest = world.broker.scheduling.outcomes.moved.newest(first)
    assert newest is not None and newest[0] == moved[-1][0].due_ms and newest[1] > first
    await world.stop()
    if without_checkpoint:
        world.files.remove("checkpoint")
    await world.start()
    known = world.broker.scheduling.outcomes.moved
    assert known.newest(first) == newest and entries_of(known).shape == (4, 1), "one entry"


@on_node(retention_ms=1)
async def test_a_number_leads_on_when_the_log_has_let_go_of_it(world: World) -> None:
    """With numbers that are already forgotten, over a restart, and until its own due time has passed."""
    key, quiet = await world.send("a", [LATER_MS, LATER_MS])
    nameless = (await world.broker.send(batch(1, delay_ms=[LATER_MS]))).first_seq
    await world.compact()
    for seq in (2, nameless):
        await world.broker.reschedule(seqs=[seq], delay_ms=SOON_MS)
        await world.broker.reschedule(seqs=[seq], delay_ms=2 * LATER_MS)
    await world.cancel([quiet])
    await world.advance(2 * SOON_MS)
    await let_go_of_all(world)
    await world.restart()
    assert await said(world, seqs=[3]) == ["already_cancelled"], "that was a cancel"
    told = await world.broker.reschedule(seqs=[2, nameless], delay_ms=3 * LATER_MS)
    assert [v.verdict for v in told] == ["rescheduled"] * 2
    await world.advance(LATER_MS)
    await world.send("a", [1_500])
    await world.advance(1_500)  # its first instants have passed, and what waits is found all the same
    assert await said(world, seqs=[2]) == ["cancelled"]
    assert await said(world, ids=[key]) == ["already_cancelled"]
    await world.advance(3 * LATER_MS)
    came = [row.place.topic for row in (await world.outcome()).rows]
    assert sorted(topic for topic in came if topic != "filler") == [
        "a",
        "orders",
    ]  # the late one, the nameless one


@on_node(retention_ms=1)
async def test_a_message_that_came_at_another_time_was_not_cancelled(world: World) -> None:
    [key] = await world.send("a", [LATER_MS])
    await world.compact()
    [moved] = await world.broker.reschedule(ids=[key], delay_ms=SOON_MS)
    await world.advance(SOON_MS)
    await let_go_of_all(world)
    assert await world.broker.cancel(ids=[key]) == [Verdict(key, "expired", moved.seq)]
    assert await world.broker.cancel(seqs=[2]) == [Verdict("2", "expired", moved.seq)]


@on_node()
async def test_many_at_once_and_one_named_twice(world: World) -> None:
    keys = await world.send("a", [FAR_MS] * (2 * SLICE_ROWS + 5))
    asked = [*keys[::-1], keys[3], "nobody"]
    verdicts = await world.broker.reschedule(ids=asked, delay_ms=LATER_MS)
    assert [v.subject for v in verdicts] == asked
    assert [v.verdict for v in verdicts] == [*["rescheduled"] * (len(keys) + 1), "not_found"]
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


# ---- what is refused ----------------------------------------------------------------------------------------


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
async def test_too_many_at_once_move_nothing(world: World) -> None:
    [key] = await world.send("a", [FAR_MS])
    with pytest.raises(OutOfRange, match="split it"):
        await world.broker.reschedule(ids=[key] * (limits.CANCELS_PER_REQUEST_MAX + 1), delay_ms=5)
    assert await log_rows(world, Kind.CANCEL) == []


@on_node()
async def test_a_scheduled_message_for_a_topic_that_is_gone_is_moved_all_the_same(world: World) -> None:
    """It has been accepted: whether a topic may be made is not asked again, its delivery brings it back."""
    [key] = await world.send("a", [FAR_MS])
    await world.restart(auto_create_topics=False)
    world.broker.tables.topics.delete("a", world.broker.log.writer.next_seq)
    [verdict] = await world.broker.reschedule(ids=[key], delay_ms=5)
    assert verdict.verdict == "rescheduled"
    await world.advance(10)
    assert sum(high for _, high in world.broker.queues("a").values()) == 1


@on_node()
async def test_a_full_disk_refuses_it_as_it_refuses_a_send(
    world: World,
) -> None:
    [key] = await world.send("a", [FAR_MS])
    log = world.broker.log.writer
    log.next_segment.disk_full_error = OverLimit("no room")
    with pytest.raises(OverLimit, match="no room"):
        await world.broker.reschedule(ids=[key], delay_ms=5)
    log.next_segment.disk_full_error = None
    assert await said(world, ids=[key]) == ["cancelled"]


# ---- races --------------------------------------------------------------------------------------------------

ACTS = st.lists(
    st.tuples(st.integers(0, 5), TURNS, st.sampled_from(["cancel", "sooner", "later"])),
    min_size=1,
    max_size=14,
)


async def race(
    world: World, acts: list[tuple[int, int, str]], due_after: int, filed: bool = False
) -> list[str]:
    """Six messages become due while some are cancelled and some moved, each some loop iterations after the start."""
    keys = await world.send("a", [SOON_MS + i // 3 for i in range(6)])
    if filed:
        await world.compact()

    async def act(number: int, turns: int, what: str) -> None:
        await after(turns)
        if what == "cancel":
            await world.cancel([keys[number]])
        else:
            await world.reschedule([keys[number]], SOON_MS + 1 if what == "sooner" else HOUR_MS)

    async def due() -> None:
        await after(due_after)
        world.clock.advance(SOON_MS)
        world.broker.ticker.wake()

    await asyncio.gather(due(), *(act(*one) for one in acts))
    await world.advance(1)
    return keys


def contradictions(world: World) -> list[str]:
    """Verdicts on one message that cannot all be true, in any order."""
    wrong = []
    for key, verdicts in world.observed.verdicts.items():
        if not set(verdicts) <= {"cancelled", "already_cancelled", "rescheduled", "released"}:
            wrong.append(f"{key}: {verdicts}")
        if "released" in verdicts and {"cancelled", "already_cancelled"} & set(verdicts):
            wrong.append(f"{key} is released and cancelled: {verdicts}")
        if "already_cancelled" in verdicts and verdicts.count("cancelled") != 1:
            wrong.append(f"{key} was cancelled by nobody: {verdicts}")
    return wrong


@settings(max_examples=60)
@given(ACTS, TURNS, st.booleans())
@on_node(InTurn)
async def test_one_of_them_wins(
    world: World, acts: list[tuple[int, int, str]], due_after: int, filed: bool
) -> None:
    """The checker knows what came although it was cancelled, came twice or not at all, or at another instant."""
    await race(world, acts, due_after, filed)
    assert contradictions(world) == []
    await world.advance(HOUR_MS)
    assert await faults(world) == []


@settings(max_examples=25)
@given(MOMENTS)
@on_node(InTurn)
async def test_moves_while_the_tail_moves_to_the_table(world: World, moments: list[tuple[int, int]]) -> None:
    keys = await world.send("a", [FAR_MS] * 10)

    async def later(number: int, turns: int) -> None:
        await after(turns)
        await world.reschedule([keys[number]], HOUR_MS)

    await asyncio.gather(world.compact(), *(later(*moment) for moment in moments))
    assert {verdict for said in world.observed.verdicts.values() for verdict in said} == {"rescheduled"}
    await world.advance(HOUR_MS)
    assert await faults(world) == []


def won(schedule_cancels: Callable | None = None) -> tuple[set[str], set[str]]:
    """Return the verdicts and the kinds of faults of races."""
    verdicts: set[str] = set()
    kinds: set[str] = set()

    @on_node(InTurn)
    async def once(world: World, due_after: int) -> None:
        await race(world, [(i % 6, i, ("cancel", "later")[i % 2]) for i in range(12)] * 2, due_after)
        await world.advance(HOUR_MS)
        verdicts.update(*world.observed.verdicts.values())
        kinds.update(fault.kind for fault in await faults(world))

    for due_after in range(15):
        once(due_after=due_after)
    return verdicts, kinds


def test_all_sides_win_some_races() -> None:
    verdicts, kinds = won()
    assert verdicts == {"cancelled", "already_cancelled", "rescheduled", "released"}
    assert kinds == set()


def test_a_schedule_that_moves_what_it_has_handed_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: Scheduler, due_ms: Int64Array, seq: Int64Array) -> np.ndarray:
        return np.ones(len(seq), dtype=np.bool_)

    monkeypatch.setattr(Scheduler, "cancel", careless)
    assert won()[1] >= {"doubled", "resurrected"}


# ---- the power goes at any byte of the write -----------------------------------------------------------------


def kinds_after_cuts(step: int) -> list[tuple[CrashFiles, list[int]]]:
    """The state that a recovery finds if some bytes of the move of two messages were on disk: an image for each number.

    It covers every byte of the first and last hundred, in between one of `step`.
    """
    found = []

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
            found.append((image, [kind for rows in reader.rows(1, 1 << 62) for kind in column(rows, "kind")]))

    run(main())
    return found


WAITING = [Kind.META, *[Kind.SCHEDULED] * 3]
MOVED = [*WAITING, Kind.MOVED, Kind.MOVED]


def test_a_move_that_is_torn_anywhere_has_not_happened() -> None:
    images = kinds_after_cuts(11)
    assert len(images) > 250
    assert all(kinds == WAITING for _, kinds in images[:-1]) and images[-1][1] == MOVED

    async def main() -> None:
        for image, kinds in (images[0], images[len(images) // 2], images[-2], images[-1]):
            left = World(image, ManualClock())
            await left.start()
            await left.advance(FAR_MS)
            assert len(await delivered(left)) == (3 if kinds == WAITING else 1)
            await left.advance(HOUR_MS)
            assert len(await delivered(left)) == 3
            await left.stop()

    run(main())


def test_a_frame_for_each_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above could not notice a fault."""
    write = LogWriter._write

    def apart(self: LogWriter, entries: list[Entry]) -> Commit:
        parts = list[Entry]()
        for entry in entries:
            if Kind.MOVED in column(as_batch(entry.rows), "kind"):
                for at in range(entry.rows.num_rows):
                    row = as_batch(entry.rows).slice(at, 1)
                    parts.append(replace(entry, rows=row, first_seq=entry.first_seq + at, span=1))
            else:
                parts.append(entry)
        return write(self, parts)

    monkeypatch.setattr(LogWriter, "_write", apart)
    monkeypatch.setattr(writer, "frames_of", lambda entries: entries)
    assert any(kinds == [*WAITING, Kind.MOVED] for _, kinds in kinds_after_cuts(50))
