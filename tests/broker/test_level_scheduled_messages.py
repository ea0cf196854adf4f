"""Delay levels through the whole broker: accepted, waiting in SCHEDULE_TOPIC_XXXX, released, restarted, cancelled."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import SECOND_MS, World

from timeball.model.config import Settings
from timeball.model.errors import DiskFailed, Forbidden, InvalidDelay, InvalidMessage, NotFound, SetupError
from timeball.model.limits import DAY_MS
from timeball.model.message import SCHEDULE_TOPIC, Kind, decode_properties
from timeball.node.node import Node
from timeball.schedule.loaded import LoadBounds


def batch_of_levels(*levels: int, **columns: Any) -> pa.RecordBatch:
    """Build messages with these delay levels."""
    return batch(len(levels), delay_level=list(levels), **columns)


async def rows_of(world: World, topic: str) -> list[dict[str, Any]]:
    """Read all rows of a topic, in the order of the log."""
    rows = []
    for queue, (low, high) in world.broker.queues(topic).items():
        if high > low:
            rows += (await world.broker.read_queue(topic, queue, low, 1_000)).to_pylist()
    return sorted(rows, key=lambda row: row["seq"])


@on_node()
async def test_a_message_with_a_delay_level_is_released_exactly_after_its_delay(world: World) -> None:
    accepted = await world.broker.send(batch_of_levels(3, queue_id=[1], tag=["t"], properties=["TAGS\x01t"]))
    [level_row] = accepted.stored_rows.to_pylist()
    stored = (level_row["kind"], level_row["topic"], level_row["queue_id"], level_row["queue_offset"])
    assert stored == (Kind.SCHEDULED, SCHEDULE_TOPIC, 2, 0)
    assert level_row["due_ms"] == accepted.store_ms + 10_000
    await world.advance(9_999)
    assert await rows_of(world, "orders") == []
    await world.advance(1)
    [row] = await rows_of(world, "orders")
    assert (row["kind"], row["queue_id"], row["source_seq"]) == (Kind.RELEASE, 1, accepted.first_seq)
    assert row["store_ms"] == level_row["due_ms"] == row["due_ms"]
    assert decode_properties(row["properties"]) == {
        "TAGS": "t", "DELAY": "3", "REAL_TOPIC": "orders", "REAL_QID": "1",
    }  # fmt: skip
    level_queue = await rows_of(world, SCHEDULE_TOPIC)
    assert [row["kind"] for row in level_queue] == [Kind.SCHEDULED], (
        "the queue of the level can be read like any queue"
    )
    topics = world.broker.tables.topics
    assert topics.get("orders").queues[1].index.read(0, 1)["tag"][0] == ord("t"), (
        "the tag is the hash of the tag again"
    )
    assert topics.get(SCHEDULE_TOPIC).queues[2].index.read(0, 1)["tag"][0] == level_row["due_ms"]
    assert len(topics.get(SCHEDULE_TOPIC).queues) == 18
    assert world.broker.status()["levels"]["waiting_rows"] == 0


@on_node()
async def test_a_batch_may_mix_immediate_delayed_and_level_messages(world: World) -> None:
    sent = batch(
        4, topic=["a", "b", "c", "a"], delay_level=[0, 1, None, 99],
        due_ms=[None, None, world.clock.wall + 500, None],
    )  # fmt: skip
    accepted = (await world.broker.send(sent)).stored_rows
    assert accepted.column("kind").to_pylist() == [Kind.MESSAGE, *[Kind.SCHEDULED] * 3]
    assert accepted.column("topic").to_pylist() == ["a", SCHEDULE_TOPIC, "c", SCHEDULE_TOPIC]
    assert accepted.column("queue_id").to_pylist()[1::2] == [0, 17], (
        "a level beyond the last one is the last level"
    )
    assert set(world.broker.topics()) == {"a", "b", "c", SCHEDULE_TOPIC}
    await world.advance(500)
    assert len(await rows_of(world, "c")) == 1 and await rows_of(world, "b") == []
    await world.advance(500)
    assert len(await rows_of(world, "b")) == 1
    await world.advance(7_200_000)
    assert len(await rows_of(world, "a")) == 2
    assert decode_properties((await rows_of(world, "a"))[1]["properties"])["DELAY"] == "18"


@pytest.mark.parametrize("way", ["stop", "cut"])
@on_node()
async def test_a_restart_neither_loses_nor_repeats_level_messages(world: World, way: str) -> None:
    keys = [key for level in (1, 3, 5, 3, 14) for key in await world.send_levels("a", [level] * 3)]
    await world.checkpoint()
    keys += await world.send_levels("a", [1, 3, 5])
    await world.cancel([keys[3], keys[6], keys[-1]])
    await world.advance(SECOND_MS)
    for wait_ms in (9 * SECOND_MS, 50 * SECOND_MS, 600 * SECOND_MS):
        if way == "cut":
            after_cut = World(world.files.crash(survival="nothing"), world.clock, world.observed)
            await world.abandon()
            world.files, world.node = after_cut.files, None
            await world.start()
        else:
            await world.restart()
        await world.advance(wait_ms)
    rows = await rows_of(world, "a")
    assert sorted(row["unique_key"] for row in rows) == sorted(set(keys) - {keys[3], keys[6], keys[-1]})
    assert world.broker.status()["levels"] == {"waiting_rows": 0}


@on_node()
async def test_invalid_level_messages_are_refused(world: World) -> None:
    with pytest.raises(InvalidDelay, match="negative"):
        await world.broker.send(batch_of_levels(1, -1))
    with pytest.raises(InvalidDelay, match="both"):
        await world.broker.send(batch_of_levels(1, due_ms=[world.clock.wall]))
    with pytest.raises(Forbidden, match="is forbidden"):
        await world.broker.send(batch(topic=[SCHEDULE_TOPIC]))
    with pytest.raises(InvalidMessage, match="properties of row 1"):
        await world.broker.send(batch_of_levels(1, 1, properties=["", "P\x01" + "x" * 32_750 + "\x02"]))
    assert SCHEDULE_TOPIC not in world.broker.topics() or world.broker.queues(SCHEDULE_TOPIC)[0] == (0, 0)


def test_an_invalid_table_of_levels_is_refused_at_the_start() -> None:
    with pytest.raises(SetupError, match="--delay-levels"):
        Node(Settings(delay_levels="1s  5s"))


async def cancel_verdicts(world: World, **named: Any) -> list[tuple[str, int | None]]:
    """Cancel messages. Returns the verdict and the number of each."""
    return [(verdict.verdict, verdict.seq) for verdict in await world.broker.cancel(**named)]


@on_node()
async def test_a_message_with_a_delay_level_can_be_cancelled(world: World) -> None:
    sent = batch_of_levels(
        3, 14, 3, 1, unique_key=["u0", "u1", "u2", "u3"], keys=["one", "two one", None, None]
    )
    first = (await world.broker.send(sent)).first_seq
    assert await cancel_verdicts(world, ids=["u0"]) == [("cancelled", first)]
    assert await cancel_verdicts(world, keys=["one"]) == [
        ("cancelled", first + 1),
        ("already_cancelled", first),
    ]
    assert await cancel_verdicts(world, seqs=[first + 2, first + 2]) == [
        ("cancelled", first + 2), ("already_cancelled", first + 2),
    ]  # fmt: skip
    await world.advance(SECOND_MS)
    assert await cancel_verdicts(world, ids=["u3", "nobody"]) == [
        ("released", first + 3),
        ("not_found", None),
    ]
    await world.checkpoint()
    await world.restart()
    assert await cancel_verdicts(world, ids=["u0", "u1", "u2", "u3"]) == [
        *[("already_cancelled", first + n) for n in range(3)], ("released", first + 3),
    ]  # fmt: skip
    await world.advance(600 * SECOND_MS)
    assert [row["unique_key"] for row in await rows_of(world, "orders")] == ["u3"]
    [cancelled] = world.broker.read_log(1, 100, [Kind.CANCEL])
    assert cancelled.column("topic").to_pylist() == ["orders"] * 3, (
        "the CANCEL rows have the topic of the messages"
    )


@on_node()
async def test_a_cancel_of_a_level_message_without_an_id_holds_until_its_due_time(world: World) -> None:
    first = (await world.broker.send(batch_of_levels(3, 3))).first_seq
    assert await cancel_verdicts(world, seqs=[first]) == [("cancelled", first)]
    assert await cancel_verdicts(world, seqs=[first]) == [("already_cancelled", first)]
    await world.advance(10 * SECOND_MS)
    assert await cancel_verdicts(world, seqs=[first + 1]) == [("released", first + 1)]


@on_node()
async def test_a_clock_that_is_set_back_does_not_prolong_delay_levels(world: World) -> None:
    await world.broker.send(batch_of_levels(1, 3, 14, unique_key=["a", "b", "c"]))
    await world.advance(5 * SECOND_MS)
    world.clock.step_wall(-DAY_MS)
    await world.broker.send(batch_of_levels(3, unique_key=["after"]))
    await world.advance(5 * SECOND_MS - 1)
    assert len(await rows_of(world, "orders")) == 1
    await world.advance(1)
    await world.until(lambda: world.broker.status()["lateness"]["released"] == 2, "ten seconds are over")
    rows = await rows_of(world, "orders")
    assert [row["unique_key"] for row in rows] == ["a", "b"]
    assert rows[1]["due_ms"] == world.clock.wall == rows[1]["store_ms"]
    assert rows[1]["from_due_ms"] == rows[1]["accepted_ms"] + 10 * SECOND_MS == world.clock.wall + DAY_MS
    await world.checkpoint()
    await world.restart()
    await world.advance(5 * SECOND_MS - 1)
    assert len(await rows_of(world, "orders")) == 2
    await world.advance(1)
    assert [row["unique_key"] for row in await rows_of(world, "orders")] == ["a", "b", "after"]
    # After a restart, the time of the send is not known: it waits at most ten minutes from there.
    await world.advance(10 * 60 * SECOND_MS)
    await world.until(lambda: world.broker.status()["lateness"]["released"] == 2, "it is released")
    assert [row["unique_key"] for row in await rows_of(world, "orders")] == ["a", "b", "after", "c"]


@on_node(failing=True)
async def test_level_messages_whose_release_failed_are_released_after_a_restart(world: World) -> None:
    keys = await world.send_levels("orders", [1, 1, 1])
    await world.checkpoint()
    world.files.fail_at(world.files.calls + 1, DiskFailed("no"))
    with pytest.raises(DiskFailed):
        await world.advance(SECOND_MS)
    after_cut = World(world.files.crash(survival="nothing"), world.clock)
    await world.abandon()
    world.files, world.node = after_cut.files, None
    await world.start()
    await world.advance(0)
    assert sorted(row["unique_key"] for row in await rows_of(world, "orders")) == keys


@on_node(auto_create_topics=False)
async def test_a_level_message_to_a_missing_topic_is_refused(world: World) -> None:
    with pytest.raises(NotFound):
        await world.broker.send(batch_of_levels(1))
    assert SCHEDULE_TOPIC not in world.broker.topics()
    await world.create_topic("orders", 2)
    await world.broker.send(batch_of_levels(1))
    await world.restart()
    await world.advance(SECOND_MS)
    assert len(await rows_of(world, "orders")) == 1


@on_node(delay_levels="2s 1h")
async def test_a_configured_table_of_delay_levels_is_used(world: World) -> None:
    accepted = (await world.broker.send(batch_of_levels(1, 2, 3))).stored_rows
    assert accepted.column("queue_id").to_pylist() == [0, 1, 1]
    assert len(world.broker.queues(SCHEDULE_TOPIC)) == 18
    await world.advance(2 * SECOND_MS)
    assert len(await rows_of(world, "orders")) == 1


@on_node()
async def test_retention_keeps_the_rows_of_pending_level_messages(world: World) -> None:
    world = World(world.files.crash(survival="everything"), world.clock, retention_ms=1)
    await world.start()
    await world.send_levels("orders", [5], 500_000)
    for _ in range(3):
        await world.send("others", [None], 500_000)
    await world.checkpoint()
    world.clock.advance(SECOND_MS)
    await world.apply_retention()
    assert world.broker.log.reader.first_seq == 1
    await world.advance(60 * SECOND_MS)
    await world.checkpoint()
    await world.apply_retention()
    assert world.broker.log.reader.first_seq > 1
    assert world.broker.queues(SCHEDULE_TOPIC)[4] == (1, 1)
    await world.restart()
    await world.send_levels("orders", [5])
    await world.advance(60 * SECOND_MS)
    assert len(await rows_of(world, "orders")) == 2
    await world.stop()


@on_node(load_bounds=LoadBounds(gather_bytes=1 << 20))
async def test_large_bodies_of_level_messages_are_not_held_in_memory(world: World) -> None:
    for _ in range(3):
        await world.send_levels("orders", [2] * 10, 100_000)
    assert world.broker.status()["levels"]["waiting_rows"] == 30
    assert 0 < world.broker.status()["schedule"]["wheel_rows"] <= 10
    await world.advance(5 * SECOND_MS)
    assert len(await rows_of(world, "orders")) == 30
