"""The choice of the next occurrence, and the rows that continue a schedule when an occurrence ends in any place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.broker.recurring.schedule_lives import (
    EVERY_MS,
    NAME,
    SETTINGS,
    TOPIC,
    compact,
    facts_of,
    id_of,
    locals_of,
    progress,
    put,
    released,
    times_between,
)
from tests.crash.dispatch_scenarios import bring, pass_by
from tests.crash.lives import run
from tests.crash.world import HOUR_MS, SECOND_MS, CutFiles, World

from timeball.broker.recurring import successors
from timeball.broker.recurring.rule import Rule
from timeball.broker.recurring.successors import choose, first_after, last_until
from timeball.broker.registry.schedules import ScheduleFacts, State
from timeball.io.clock import ManualClock
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.message import Kind, decode_properties

MINUTE_MS = 60 * SECOND_MS
NOON_MS = 1_700_049_600_000  # 2023-11-15 at 12:00 UTC
TEXT = Rule.parse({"every": "10m"}).text


# ---- the next occurrence -------------------------------------------------------------------------------------


@given(st.integers(0, 50 * EVERY_MS), st.integers(0, 50 * EVERY_MS))
def test_the_last_time_until_another_is_found_from_any_distance(after_ms: int, width_ms: int) -> None:
    times = times_between(after_ms, after_ms + width_ms)
    last = last_until(TEXT, after_ms, after_ms + width_ms)
    assert (None if last is None else last.due_ms) == (times[-1] if times else None)


def test_the_last_time_is_found_after_a_month_without_times() -> None:
    """The rule runs each minute of one hour of a month."""
    rule = Rule.parse({"cron": "* 9 1 * *", "zone": "UTC"}).text
    january = first_after(rule, NOON_MS)
    assert january is not None
    march_ms = january.due_ms + 62 * limits.DAY_MS
    last = last_until(rule, NOON_MS, march_ms - limits.DAY_MS)
    assert last is not None and last.local.endswith("01T09:59:00")


def chosen_minute(now_ms: int, catch_up: str, within_ms: int = limits.DAY_MS) -> int | None:
    """Choose the next time after noon, at `now_ms` after noon. Return the time in minutes after noon."""
    facts = facts_of(catch_up=catch_up, catch_up_within_ms=within_ms)
    occurrence = choose(facts, NOON_MS, NOON_MS + now_ms)
    return None if occurrence is None else (occurrence.due_ms - NOON_MS) // MINUTE_MS


@pytest.mark.parametrize("catch_up", ["latest", "all", "none"])
@pytest.mark.parametrize("now_ms", [0, 9 * MINUTE_MS, 10 * MINUTE_MS, 10 * MINUTE_MS + 9_000])
def test_a_time_that_was_not_missed_is_next_with_every_catch_up(now_ms: int, catch_up: str) -> None:
    assert chosen_minute(now_ms, catch_up) == 10


@pytest.mark.parametrize(
    ("now_ms", "catch_up", "minute"),
    [
        (35 * MINUTE_MS, "latest", 30), (35 * MINUTE_MS, "all", 10), (35 * MINUTE_MS, "none", 40),
        # A time that is due now replaces the missed times.
        (40 * MINUTE_MS + 5_000, "latest", 40), (40 * MINUTE_MS + 5_000, "none", 40),
        (40 * MINUTE_MS + 5_000, "all", 10),
    ],
)  # fmt: skip
def test_catch_up_decides_which_missed_time_is_next(now_ms: int, catch_up: str, minute: int) -> None:
    assert chosen_minute(now_ms, catch_up) == minute


@pytest.mark.parametrize(
    ("catch_up", "within_ms", "minute"),
    [
        ("latest", 4 * MINUTE_MS, 40),
        ("latest", 6 * MINUTE_MS, 30),
        ("all", 20 * MINUTE_MS, 20),
        ("all", 0, 40),
    ],
)
def test_no_time_older_than_the_catch_up_limit_is_next(catch_up: str, within_ms: int, minute: int) -> None:
    assert chosen_minute(35 * MINUTE_MS, catch_up, within_ms) == minute


def test_a_rule_that_ends_has_no_next_time() -> None:
    ending = facts_of({"every": "10m", "ends_at": "2023-11-15T12:20:00Z"})
    assert choose(ending, NOON_MS + 20 * MINUTE_MS, NOON_MS) is None


# ---- an occurrence in each place, ended in each way ----------------------------------------------------------


async def in_tail(world: World) -> None:
    """Leave the pending occurrence in the tail of the log."""
    await put(world)


async def in_wheel(world: World) -> None:
    """Let the pending occurrence be loaded into memory: it is due in a second."""
    await put(world)
    await world.advance(progress(world).due_ms - world.clock.wall - SECOND_MS)


async def in_table(world: World) -> None:
    """Move the pending occurrence to the table."""
    await put(world)
    await compact(world)


async def after_restart(world: World) -> None:
    """Restart the broker while the occurrence is pending."""
    await put(world)
    await world.restart()


async def after_restart_without_checkpoint(world: World) -> None:
    """Restart the broker without a checkpoint, so that it reads the whole log."""
    await in_table(world)
    await world.stop()
    world.files.remove("checkpoint")
    await world.start()


async def without_its_first_rows(world: World) -> None:
    """Let retention remove the first rows of the schedule, and restart the broker."""
    await put(world)
    await world.advance(EVERY_MS)
    for _ in range(3):
        await world.consume()
        await world.send("others", [None])
        await compact(world)
        await world.advance(EVERY_MS)
        await world.checkpoint()
        await world.apply_retention()
    assert world.broker.log.reader.first_seq > 1
    await world.restart()


PLACES: list[Callable[[World], Any]] = [
    in_tail, in_wheel, in_table, after_restart, after_restart_without_checkpoint, without_its_first_rows,
]  # fmt: skip


def run_in_place(strategy: str, place: Callable[[World], Any], check: Callable[[World], Any]) -> None:
    """Put an occurrence into a place of a broker, and run `check` on it."""

    async def main() -> None:
        world = World(CutFiles(), ManualClock(), **SETTINGS[strategy])
        await world.start()
        try:
            await place(world)
            await check(world)
            await world.stop()
        finally:
            await world.abandon()
        assert not world.unheard

    run(main())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", SETTINGS)
def test_a_release_brings_the_next_occurrence(strategy: str, place: Callable[[World], Any]) -> None:
    async def check(world: World) -> None:
        before = progress(world)
        await world.advance(before.due_ms - world.clock.wall)
        row = (await released(world))[-1]
        assert (row["kind"], row["source_seq"], row["due_ms"]) == (Kind.RELEASE, before.number, before.due_ms)
        assert row["store_ms"] == before.due_ms and row["unique_key"] == id_of(before.due_ms)
        after = progress(world)
        assert (after.due_ms, after.at_ms, after.runs) == (
            before.due_ms + EVERY_MS,
            before.due_ms,
            before.runs + 1,
        )
        assert world.broker.pending_messages == 1
        await world.advance(3 * EVERY_MS)
        assert len(await released(world)) >= 4

    run_in_place(strategy, place, check)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", SETTINGS)
def test_a_cancel_by_id_ends_only_this_occurrence(strategy: str, place: Callable[[World], Any]) -> None:
    async def check(world: World) -> None:
        before = progress(world)
        for _ in range(2):
            await world.broker.cancel(ids=[id_of(before.due_ms)])
        assert progress(world).due_ms == before.due_ms + EVERY_MS
        assert progress(world).runs == before.runs
        await world.advance(before.due_ms - world.clock.wall + EVERY_MS)
        keys = [row["unique_key"] for row in await released(world)]
        assert id_of(before.due_ms) not in keys and keys[-1] == id_of(before.due_ms + EVERY_MS)
        assert world.broker.pending_messages == 1

    run_in_place(strategy, place, check)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", SETTINGS)
def test_a_reschedule_moves_only_this_occurrence(strategy: str, place: Callable[[World], Any]) -> None:
    async def check(world: World) -> None:
        before = progress(world)
        moved_ms = before.due_ms + EVERY_MS + 5 * SECOND_MS
        [verdict] = await world.broker.reschedule(ids=[id_of(before.due_ms)], due_ms=moved_ms)
        assert verdict.verdict == "rescheduled"
        assert progress(world).due_ms == before.due_ms + EVERY_MS and world.broker.pending_messages == 2
        await world.advance(moved_ms - world.clock.wall)
        rows = (await released(world))[-2:]
        assert [(row["unique_key"], row["due_ms"]) for row in rows] == [
            (id_of(before.due_ms + EVERY_MS), before.due_ms + EVERY_MS), (id_of(before.due_ms), moved_ms),
        ]  # fmt: skip
        assert progress(world).runs == before.runs + 1, (
            "a rescheduled occurrence no longer counts as a run of its schedule"
        )
        assert world.broker.pending_messages == 1

    run_in_place(strategy, place, check)


@on_node()
async def test_an_occurrence_that_a_dispatcher_brings_has_a_successor(world: World) -> None:
    await put(world)
    await compact(world)
    before = progress(world)
    await world.advance(before.due_ms - world.clock.wall - 19 * SECOND_MS)
    world.broker.delivery.lease_to_dispatcher(limits.HOUR_MS)
    await pass_by(19 * SECOND_MS, 1)(world)
    await bring(1)(world)
    await bring(1)(world)  # when it is brought again, it is not pending any more
    await world.settled()
    assert [row["source_seq"] for row in await released(world)] == [before.number]
    after = progress(world)
    assert (after.runs, after.due_ms) == (1, before.due_ms + EVERY_MS) and world.broker.pending_messages == 1


@on_node()
async def test_an_occurrence_is_found_delivered_and_cancelled_as_an_ordinary_message(world: World) -> None:
    await put(world, tag="night", keys="order-17 shop-3", properties={"region": "eu"})
    after = progress(world)
    page = await world.broker.find(id_of(after.due_ms))
    assert [(place.state, place.due_ms, place.seq) for place in page] == [
        ("waiting", after.due_ms, after.number)
    ]
    await world.advance(EVERY_MS)
    [row] = await released(world)
    assert (row["body"], row["tag"], row["keys"]) == (b"tick", "night", "order-17 shop-3")
    assert decode_properties(row["properties"]) == {
        "region": "eu", "schedule": NAME, "occurrence": (await locals_of(world))[0],
        "scheduled_ms": str(after.due_ms),
    }  # fmt: skip
    assert [verdict.verdict for verdict in await world.broker.cancel(keys=["shop-3"])] == [
        "cancelled",
        "released",
    ]


@on_node()
async def test_a_message_with_the_property_of_an_occurrence_continues_no_schedule(world: World) -> None:
    await put(world)
    due_ms = progress(world).due_ms
    forged = batch(due_ms=[due_ms], topic=[TOPIC], properties=[f"schedule\x01{NAME}\x02"])
    await world.broker.send(forged)
    await world.advance(EVERY_MS)
    assert progress(world).runs == 1 and len(await released(world)) == 2
    assert world.broker.pending_messages == 1


@on_node()
async def test_a_frame_has_the_release_the_successor_and_the_progress(world: World) -> None:
    await put(world)
    await world.advance(EVERY_MS)
    reader = world.broker.log.reader
    kinds = [rows.column("kind").to_pylist() for _, rows in reader.frames(1, reader.next_seq)]
    assert [Kind.RELEASE, Kind.SCHEDULED, Kind.META] in kinds


# ---- many schedules, and large schedules ---------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SETTINGS)
def test_many_schedules_of_one_time_are_released_in_limited_hand_outs(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SCHEDULE_ROWS_AT_ONCE", 16)
    schedules, messages = 50, 40

    async def main() -> None:
        world = World(CutFiles(), ManualClock(), **SETTINGS[strategy])
        await world.start()
        for number in range(schedules):
            await put(world, f"s{number:02d}")
        first_ms = progress(world, "s00").due_ms
        await world.send("others", [first_ms - world.clock.wall] * messages)
        sizes: list[int] = []
        world.broker.delivery.observers.append(lambda rows, _: sizes.append(rows.num_rows))
        await world.advance(EVERY_MS)
        assert max(sizes) <= 16 and sum(sizes) == schedules + messages
        await world.advance(EVERY_MS)
        assert (
            len(await released(world)) == 2 * schedules and len(await released(world, "others")) == messages
        )
        assert world.broker.pending_messages == schedules
        await world.stop()

    run(main())


ENDING = {"every": "10m", "starts_at": "2023-11-14T00:00:00Z", "ends_at": "2023-11-14T22:25:00Z"}
VARIETIES: list[dict[str, Any]] = [
    {},
    {"body": b"\x00\xff", "tag": "red", "keys": "a b"},
    {"properties": {"ключ": "значение", "b": ""}},
    {"rule": {"cron": "*/10 * * * *", "zone": "Asia/Kathmandu"}, "catch_up": "latest"},
    {"rule": {"rrule": "DTSTART:20231114T000000\nRRULE:FREQ=MINUTELY;INTERVAL=10", "zone": "Europe/Berlin"}},
    {"overlap": "skip", "group": "workers"},
    {"rule": ENDING},
    {"properties": {"TIMEBALL_EXPIRES_AFTER_MS": "1000"}},
]


async def lives_of_many(world: World, varieties: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Release many schedules three times, the last time late. Returns the rows of the log.

    Also checks that a restart gives the same progress as the releases.
    """
    for number in range(4 * len(varieties)):
        await put(world, f"s{number:03d}", **varieties[number % len(varieties)])
    begin_seq = world.broker.log.reader.next_seq
    for _ in range(2):
        await world.advance(EVERY_MS)
    await world.advance(EVERY_MS + 5 * SECOND_MS)
    reader = world.broker.log.reader
    rows = [row for _, rows in reader.frames(begin_seq, reader.next_seq) for row in rows.to_pylist()]
    names = [f"s{number:03d}" for number in range(4 * len(varieties))]
    before = [progress(world, name) for name in names]
    await world.restart()
    assert [progress(world, name) for name in names] == before
    return rows


def logs_of(monkeypatch: pytest.MonkeyPatch, varieties: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the logs of two brokers: one that builds the rows as columns, and one that builds them row by row."""
    logs = list[list[dict[str, Any]]]()

    async def live(world: World) -> None:
        logs.append(await lives_of_many(world, varieties))

    for few_rows in (0, 1_000):
        monkeypatch.setattr(successors, "FEW_ROWS", few_rows)
        on_node()(live)()
    return logs


def test_columns_and_rows_give_the_same_log(monkeypatch: pytest.MonkeyPatch) -> None:
    by_column, by_row = logs_of(monkeypatch, VARIETIES[:5])
    assert by_column == by_row and len(by_row) == 3 * 3 * 4 * 5


def test_columns_and_rows_give_equal_rows_also_for_schedules_with_special_cases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Numbers may differ: as columns, the schedules with a special case (`Successors._split_plain`) come first.
    varying = ("seq", "source_seq", "version_seq", "queue_id", "queue_offset", "body")
    by_column, by_row = (
        sorted(str({key: value for key, value in row.items() if key not in varying}) for row in log)
        for log in logs_of(monkeypatch, VARIETIES)
    )
    assert by_column == by_row


def test_a_column_of_another_value_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: another name of a property, in the columns only, makes the logs differ."""
    monkeypatch.setattr(successors, "_SCHEDULED_MS", successors._SCHEDULED_MS.replace("ms", "s"))
    by_column = logs_of(monkeypatch, VARIETIES[:2])[0]
    monkeypatch.undo()
    assert by_column != logs_of(monkeypatch, VARIETIES[:2])[1]


@on_node()
async def test_a_hand_out_that_is_too_large_for_one_frame_is_split(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for number in range(6):
            await put(world, f"s{number}", body=bytes(20_000))
        patch.setattr(limits, "REQUEST_BYTES_MAX", 100_000)
        appended: list[int] = []
        append = LogWriter.append

        def count(self: LogWriter, rows: Any, **options: Any) -> Any:
            appended.append(rows.num_rows)
            return append(self, rows, **options)

        patch.setattr(LogWriter, "append", count)
        await world.advance(EVERY_MS)
        assert sorted(appended) == [3, 3, 6, 6], "at most two occurrences in a frame: each has three rows"
        assert len(await released(world)) == 6 and world.broker.pending_messages == 6


# ---- missed times --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("catch_up", "minutes"),
    [("latest", [30]), ("all", [10, 20, 30]), ("none", [])],
)
@pytest.mark.parametrize("strategy", SETTINGS)
def test_a_broker_that_was_down_releases_the_missed_times_that_catch_up_demands(
    strategy: str, catch_up: str, minutes: list[int]
) -> None:
    async def main() -> None:
        world = World(CutFiles(), ManualClock(wall=NOON_MS), **SETTINGS[strategy])
        await world.start()
        await put(world, catch_up=catch_up)
        await world.send(TOPIC, [10 * MINUTE_MS])
        await world.stop()
        world.clock.advance(35 * MINUTE_MS)
        await world.start()
        await world.settled()
        rows = await released(world)
        names = [decode_properties(row["properties"] or "").get("scheduled_ms") for row in rows]
        assert [name for name in names if name] == [str(NOON_MS + minute * MINUTE_MS) for minute in minutes]
        assert len(names) == len(minutes) + 1, "also the message that `send` has sent"
        after = progress(world)
        assert (after.due_ms, after.runs) == (NOON_MS + 40 * MINUTE_MS, len(minutes))
        assert world.broker.pending_messages == 1
        missed = await world.broker.find(id_of(NOON_MS + 10 * MINUTE_MS))
        expected = "visible" if 10 in minutes else "cancelled"
        assert [place.state for place in missed] == [expected]
        if expected == "cancelled":
            assert missed[0].reason == "missed"
        await world.restart()
        assert progress(world) == after and world.broker.pending_messages == 1
        await world.advance(5 * MINUTE_MS)
        assert progress(world).runs == len(minutes) + 1
        await world.stop()

    run(main())


@pytest.mark.parametrize(("catch_up", "minutes"), [("latest", [30]), ("all", [10, 20, 30]), ("none", [])])
def test_a_resume_releases_the_missed_times_that_catch_up_demands(catch_up: str, minutes: list[int]) -> None:
    async def main() -> None:
        world = World(CutFiles(), ManualClock(wall=NOON_MS))
        await world.start()
        await put(world, catch_up=catch_up)
        await world.broker.schedules.pause(NAME, ANONYMOUS)
        await world.advance(35 * MINUTE_MS)
        assert await released(world) == [] and world.broker.pending_messages == 0
        await world.broker.schedules.resume(NAME, ANONYMOUS)
        await world.settled()
        due = [row["due_ms"] for row in await released(world)]
        assert due == [NOON_MS + minute * MINUTE_MS for minute in minutes]
        assert progress(world).due_ms == NOON_MS + 40 * MINUTE_MS
        await world.stop()

    run(main())


@on_node()
async def test_a_clock_that_is_set_back_repeats_no_occurrence(world: World) -> None:
    await put(world)
    await world.advance(EVERY_MS)
    world.clock.step_wall(-3 * EVERY_MS)
    for _ in range(6):
        await world.advance(EVERY_MS)
    keys = [row["unique_key"] for row in await released(world)]
    assert len(keys) == len(set(keys)) > 2


# ---- ends and failures ---------------------------------------------------------------------------------------


@on_node()
async def test_a_rule_with_a_last_time_ends_the_schedule(world: World) -> None:
    ends = {"every": "10m", "starts_at": "2023-11-14T00:00:00Z", "ends_at": "2023-11-14T22:40:00Z"}
    facts = facts_of(ends)
    await world.broker.schedules.put(NAME, facts, ANONYMOUS)
    await world.advance(HOUR_MS)
    after = progress(world)
    assert (after.state, after.number, after.runs) == (State.ENDED, 0, 3)
    assert world.broker.pending_messages == 0
    await world.restart()
    assert progress(world) == after


@on_node()
async def test_a_rule_that_cannot_be_evaluated_fails_its_schedule_and_stops_no_release(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(world)
    await world.send("others", [EVERY_MS])

    def fail(facts: ScheduleFacts, after_ms: int, now_ms: int) -> None:
        raise ValueError("no such zone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("timeball.broker.recurring.successors.choose", fail)
        await world.advance(EVERY_MS)
    assert len(await released(world)) == 1 and len(await released(world, "others")) == 1
    after = progress(world)
    assert (after.state, after.error, after.runs) == (State.FAILED, "no such zone", 1)
    # A resume evaluates the rule again.
    await world.broker.schedules.resume(NAME, ANONYMOUS)
    await world.advance(EVERY_MS)
    assert len(await released(world)) == 2
