"""Retention and groups: unread messages stay up to a limit. A message removed unread is counted and logged."""

from __future__ import annotations

import logging

import pytest
from tests.broker.on_node import on_node
from tests.crash.world import HOUR_MS, World

from timeball.broker.consuming import retention
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.model.access import ANONYMOUS

MIB = 1024 * 1024
TOPIC, GROUP = "orders", "billing"
DAYS = {"retention_ms": HOUR_MS, "unread_retention_ms": 3 * HOUR_MS}


async def fill_segments(world: World, rows: int = 24) -> None:
    """Send messages of 100 kB to another topic. A segment has space for about ten of them."""
    for _ in range(rows // 6):
        await world.send("filler", [None] * 6, 100_000)


async def send_and_read_some(world: World, read: int = 1, group: str = GROUP) -> None:
    """Send five messages to one queue, of which a group has read the first `read`. Then fill segments."""
    await world.broker.create_topic(TOPIC, 1)
    await world.send(TOPIC, [None] * 5)
    await world.broker.commit_offsets(group, TOPIC, {0: read})
    await fill_segments(world)


async def apply_retention(world: World, after_ms: int) -> None:
    """Apply the retention `after_ms` from now."""
    world.clock.advance(after_ms)
    await world.checkpoint()
    await world.apply_retention()


def first_offset(world: World) -> int:
    """The first offset of the queue that is still in the log. 5 if all messages are removed."""
    offset: int = world.broker.queues(TOPIC)[0][0]
    return offset


async def lag_and_expired(world: World, group: str = GROUP) -> tuple[int, int]:
    """The lag of the group, and how many of its messages have expired."""
    state = await world.broker.groups.one(group, ANONYMOUS)
    return state.lag, state.expired


@on_node(**DAYS)
async def test_unread_messages_stay_beyond_the_retention(world: World) -> None:
    await send_and_read_some(world)
    await apply_retention(world, 2 * HOUR_MS)
    assert first_offset(world) == 0 and await lag_and_expired(world) == (4, 0)
    rows = await world.broker.pull(TOPIC, {0: 1}, 10, 0)
    assert rows.num_rows == 4
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 5})
    await world.apply_retention()
    assert first_offset(world) == 5 and await lag_and_expired(world) == (0, 0)


@on_node(**DAYS)
async def test_messages_that_go_unread_are_counted_and_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await send_and_read_some(world)
    logging.disable(logging.NOTSET)
    await apply_retention(world, 2 * HOUR_MS)
    kept = "log kept beyond the retention for unread messages group=billing topic=orders bytes="
    assert caplog.text.count(kept) == 1
    await apply_retention(world, 2 * HOUR_MS)
    assert first_offset(world) == 5
    assert "unread messages expired group=billing topic=orders rows=4" in caplog.text
    assert await lag_and_expired(world) == (0, 4)
    state = await world.broker.groups.one(GROUP, ANONYMOUS)
    assert [(topic.topic, topic.expired) for topic in state.topics] == [(TOPIC, 4)]
    assert world.node is not None
    text = (await world.node.metrics.text(ANONYMOUS)).decode()
    assert 'timeball_expired_unread_messages_total{group="billing",topic="orders"} 4.0' in text


@on_node(**DAYS)
async def test_expired_messages_are_counted_once_although_the_broker_crashes(world: World) -> None:
    await send_and_read_some(world)
    world.clock.advance(4 * HOUR_MS)
    await world.checkpoint()
    assert world.node is not None
    await world.node.maintenance.save_offsets()
    # The power is cut between the count and the removal of the segments.
    broker = world.broker
    reader = broker.log.reader
    keeper = retention.Retention(settings=broker.settings, clock=broker.clock, tables=broker.tables)
    await keeper.count_expired(reader.segments.last.first_seq)
    await world.broker.log.writer.flushed()
    files = world.files.crash(survival="nothing")
    await world.abandon()
    world.files = files
    await world.start()
    assert first_offset(world) == 0 and await lag_and_expired(world) == (4, 4)
    await world.checkpoint()
    await world.apply_retention()
    assert first_offset(world) == 5 and await lag_and_expired(world) == (0, 4)


@on_node(**DAYS, kept_bytes=3 * MIB)
async def test_unread_messages_beyond_kept_bytes_expire(world: World) -> None:
    await send_and_read_some(world)
    await fill_segments(world, 60)
    await apply_retention(world, 2 * HOUR_MS)
    assert first_offset(world) == 5 and await lag_and_expired(world) == (0, 4)


@on_node(**DAYS)
async def test_a_group_without_offsets_and_a_deleted_group_keep_no_segments(world: World) -> None:
    await send_and_read_some(world)
    await world.broker.administration.configure_groups([SubscriptionGroup("idle")], ANONYMOUS)
    await world.broker.administration.delete_group(GROUP, ANONYMOUS, with_offsets=False)
    await apply_retention(world, 2 * HOUR_MS)
    assert first_offset(world) == 5


@on_node(**DAYS)
async def test_a_group_that_was_deleted_and_created_again_keeps_unread_messages(world: World) -> None:
    await send_and_read_some(world)
    await world.broker.administration.delete_group(GROUP, ANONYMOUS, with_offsets=False)
    await world.restart()
    await world.broker.administration.configure_groups([SubscriptionGroup(GROUP)], ANONYMOUS)
    await apply_retention(world, 2 * HOUR_MS)
    assert first_offset(world) == 0


@on_node(**DAYS)
async def test_many_expiry_log_lines_are_summed_up(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LOGGED_MAX", 2)
    await send_and_read_some(world)
    for number in range(4):
        await world.broker.commit_offsets(f"g{number}", TOPIC, {0: 2})
    logging.disable(logging.NOTSET)
    await apply_retention(world, 4 * HOUR_MS)
    assert caplog.text.count("unread messages expired group=") == 2
    assert "more messages expired groups=3 rows=9" in caplog.text


@on_node(**DAYS)
async def test_the_unread_messages_of_a_deleted_topic_are_counted_as_expired(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await send_and_read_some(world)
    await world.send(TOPIC, [24 * HOUR_MS] * 2)
    logging.disable(logging.NOTSET)
    deleted = await world.broker.administration.delete_topic(TOPIC, ANONYMOUS)
    assert (deleted.unread, deleted.dead_letters) == (4, 0)
    assert "topic deleted topic=orders unread=4 dead_letters=0" in caplog.text
    assert await lag_and_expired(world) == (0, 4)
    await world.restart()
    assert await lag_and_expired(world) == (0, 4)


@on_node(**DAYS)
async def test_a_scheduled_message_with_a_delay_longer_than_the_retention_is_delivered(world: World) -> None:
    """NATS 2.15.3 loses a schedule whose stream keeps its messages for a shorter time, and reports no error."""
    await world.broker.create_topic(TOPIC, 1)
    await world.send(TOPIC, [5 * HOUR_MS])
    await fill_segments(world)
    await apply_retention(world, 4 * HOUR_MS)
    assert world.broker.log.reader.first_seq > 1, "retention has removed its row in the log"
    assert world.broker.queues(TOPIC)[0] == (0, 0)
    await world.advance(HOUR_MS)
    assert (await world.broker.pull(TOPIC, {0: 0}, 10, 0)).num_rows == 1
