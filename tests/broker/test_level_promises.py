"""Delay levels through the whole broker: accepted, waiting in SCHEDULE_TOPIC_XXXX, released, restarted, cancelled."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import SECOND_MS, World

from timeball.errors import InvalidDelay, InvalidMessage, SetupError
from timeball.message import SCHEDULE_TOPIC, Kind, decode_properties


def levels(*wanted: int, **columns: Any) -> pa.RecordBatch:
    return batch(len(wanted), delay_level=list(wanted), **columns)


async def rows_of(world: World, topic: str) -> list[dict[str, Any]]:
    found = []
    for queue, (low, high) in world.broker.queues(topic).items():
        if high > low:
            found += (await world.broker.read_queue(topic, queue, low, 1_000)).to_pylist()
    return sorted(found, key=lambda row: row["seq"])


@on_node()
async def test_a_level_is_waited_for_to_the_millisecond(world: World) -> None:
    accepted = await world.broker.send(levels(3, queue_id=[1], tag=["t"], properties=["TAGS\x01t"]))
    [kept] = accepted.kept.to_pylist()
    assert (kept["kind"], kept["topic"], kept["queue_id"], kept["queue_offset"]) == (7, SCHEDULE_TOPIC, 2, 0)
    assert kept["due_ms"] == accepted.store_ms + 10_000
    await world.advance(9_999)
    assert await rows_of(world, "orders") == []
    await world.advance(1)
    [row] = await rows_of(world, "orders")
    assert (row["kind"], row["queue_id"], row["source_seq"]) == (Kind.RELEASE, 1, accepted.first_seq)
    assert row["store_ms"] == kept["due_ms"] == row["due_ms"]
    assert decode_properties(row["properties"]) == {
        "TAGS": "t", "DELAY": "3", "REAL_TOPIC": "orders", "REAL_QID": "1",
    }  # fmt: skip
    waited = await rows_of(world, SCHEDULE_TOPIC)
    assert [row["kind"] for row in waited] == [Kind.LEVEL_PROMISE], "it can be read like any queue"
    topics = world.broker.parts.topics
    assert topics.get("orders").queues[1].index.read(0, 1)["tag"][0] == ord("t"), "the tag's hash is back"
    assert topics.get(SCHEDULE_TOPIC).queues[2].index.read(0, 1)["tag"][0] == kept["due_ms"]
    assert len(topics.get(SCHEDULE_TOPIC).queues) == 18
    assert world.broker.status()["levels"]["waiting_rows"] == 0


@on_node()
async def test_all_sorts_of_rows_in_one_batch(world: World) -> None:
    sent = batch(
        4, topic=["a", "b", "c", "a"], delay_level=[0, 1, None, 99],
        due_ms=[None, None, world.clock.wall + 500, None],
    )  # fmt: skip
    kept = (await world.broker.send(sent)).kept
    assert kept.column("kind").to_pylist() == [1, 7, 2, 7]
    assert kept.column("topic").to_pylist() == ["a", SCHEDULE_TOPIC, "c", SCHEDULE_TOPIC]
    assert kept.column("queue_id").to_pylist()[1::2] == [0, 17], "beyond the last is the last"
    assert set(world.broker.topics()) == {"a", "b", "c", SCHEDULE_TOPIC}
    await world.advance(500)
    assert len(await rows_of(world, "c")) == 1 and await rows_of(world, "b") == []
    await world.advance(500)
    assert len(await rows_of(world, "b")) == 1
    await world.advance(7_200_000)
    assert len(await rows_of(world, "a")) == 2
    assert decode_properties((await rows_of(world, "a"))[1]["properties"])["DELAY"] == "18"


@pytest.mark.parametrize("stopped", ["stop", "cut"])
@on_node()
async def test_a_restart_forgets_and_repeats_nothing(world: World, stopped: str) -> None:
    keys = [key for level in (1, 3, 5, 3, 14) for key in await world.send_levels("a", [level] * 3)]
    await world.checkpoint()
    keys += await world.send_levels("a", [1, 3, 5])
    await world.cancel([keys[3], keys[6], keys[-1]])
    await world.advance(SECOND_MS)
    for wait_ms in (9 * SECOND_MS, 50 * SECOND_MS, 600 * SECOND_MS):
        if stopped == "cut":
            left = World(world.files.crash(survival="nothing"), world.clock, world.observed)
            await world.abandon()
            world.files, world.node = left.files, None
            await world.start()
        else:
            await world.restart()
        await world.advance(wait_ms)
    rows = await rows_of(world, "a")
    assert sorted(row["unique_key"] for row in rows) == sorted(set(keys) - {keys[3], keys[6], keys[-1]})
    assert world.broker.status()["levels"] == {"waiting_rows": 0, "wheel_rows": 0, "cancelled_rows": 0}


@on_node()
async def test_what_is_refused(world: World) -> None:
    with pytest.raises(InvalidDelay, match="negative"):
        await world.broker.send(levels(1, -1))
    with pytest.raises(InvalidDelay, match="both"):
        await world.broker.send(levels(1, due_ms=[world.clock.wall]))
    with pytest.raises(InvalidMessage, match="broker's own"):
        await world.broker.send(batch(topic=[SCHEDULE_TOPIC]))
    with pytest.raises(InvalidMessage, match="properties of row 1"):
        await world.broker.send(levels(1, 1, properties=["", "P\x01" + "x" * 32_750 + "\x02"]))
    assert SCHEDULE_TOPIC not in world.broker.topics() or world.broker.queues(SCHEDULE_TOPIC)[0] == (0, 0)


def test_a_bad_table_is_refused_before_anything_starts() -> None:
    from timeball.config import Settings
    from timeball.node import Node

    with pytest.raises(SetupError, match="--delay-levels"):
        Node(Settings(delay_levels="1s  5s"))
