"""Pages and counts of pending messages, compared with a model, with each strategy and wherever a message is."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.broker.admin.test_push_changes import principal
from tests.broker.on_node import batch, on_node
from tests.crash.world import HOUR_MS, SECOND_MS, World

from timeball.broker.pending import forecast as forecasts
from timeball.broker.pending import listing, snapshot
from timeball.broker.pending.forecast import UNITS
from timeball.model.access import ANONYMOUS
from timeball.model.answers import PageRequest, PendingMessage, PendingPage
from timeball.model.errors import Forbidden, NotFound, OutOfRange, OverLimit
from timeball.table import layout

STRATEGIES = ["hour_log", "timer_wheel", "level_cascade"]  # delay levels are beside each of them


async def list_all_pages(world: World, rows: int = 7, **options: Any) -> list[PendingMessage]:
    """Return all pages, each from the end of the page before."""
    messages, after = [], None
    while True:
        page: PendingPage = await world.broker.listing.page(PageRequest(rows, after=after, **options))
        assert len(page.messages) <= rows
        messages += page.messages
        if page.next_page is None:
            return messages
        assert after is None or page.next_page > after
        after = page.next_page


def expected(world: World, topic: str | None = None) -> list[tuple[int, str]]:
    """List (due_ms, key) of the pending messages, as their senders know them."""
    cancelled = {
        key
        for key, verdicts in world.observed.verdicts.items()
        if {"cancelled", "already_cancelled"} & set(verdicts)
    }
    return sorted(
        (sent.due_ms, key)
        for key, sent in world.observed.sent.items()
        if sent.due_ms is not None and sent.due_ms > world.clock.wall and key not in cancelled
        and topic in (None, sent.topic)
    )  # fmt: skip


def due_times_and_keys(messages: list[PendingMessage]) -> list[tuple[int, str]]:
    """List (due_ms, key) of messages, and check that they are sorted by due time."""
    keys = [(message.due_ms, message.unique_key or "") for message in messages]
    due_ms = [message.due_ms for message in messages]
    assert due_ms == sorted(due_ms)
    return sorted(keys)


async def send_many(world: World) -> list[str]:
    """Send messages that are due soon and late, and with delay levels. Cancel and reschedule some. Returns all keys."""
    rng = np.random.default_rng(7)
    delays = [int(ms) for ms in rng.integers(2 * SECOND_MS, 50 * HOUR_MS, 60)]
    keys = await world.send("a", delays)
    keys += await world.send("b", [5 * SECOND_MS, HOUR_MS, HOUR_MS, HOUR_MS])
    keys += await world.send_levels("a", [3, 14, 18])
    await world.cancel(keys[:5])
    await world.reschedule(keys[10:20], 3 * HOUR_MS)
    await world.reschedule(keys[15:25], 2 * HOUR_MS)
    await world.cancel(keys[15:17])
    return keys


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_lists_its_pending_messages(strategy: str) -> None:
    @on_node(strategy=strategy)
    async def check_listing(world: World) -> None:
        keys = await send_many(world)
        assert due_times_and_keys(await list_all_pages(world)) == expected(world)
        await world.advance(HOUR_MS // 2)
        assert due_times_and_keys(await list_all_pages(world)) == expected(world)
        await world.bulk("a", [HOUR_MS, 2 * HOUR_MS, 100 * HOUR_MS], 1)
        await world.cancel([keys[30]])
        assert due_times_and_keys(await list_all_pages(world)) == expected(world)
        await world.restart()
        assert due_times_and_keys(await list_all_pages(world)) == expected(world)
        assert due_times_and_keys(await list_all_pages(world, topic="b")) == expected(world, "b")
        await world.advance(60 * HOUR_MS)
        assert due_times_and_keys(await list_all_pages(world)) == expected(world)

    check_listing()


@on_node()
async def test_messages_in_files_and_log_are_reported_once(world: World) -> None:
    keys = await send_many(world)
    await list_all_pages(world)  # rows that the log keeps must not be listed again when files have them
    await world.compact()
    assert due_times_and_keys(await list_all_pages(world)) == expected(world)
    await world.reschedule(keys[40:45], 4 * HOUR_MS)
    await world.cancel(keys[45:50])
    await world.send("a", [HOUR_MS, 5 * HOUR_MS])
    assert due_times_and_keys(await list_all_pages(world, rows=3)) == expected(world)
    await world.compact()
    await world.advance(2 * HOUR_MS)
    await world.merge()
    assert due_times_and_keys(await list_all_pages(world)) == expected(world)


@pytest.mark.parametrize("is_compacted", [False, True])
@on_node()
async def test_a_thousand_messages_with_one_due_time_are_listed_in_pages(
    world: World, monkeypatch: pytest.MonkeyPatch, is_compacted: bool
) -> None:
    monkeypatch.setattr(layout, "ROW_GROUP_ROWS", 64)
    monkeypatch.setattr(listing, "GROUPS_MAX", 2)
    await world.send("a", [HOUR_MS] * 1_000)
    await world.send("b", [HOUR_MS + 1] * 300)
    if is_compacted:
        await world.compact()
    assert due_times_and_keys(await list_all_pages(world, rows=90)) == expected(world)
    assert due_times_and_keys(await list_all_pages(world, rows=90, topic="b")) == expected(world, "b")


@on_node()
async def test_a_tail_larger_than_the_cache_is_read_again_for_each_page(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.broker.listing._tail = snapshot.LogTail(world.broker.log.reader, world.broker.listing._codes, 50)
    await world.send("a", [HOUR_MS + (i * 37) % 211 for i in range(300)])
    assert due_times_and_keys(await list_all_pages(world, rows=20)) == expected(world)


@on_node()
async def test_a_listed_message_has_all_fields(world: World) -> None:
    columns = {"unique_key": ["one"], "keys": ["order-1 vip"], "tag": ["paid"], "body": [b"x" * 300]}
    first = (await world.broker.send(batch(delay_ms=[HOUR_MS], **columns))).first_seq
    due_ms = world.clock.wall + HOUR_MS
    message = PendingMessage(first, "orders", due_ms, "one", "order-1 vip", "paid", 300, None)
    for request in (PageRequest(1), PageRequest(1, key="vip")):
        assert await world.broker.listing.page(request) == PendingPage([message], None)
    await world.broker.reschedule(ids=["one"], due_ms=due_ms + 5)
    await world.compact()
    for request in (PageRequest(1), PageRequest(1, key="vip")):
        assert await world.broker.listing.page(request) == PendingPage(
            [message._replace(due_ms=due_ms + 5)], None
        )
    assert await world.broker.listing.page(PageRequest(1, key="one")) == PendingPage([], None)


@on_node()
async def test_a_window_includes_its_begin_and_excludes_its_end(world: World) -> None:
    keys = await world.send("a", [HOUR_MS, 2 * HOUR_MS, 3 * HOUR_MS])
    now_ms = world.clock.wall
    messages = await list_all_pages(world, from_ms=now_ms + HOUR_MS, to_ms=now_ms + 3 * HOUR_MS)
    assert [message.unique_key for message in messages] == keys[:2]
    await world.compact()
    assert await list_all_pages(world, from_ms=now_ms + HOUR_MS, to_ms=now_ms + 3 * HOUR_MS) == messages


@on_node()
async def test_messages_with_a_key_are_listed_in_pages(world: World) -> None:
    await world.send("a", [HOUR_MS * (1 + i % 3) for i in range(20)])
    await world.compact()
    await world.send("a", [HOUR_MS] * 5)
    assert due_times_and_keys(await list_all_pages(world, rows=4, key="every")) == expected(world)
    assert await list_all_pages(world, key="none") == []


@on_node()
async def test_a_listed_message_names_its_campaign_and_whether_it_is_held(world: World) -> None:
    await world.campaign("sale", "a", [HOUR_MS, 2 * HOUR_MS])
    await world.send("a", [HOUR_MS])
    assert [message.campaign for message in await list_all_pages(world)] == ["sale", None, "sale"]
    await world.pause("sale")
    await world.advance(90 * 60 * SECOND_MS)
    assert [message.campaign for message in await list_all_pages(world)] == ["sale", "sale"]


@on_node()
async def test_messages_of_topics_that_the_caller_may_not_look_at_are_not_listed(world: World) -> None:
    await world.send("a", [HOUR_MS])
    await world.send("b", [HOUR_MS])
    caller = principal(topics={"a": "SUB"})
    page = await world.broker.listing.page(PageRequest(10), caller)
    assert [message.topic for message in page.messages] == ["a"]
    page = await world.broker.listing.page(PageRequest(10, key="every"), caller)
    assert [message.topic for message in page.messages] == ["a"]
    for topic in ("b", "none"):
        with pytest.raises(Forbidden):
            await world.broker.listing.page(PageRequest(10, topic=topic), caller)


@on_node()
async def test_a_page_beyond_the_limit_is_refused(world: World) -> None:
    for rows in (0, 1_001):
        with pytest.raises(OutOfRange, match="1 to 1000"):
            await world.broker.listing.page(PageRequest(rows))


# ---- counts -----------------------------------------------------------------------------------------------------


def expected_buckets(world: World, by: str, from_ms: int, to_ms: int) -> dict[int, int]:
    """Count the expected pending messages in each bucket, by its begin in ms."""
    width = UNITS[by]
    due = [due_ms for due_ms, _ in expected(world) if from_ms <= due_ms < to_ms]
    return dict(Counter(due_ms - due_ms % width for due_ms in due))


async def check_counts(world: World) -> None:
    """Compare a new count of all pending messages with the expected messages, for each unit of buckets."""
    now_ms = world.clock.wall
    for by, buckets in (("second", 10_000), ("minute", 4_000), ("hour", 200), ("day", 9)):
        world.broker.forecast._counts.clear()
        width = UNITS[by]
        from_ms = now_ms - now_ms % width
        to_ms = from_ms + buckets * width
        counts = await world.broker.forecast.counted(by, from_ms, to_ms)
        assert dict(counts.buckets) == expected_buckets(world, by, from_ms, to_ms)
        assert sum(counts.topics.values()) == sum(due for _, due in counts.buckets)
        assert counts.counted_ms == now_ms
        of_b = await world.broker.forecast.counted(by, from_ms, to_ms, "b")
        waiting_b = [due_ms for due_ms, _ in expected(world, "b") if from_ms <= due_ms < to_ms]
        assert sum(due for _, due in of_b.buckets) == len(waiting_b)
        assert of_b.topics == ({"b": len(waiting_b)} if waiting_b else {})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_counts_its_pending_messages_by_bucket(strategy: str) -> None:
    @on_node(strategy=strategy)
    async def check_forecast(world: World) -> None:
        keys = await send_many(world)
        await check_counts(world)
        await world.advance(HOUR_MS // 2)
        await world.bulk("a", [HOUR_MS, 2 * HOUR_MS, 100 * HOUR_MS], 1)
        await world.cancel([keys[30]])
        await world.restart()
        await check_counts(world)

    check_forecast()


@on_node()
async def test_counts_include_messages_in_files_and_in_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "ROW_GROUP_ROWS", 8)
    keys = await send_many(world)
    await world.send("c", [HOUR_MS + i for i in range(40)])  # groups of one topic and one bucket
    await world.compact()
    await check_counts(world)
    await world.reschedule(keys[40:45], 4 * HOUR_MS)
    await world.cancel(keys[45:50])
    await world.send("a", [HOUR_MS, 5 * HOUR_MS])
    await check_counts(world)
    await world.advance(2 * HOUR_MS)
    await check_counts(world)


@on_node()
async def test_forecasts_of_nearly_equal_windows_share_one_count(world: World) -> None:
    await world.send("a", [HOUR_MS])
    forecast, now_ms = world.broker.forecast, world.clock.wall
    answers = await asyncio.gather(
        *(forecast.counted("minute", now_ms + i, now_ms + 2 * HOUR_MS + i) for i in range(50))
    )
    assert forecast.counts == 1
    assert {sum(counts.topics.values()) for counts in answers} == {1}
    await forecast.counted("minute", now_ms + 60_000, now_ms + 2 * HOUR_MS + 60_000)
    assert forecast.counts == 1  # a window that begins a minute later is within the same count
    await forecast.counted("hour", now_ms)
    assert forecast.counts == 2
    forecast._counts.clear()
    await world.send("a", [HOUR_MS])
    assert (await forecast.counted("hour", now_ms)).topics == {"a": 2}


@on_node()
async def test_held_messages_are_not_counted_as_due(world: World) -> None:
    await world.campaign("sale", "a", [HOUR_MS, 2 * HOUR_MS])
    await world.send("a", [HOUR_MS])
    await world.pause("sale")
    assert (await world.broker.forecast.counted("hour")).topics == {"a": 1}


@on_node()
async def test_topics_that_the_caller_may_not_look_at_are_not_counted(world: World) -> None:
    await world.send("a", [HOUR_MS])
    await world.send("b", [HOUR_MS, HOUR_MS])
    caller = principal(topics={"a": "SUB"})
    counts = await world.broker.forecast.counted("hour", caller=caller)
    assert counts.topics == {"a": 1}
    assert [due for _, due in counts.buckets] == [1]
    for topic in ("b", "none"):
        with pytest.raises(Forbidden):
            await world.broker.forecast.counted("hour", topic=topic, caller=caller)


@on_node()
async def test_a_forecast_with_no_or_too_many_buckets_is_refused(world: World) -> None:
    now_ms = world.clock.wall
    # A window that begins within a second has one bucket more.
    for to_ms in (now_ms - HOUR_MS, now_ms + 10_002 * SECOND_MS):
        with pytest.raises(OutOfRange, match="1 to 10000"):
            await world.broker.forecast.counted("second", now_ms, to_ms)


@on_node()
async def test_a_forecast_of_too_many_pairs_of_topic_and_bucket_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "PAIRS_MAX", 3)
    await world.send("a", [i * SECOND_MS for i in range(20, 30)])
    with pytest.raises(OverLimit, match="longer buckets"):
        await world.broker.forecast.counted("second")


@on_node()
async def test_a_list_or_forecast_of_a_missing_topic_is_refused(world: World) -> None:
    await world.send("orders", [HOUR_MS])
    for query in (
        world.broker.listing.page(PageRequest(10, topic="oders")),
        world.broker.listing.page(PageRequest(10, topic="oders", key="k")),
        world.broker.forecast.counted("hour", topic="oders"),
    ):
        with pytest.raises(NotFound, match="topic 'oders' does not exist"):
            await query
    await world.broker.create_topic("quiet")
    assert (await world.broker.listing.page(PageRequest(10, topic="quiet"))).messages == []
    # A deleted topic may have pending messages, which create it again when they are due.
    await world.broker.administration.delete_topic("orders", ANONYMOUS)
    assert len((await world.broker.listing.page(PageRequest(10, topic="orders"))).messages) == 1
    assert (await world.broker.forecast.counted("hour", topic="orders")).topics == {"orders": 1}
