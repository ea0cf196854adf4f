"""Counts of occurrences that are no messages yet, compared with the rules' own times, one by one."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.broker.admin.test_push_changes import principal
from tests.broker.on_node import on_node
from tests.broker.recurring.schedule_lives import put
from tests.crash.world import HOUR_MS, SECOND_MS, World

from timeball.broker.pending import recurring_load
from timeball.broker.pending.forecast import UNITS
from timeball.broker.recurring.rule import Rule
from timeball.broker.recurring.successors import occurrence_id
from timeball.broker.registry.schedules import State
from timeball.model.access import ANONYMOUS
from timeball.model.answers import DueCounts
from timeball.model.errors import OutOfRange
from timeball.model.limits import DAY_MS, MINUTE_MS

# Two schedules share a rule, and two rules have an hour that clocks show twice or skip.
SCHEDULES: dict[str, tuple[dict[str, object], str]] = {
    "hourly": ({"every": "1h"}, "a"),
    "hourly-too": ({"every": "1h"}, "b"),
    "hourly-again": ({"every": "1h"}, "a"),
    "workdays": ({"every": "7m", "exclude": ["1970-01-02"]}, "a"),
    "berlin": ({"cron": "30 2 * * *", "zone": "Europe/Berlin"}, "b"),
    "weekly": ({"rrule": "DTSTART:19700101T120000\nRRULE:FREQ=WEEKLY;BYDAY=TH", "zone": "UTC"}, "c"),
}


def expected(world: World, by: str, from_ms: int, to_ms: int) -> tuple[dict[int, int], dict[str, int]]:
    """Compute the occurrences of all rules after their pending messages one by one, by bucket and by topic."""
    buckets, topics = Counter[int](), Counter[str]()
    for name in world.broker.tables.schedules.names_after(""):
        facts, progress = world.broker.tables.schedules.get(name)
        if progress.state != State.ACTIVE:
            continue
        for time in Rule.from_text(facts.rule_text).between(progress.due_ms, to_ms - 1, 1_000_000):
            if time.due_ms >= from_ms:
                buckets[time.due_ms // UNITS[by] * UNITS[by]] += 1  # type: ignore[index]
                topics[facts.topic] += 1
    return dict(buckets), dict(topics)


async def counted(world: World, by: Any, length_ms: int, **more: Any) -> DueCounts:
    """Count the messages and occurrences due from now on, without the use of an earlier count."""
    world.broker.forecast._counts.clear()
    now_ms = world.clock.wall
    return await world.broker.forecast.counted(by, now_ms, now_ms + length_ms, recurring=True, **more)


async def check(world: World) -> None:
    """Compare the counts for each length of a bucket with `expected`."""
    for by, length_ms in (
        ("second", HOUR_MS),
        ("minute", 6 * HOUR_MS),
        ("hour", 3 * DAY_MS),
        ("day", 40 * DAY_MS),
    ):
        counts = await counted(world, by, length_ms)
        assert counts.recurring_to_ms == counts.to_ms
        assert (dict(counts.recurring), counts.recurring_topics) == expected(
            world, by, counts.from_ms, counts.to_ms
        )
        # The pending messages are counted separately.
        assert sum(counts.topics.values()) == sum(due for _, due in counts.buckets)


@on_node()
async def test_the_later_occurrences_of_every_rule_are_counted(world: World) -> None:
    for name, (rule, topic) in SCHEDULES.items():
        await put(world, name, rule=rule, topic=topic)
    starts_at = datetime.fromtimestamp(world.clock.wall // 1_000, UTC).isoformat()
    await put(world, "ending", rule={"every": "50m", "starts_at": starts_at, "count": 4}, topic="d")
    await check(world)
    await world.advance(5 * HOUR_MS // 2)
    await check(world)
    await world.broker.schedules.pause("workdays", ANONYMOUS)
    await world.broker.schedules.delete("hourly-too", ANONYMOUS)
    await check(world)
    await put(world, "hourly", rule=SCHEDULES["hourly"][0], topic="moved")
    await check(world)
    assert (await counted(world, "hour", DAY_MS)).recurring_topics["moved"] == 23
    await world.restart()
    await check(world)


@on_node()
async def test_each_schedule_of_a_rule_is_counted_from_its_own_pending_message(world: World) -> None:
    for name, topic in (("one", "a"), ("two", "b"), ("three", "b")):
        await put(world, name, rule={"every": "1h"}, topic=topic)

    def pending_ms(name: str) -> int:
        _, progress = world.broker.tables.schedules.get(name)
        return progress.due_ms

    for _ in range(3):
        await world.broker.cancel(ids=[occurrence_id("two", pending_ms("two"))], topic="b")
    assert pending_ms("two") == pending_ms("one") + 3 * HOUR_MS
    await check(world)


@on_node()
async def test_occurrences_of_topics_that_the_caller_may_not_see_are_not_counted(world: World) -> None:
    await put(world, "own", rule={"every": "1h"}, topic="a")
    await put(world, "foreign", rule={"every": "30m"}, topic="b")
    caller = principal(topics={"a": "SUB"})
    counts = await counted(world, "hour", DAY_MS, caller=caller)
    assert list(counts.recurring_topics) == ["a"]
    assert sum(due for _, due in counts.recurring) == counts.recurring_topics["a"]
    columns = await world.broker.forecast.recurring(0, world.clock.wall + DAY_MS, 1_000, caller)
    assert list(columns.topics) == ["a"]


@on_node()
async def test_a_count_that_costs_too_much_ends_at_a_whole_bucket(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(5):
        await put(world, f"rare-{index}", rule={"every": f"{index + 1}h"}, topic="a")
    await put(world, "often", rule={"every": "1s"}, topic="b")
    monkeypatch.setattr(recurring_load, "COST_MAX", 20_000)
    counts = await counted(world, "minute", DAY_MS)
    now_ms = counts.from_ms
    # The rule with many occurrences uses most of the work. All rules are counted up to the same bucket.
    assert now_ms + 5 * HOUR_MS < counts.recurring_to_ms < now_ms + 6 * HOUR_MS
    assert counts.recurring_to_ms % MINUTE_MS == 0
    assert dict(counts.recurring) == expected(world, "minute", now_ms, counts.recurring_to_ms)[0]


@on_node()
async def test_more_rules_than_a_count_can_compute_give_no_occurrences(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(3):
        await put(world, f"rare-{index}", rule={"every": f"{index + 1}h"}, topic="a")
    monkeypatch.setattr(recurring_load, "COST_MAX", 2 * recurring_load.RULE_COST)
    counts = await counted(world, "hour", DAY_MS)
    assert (counts.recurring, counts.recurring_to_ms) == ([], counts.from_ms)
    assert counts.topics == {"a": 3}


@on_node()
async def test_a_window_is_widened_to_whole_buckets_and_an_invalid_one_is_refused(world: World) -> None:
    await put(world, "hourly", rule={"every": "1h"}, topic="a")
    now_ms = world.clock.wall // HOUR_MS * HOUR_MS
    # Both ends of the window are within a bucket of a second.
    window = now_ms + 1, now_ms + 4 * HOUR_MS - 1
    counts = await world.broker.forecast.recurring(*window, SECOND_MS, ANONYMOUS)
    assert counts.topics == {"a": ([now_ms + 2 * HOUR_MS, now_ms + 3 * HOUR_MS], [1, 1])}
    assert counts.to_ms == now_ms + 4 * HOUR_MS
    for from_ms, to_ms in ((5, 5), (7, 5), (0, 1 << 60)):
        with pytest.raises(OutOfRange, match="a window from"):
            await world.broker.forecast.recurring(from_ms, to_ms, SECOND_MS, ANONYMOUS)


@on_node()
async def test_a_count_without_occurrences_is_not_reused_for_one_with_them(world: World) -> None:
    await put(world, "hourly", rule={"every": "1h"}, topic="a")
    without_occurrences = await world.broker.forecast.counted("hour")
    assert (without_occurrences.recurring, without_occurrences.recurring_topics) == ([], {})
    with_occurrences = await world.broker.forecast.counted("hour", recurring=True)
    assert (
        with_occurrences.topics == without_occurrences.topics and with_occurrences.recurring_topics["a"] > 40
    )
    assert world.broker.forecast.counts == 2
    assert (
        await world.broker.forecast.counted("hour") == with_occurrences
    )  # a count with occurrences is reused
    assert world.broker.forecast.counts == 2
