"""A start with other rules of a time zone: local times keep their wall clock, and nothing else moves.

The rules are those of other zones of tzdata, under the name of the zone that changes. tests/interop/test_tzdata.py does
the same with two versions of tzdata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from tests.broker.on_node import on_node
from tests.broker.recurring.schedule_lives import SETTINGS, compact, locals_of, progress, put, released
from tests.crash.lives import run, until_cut
from tests.crash.world import HOUR_MS, SECOND_MS, CutFiles, World

from timeball.broker.admin import schedule_changes
from timeball.broker.pending import zone_updates
from timeball.broker.recurring import rule, successors
from timeball.broker.recurring.kept_results import cached
from timeball.broker.registry.selections import SelectionFacts
from timeball.broker.registry.zones import ZoneMoves
from timeball.io.clock import ManualClock
from timeball.model import limits, time_parsing
from timeball.model.access import ANONYMOUS
from timeball.model.answers import PageRequest
from timeball.model.message import Kind, decode_properties
from timeball.model.time_parsing import LOCAL_TIME, local_due_ms

MOVING, OTHER = "America/Vancouver", "Europe/Berlin"
OLD, NEW = {MOVING: "Etc/GMT+8"}, {MOVING: "Etc/GMT+7"}
Use = Callable[[str, Mapping[str, str]], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Set the version of tzdata, and give some zones the rules of other zones. The caches are empty, as at a start."""
    read_file = time_parsing._tzdata_file

    def clear_caches() -> None:
        time_parsing._zone.cache_clear()
        monkeypatch.setattr(rule, "_parse_rule", cached()(rule._parse_rule.__wrapped__))  # type: ignore[attr-defined]
        first_after = cached()(successors.first_after.__wrapped__)  # type: ignore[attr-defined]
        for module in (successors, schedule_changes, zone_updates):
            monkeypatch.setattr(module, "first_after", first_after)

    def use_rules(version: str, zones: Mapping[str, str]) -> None:
        def read(*names: str) -> bytes:
            other = zones.get("/".join(names[1:]))
            return read_file(*names) if other is None else read_file("zoneinfo", *other.split("/"))

        monkeypatch.setattr(time_parsing, "VERSION", version)
        monkeypatch.setattr(time_parsing, "_tzdata_file", read)
        clear_caches()

    yield use_rules
    monkeypatch.undo()
    time_parsing._zone.cache_clear()


def at_nine(world: World, days: int) -> str:
    """Write the local time of nine o'clock, some days from now."""
    day = datetime.fromtimestamp(world.clock.wall / 1_000, UTC) + timedelta(days=days)
    return f"{day:%Y-%m-%d}T09:00"


async def send(world: World, key: str, local: str, zone: str) -> int:
    """Send a message with a local time. Returns its due time."""
    due_ms, stored = local_due_ms(local, zone)
    batch = {
        "topic": ["orders"], "body": [b"x"], "unique_key": [key], "due_ms": [due_ms],
        "properties": [f"a\x01b\x02{LOCAL_TIME}\x01{stored}\x02"],
    }  # fmt: skip
    await world.broker.send(pa.record_batch(batch))
    return due_ms


async def due_times(world: World) -> dict[str, int]:
    """The due times of all pending messages, by id."""
    due_ms: dict[str, int] = {}
    after = None
    while True:
        page = await world.broker.listing.page(PageRequest(rows=1_000, after=after))
        due_ms |= {message.unique_key: message.due_ms for message in page.messages}
        if (after := page.next_page) is None:
            return due_ms


async def daily(world: World, name: str, zone: str) -> int:
    """Create a schedule for nine o'clock each day. Returns the due time of its first occurrence."""
    await put(world, name, rule={"cron": "0 9 * * *", "zone": zone})
    return progress(world, name).due_ms


async def check_update(world: World, use: Use, *, is_compacted: bool) -> None:
    """Check an update to NEW, a start without an update, and an update back to OLD."""
    use("old", OLD)
    local = at_nine(world, 40)
    moving_ms, other_ms = await send(world, "moving", local, MOVING), await send(world, "other", local, OTHER)
    await world.send("orders", [moving_ms - world.clock.wall])
    moving_daily_ms, other_daily_ms = (
        await daily(world, "moving-daily", MOVING),
        await daily(world, "other-daily", OTHER),
    )
    if is_compacted:
        await compact(world)
    before = await due_times(world)
    use("new", NEW)
    await world.restart()
    moved = before | {"moving": moving_ms - HOUR_MS}
    del moved[f"moving-daily.{moving_daily_ms}"]
    moved[f"moving-daily.{moving_daily_ms - HOUR_MS}"] = moving_daily_ms - HOUR_MS
    assert await due_times(world) == moved
    facts = world.broker.zone_updates.facts(ANONYMOUS)
    assert facts.tzdata == "new" and facts.zones.keys() == {MOVING, OTHER}
    assert (facts.update.before, facts.update.after) == ("old", "new")
    assert facts.update.moved == [
        ZoneMoves(MOVING, moving_daily_ms, moving_daily_ms - HOUR_MS, messages=1, schedules=1)
    ]
    # The next start has nothing to do, and the properties are there for the next update.
    next_seq = world.broker.log.writer.next_seq
    await world.restart()
    assert world.broker.log.writer.next_seq == next_seq
    use("newer", OLD)
    await world.restart()
    assert await due_times(world) == before
    assert other_daily_ms == progress(world, "other-daily").due_ms and before["other"] == other_ms


@on_node()
async def test_a_zone_update_moves_messages_of_the_log_and_schedules_at_the_next_start(
    world: World, use: Use
) -> None:
    await check_update(world, use, is_compacted=False)


@on_node()
async def test_a_zone_update_moves_messages_of_the_table_and_schedules_at_the_next_start(
    world: World, use: Use
) -> None:
    await check_update(world, use, is_compacted=True)


@on_node(**SETTINGS["timer_wheel"])
async def test_a_zone_update_moves_messages_of_the_wheel_and_schedules_at_the_next_start(
    world: World, use: Use
) -> None:
    await check_update(world, use, is_compacted=False)


@on_node()
async def test_a_message_that_became_due_during_the_stop_is_not_released_early_by_a_zone_update(
    world: World, use: Use
) -> None:
    use("old", NEW)
    due_ms = await send(world, "moving", at_nine(world, 2), MOVING)
    await world.stop()
    world.clock.advance(due_ms + SECOND_MS - world.clock.wall)
    use("new", OLD)
    await world.start()
    await world.settled()
    assert await released(world, "orders") == []
    await world.advance(HOUR_MS)
    (row,) = await released(world, "orders")
    assert row["due_ms"] == due_ms + HOUR_MS
    assert decode_properties(row["properties"])["a"] == "b"


@on_node()
async def test_an_occurrence_is_released_once_although_its_zone_changes_on_the_same_day(
    world: World, use: Use
) -> None:
    use("old", NEW)
    due_ms = await daily(world, "tick", MOVING)
    await world.advance(due_ms + SECOND_MS - world.clock.wall)
    await world.stop()
    use("new", OLD)
    await world.start()
    # Nine o'clock of this day comes again by the new rules, an hour later.
    assert progress(world, "tick").due_ms == due_ms + HOUR_MS + limits.DAY_MS
    await world.advance(3 * limits.DAY_MS)
    names = await locals_of(world)
    assert len(names) == len(set(names)) == 3


@on_node()
async def test_a_new_tzdata_without_changed_zones_reads_no_message(
    world: World, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("old", OLD)
    await send(world, "moving", at_nine(world, 40), MOVING)
    before = await due_times(world)
    use("new", OLD)
    monkeypatch.setattr(
        zone_updates.ZoneUpdates, "_find_moving", lambda *_: pytest.fail("no zone has changed")
    )
    await world.restart()
    assert await due_times(world) == before
    assert world.broker.zone_updates.facts(ANONYMOUS).update.moved == []


@on_node()
async def test_an_interrupted_zone_update_is_continued_at_the_next_start(
    world: World, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("old", OLD)
    due_ms = await send(world, "moving", at_nine(world, 40), MOVING)
    await daily(world, "tick", MOVING)
    daily_ms = progress(world, "tick").due_ms
    use("new", NEW)
    await world.stop()
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        # The schedules have moved, the messages have not.
        patched.setattr(zone_updates.ZoneUpdates, "_find_moving", lambda *_: 1 // 0)
        await world.start()
    await world.abandon()
    # A node with the old rules leads next.
    use("old", OLD)
    await world.start()
    assert (await due_times(world))["moving"] == due_ms and progress(world, "tick").due_ms == daily_ms
    assert world.broker.zone_updates.facts(ANONYMOUS).tzdata == "old"


@on_node()
async def test_a_message_that_was_rescheduled_is_not_moved_by_a_zone_update(world: World, use: Use) -> None:
    use("old", OLD)
    due_ms = await send(world, "moving", at_nine(world, 40), MOVING)
    await world.broker.reschedule(ids=["moving"], due_ms=due_ms + SECOND_MS)
    use("new", NEW)
    await world.restart()
    assert await due_times(world) == {"moving": due_ms + SECOND_MS}


@pytest.mark.parametrize("where", ["", "a = 'b'"])
@pytest.mark.parametrize("is_compacted", [False, True])
@on_node()
async def test_a_message_of_a_selection_is_not_moved_by_a_zone_update(
    world: World, use: Use, where: str, is_compacted: bool
) -> None:
    use("old", OLD)
    local = at_nine(world, 40)
    covered_ms = await send(world, "covered", local, MOVING)
    facts = SelectionFacts(seq=0, at_ms=0, where=where)
    name = str(await world.broker.selections.select(facts, ANONYMOUS))
    later_ms = await send(world, "later", local, MOVING)
    if is_compacted:
        await compact(world)
    use("new", NEW)
    await world.restart()
    # A new version would be newer than the selection, and would be released.
    assert await due_times(world) == {"later": later_ms - HOUR_MS}
    await world.broker.selections.undo(name, ANONYMOUS)
    assert await due_times(world) == {"later": later_ms - HOUR_MS, "covered": covered_ms}
    # The first start after the undo moves it.
    await world.restart()
    assert await due_times(world) == {"later": later_ms - HOUR_MS, "covered": covered_ms - HOUR_MS}


@on_node()
async def test_a_zone_update_moves_the_next_occurrence_after_a_cancelled_one(world: World, use: Use) -> None:
    use("old", OLD)
    due_ms = await daily(world, "tick", MOVING)
    facts = SelectionFacts(seq=0, at_ms=0)
    name = str(await world.broker.selections.select(facts, ANONYMOUS))
    use("new", NEW)
    await world.restart()
    (place,) = await world.broker.find(f"tick.{due_ms}")
    assert (place.state, place.reason) == ("cancelled", f"selection {name}")
    next_ms = due_ms - HOUR_MS + limits.DAY_MS
    assert await due_times(world) == {f"tick.{next_ms}": next_ms}


@on_node()
async def test_a_broker_without_local_times_appends_nothing(world: World, use: Use) -> None:
    use("old", OLD)
    await world.send("orders", [HOUR_MS])
    await put(world, rule={"cron": "0 9 * * *", "zone": "UTC"})
    next_seq = world.broker.log.writer.next_seq
    use("new", NEW)
    await world.restart()
    await world.restart()
    kinds = [
        Kind(k)
        for rows in world.broker.log.reader.rows(next_seq, world.broker.log.writer.next_seq)
        for k in rows.column("kind").to_pylist()
    ]
    # The schedule in UTC may append one META row with the version.
    assert kinds in ([], [Kind.META])


def update_with_a_cut(use: Use, call: int | None) -> tuple[CutFiles, ManualClock, dict[str, int], int]:
    """Begin an update, and cut the power at this call of its start.

    Returns the disk, the clock, the due times that are right after the update, and the number of calls of the start.
    """
    files, clock = CutFiles(), ManualClock()
    world, expected_ms = World(files, clock), dict[str, int]()

    async def prepare() -> None:
        await world.start()
        local = at_nine(world, 40)
        expected_ms["moving"] = await send(world, "moving", local, MOVING) - HOUR_MS
        expected_ms["other"] = await send(world, "other", local, OTHER)
        due_ms = await daily(world, "tick", MOVING) - HOUR_MS
        expected_ms[f"tick.{due_ms}"] = due_ms
        await world.stop()

    use("old", OLD)
    run(prepare())
    calls = files.calls
    files.crash_at = None if call is None else calls + call
    use("new", NEW)
    run(until_cut(world, files, world.start))
    return files, clock, expected_ms, files.calls - calls


def test_a_power_cut_at_any_disk_call_of_a_zone_update_loses_no_message(use: Use) -> None:
    *_, calls = update_with_a_cut(use, None)
    assert calls > 5
    for call in range(1, calls + 1):
        files, clock, expected_ms, _ = update_with_a_cut(use, call)
        for survival in ("nothing", "everything"):
            world = World(files.crash(call, survival), replace(clock))

            async def check(world: World = world, expected_ms: dict[str, int] = expected_ms) -> None:
                await world.start()
                try:
                    assert await due_times(world) == expected_ms
                    update = world.broker.zone_updates.facts(ANONYMOUS).update
                    assert (update.before, update.after) == ("old", "new")
                    assert [(each.messages, each.schedules) for each in update.moved] in (
                        [(1, 1)],
                        [(1, 0), (0, 1)],
                    )
                    await world.stop()
                finally:
                    await world.abandon()

            run(check())
