"""Tests of timeball.spark.source.queue_reader: a topic as a batch and as a stream, by offsets of its queues."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from tests.node_fixture import RunningNode
from tests.spark.traffic import send_due_now
from tests.spark.two_groups import two_groups

from timeball.io.clock import ManualClock
from timeball.model.errors import NotFound, OutOfRange, SetupError
from timeball.spark.endpoint import Group
from timeball.spark.source.options import read_options
from timeball.spark.source.queue_reader import (
    QueuePart,
    QueueReader,
    QueueStream,
    check_offsets,
    from_json,
    offsets_at,
    queue_parts,
    to_json,
)

SINGLE_GROUP_KEY = Group("", "grpc://a:1")
KEPT = {0: (5, 20), 1: (0, 8)}


def test_positions_by_name_by_number_and_by_queue() -> None:
    assert offsets_at("from_offset", "first", KEPT) == {0: 5, 1: 0}
    assert offsets_at("to_offset", "latest", KEPT) == {0: 20, 1: 8}
    assert offsets_at("to_offset", 7, KEPT) == {0: 7, 1: 7}
    assert offsets_at("from_offset", {0: 20}, KEPT) == {0: 20, 1: 0}
    assert offsets_at("to_offset", {1: 0}, KEPT) == {0: 20, 1: 0}


def test_positions_that_are_not_kept_are_refused_by_name() -> None:
    with pytest.raises(
        OutOfRange, match=r"option to_offset: offset 9 of queue 1, which keeps 0 to 8; .*0=100"
    ):
        offsets_at("to_offset", 9, KEPT)
    with pytest.raises(OutOfRange, match="option from_offset: offset 4 of queue 0"):
        offsets_at("from_offset", {0: 4}, KEPT)
    with pytest.raises(NotFound, match=r"option from_offset: there is no queue 7 .*\[0, 1\]"):
        offsets_at("from_offset", {7: 1}, KEPT)
    with pytest.raises(
        OutOfRange, match="queue 0 of 't': retention has removed the rows below offset 5, and 4"
    ):
        check_offsets("t", {0: 4, 1: 0}, KEPT)
    check_offsets("t", {0: 5, 1: 8}, KEPT)


def test_each_queue_is_cut_into_pieces_of_its_own() -> None:
    options = read_options({"read": "queue", "topic": "t", "rows_per_partition": "10"})
    parts = [
        (p.queue_id, p.from_offset, p.to_offset)
        for p in queue_parts({("", 0): 5}, {("", 0): 20, ("", 1): 8, ("", 2): 0}, options, [SINGLE_GROUP_KEY])
    ]
    assert parts == [(0, 5, 12), (0, 12, 20), (1, 0, 8)]


def rows_of(node: RunningNode, **options: str) -> list[tuple[int, int]]:
    """Read (queue, offset) of the rows that the tasks of a batch read pass to Spark."""
    given = {
        "endpoint": node.endpoint,
        "read": "queue",
        "topic": "orders",
        "columns": "queue_id,queue_offset",
    }
    reader = QueueReader(read_options({**given, **options}))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return [(row["queue_id"], row["queue_offset"]) for batch in batches for row in batch.to_pylist()]


def test_queues_and_offsets_by_option(node: RunningNode) -> None:
    send_due_now(node.endpoint, 40)
    everything = rows_of(node)
    assert len(everything) == len(set(everything)) == 40
    queue = everything[0][0]
    assert rows_of(node, queue_id=str(queue)) == [pair for pair in everything if pair[0] == queue]
    assert rows_of(node, from_offset="latest") == []
    assert rows_of(node, to_offset="0") == []
    assert rows_of(node, rows_per_partition="3") == everything


def test_a_queue_that_is_not_there(node: RunningNode) -> None:
    send_due_now(node.endpoint, 1)
    with pytest.raises(NotFound, match="option queue_id=900: the topic 'orders' has the queues 0 to"):
        rows_of(node, queue_id="900")
    reader = QueueReader(read_options({"endpoint": node.endpoint, "read": "queue", "topic": "orders"}))
    with pytest.raises(OutOfRange):
        list(reader.read(QueuePart(0, 0, 1_000)))


def test_equal_offsets_are_equal_texts() -> None:
    assert list(to_json({("", 10): 1, ("", 2): 5})) == ["2", "10"]
    assert from_json(to_json({("", 10): 1, ("", 2): 5}), [SINGLE_GROUP_KEY]) == {("", 2): 5, ("", 10): 1}


def test_offsets_with_and_without_groups_are_decoded() -> None:
    groups = [Group("g1", "grpc://a:1"), Group("g2", "grpc://b:1")]
    offsets = {("g1", 0): 5, ("g2", 0): 7, ("g2", 3): 1}
    assert to_json(offsets) == {"g1": {"0": 5}, "g2": {"0": 7, "3": 1}}
    assert from_json(to_json(offsets), groups) == offsets
    assert from_json({"0": 5}, groups) == {("g1", 0): 5}, "of the group whose node is named"
    with pytest.raises(SetupError, match="'g2', which is not there"):
        from_json({"g2": {"0": 7}}, groups[:1])


def stream(node: RunningNode, clock: ManualClock | None = None, **options: object) -> QueueStream:
    given = {name: str(value) for name, value in options.items()}
    base = {"endpoint": node.endpoint, "read": "queue", "topic": "orders"}
    return QueueStream(read_options({**base, **given}), clock)


def total(offset: dict[str, int]) -> int:
    return sum(offset.values())


def test_a_batch_is_bounded_and_an_idle_topic_gives_the_start_back(node: RunningNode) -> None:
    send_due_now(node.endpoint, 50)
    source = stream(node, max_rows_per_batch=20)
    start = source.initialOffset()
    assert total(start) == 0
    first = source.latestOffset(start, source.getDefaultReadLimit())
    assert (total(first), total(source.reportLatestOffset() or {})) == (20, 50)
    everything = source.latestOffset(first, ReadAllAvailable())
    assert total(everything) == 50
    assert source.latestOffset(everything, ReadMaxRows(20)) is everything
    read = [batch for part in source.partitions(first, everything) for batch in source.read(part)]
    assert sum(batch.num_rows for batch in read) == 30
    source.stop()


def test_a_small_batch_waits_for_its_time(node: RunningNode) -> None:
    clock = ManualClock()
    send_due_now(node.endpoint, 5)
    source = stream(node, clock, min_rows_per_batch=50, max_trigger_delay_ms=1000, few_rows=3)
    start = source.initialOffset()
    assert source.latestOffset(start, source.getDefaultReadLimit()) is start
    clock.advance(1000)
    assert total(source.latestOffset(start, source.getDefaultReadLimit())) == 5
    source.stop()


def test_available_now_ends_where_the_queues_ended(node: RunningNode) -> None:
    send_due_now(node.endpoint, 10)
    source = stream(node, min_rows_per_batch=1000)
    start = source.initialOffset()
    source.prepareForTriggerAvailableNow()
    send_due_now(node.endpoint, 20)
    end = source.latestOffset(start, source.getDefaultReadLimit())
    assert total(end) == 10
    assert source.latestOffset(end, source.getDefaultReadLimit()) == end
    source.stop()


def test_a_queue_that_comes_later_is_read_from_its_first_row(node: RunningNode) -> None:
    send_due_now(node.endpoint, 10)
    source = stream(node)
    everything = source.latestOffset(source.initialOffset(), ReadAllAvailable())
    grown = {queue: offset for queue, offset in everything.items() if queue != "0"}
    end = source.latestOffset(grown, ReadAllAvailable())
    assert end == everything
    parts = source.partitions(grown, end)
    assert sum(batch.num_rows for part in parts for batch in source.read(part)) == everything["0"]
    source.stop()


def test_one_queue_and_named_starts(node: RunningNode) -> None:
    send_due_now(node.endpoint, 20)
    ends = stream(node, from_offset="latest").initialOffset()
    assert total(ends) == 20
    assert stream(node, queue_id=1, from_offset=1).initialOffset() == {"1": 1}
    assert stream(node, queue_id=1).latestOffset({"1": 0}, ReadAllAvailable()) == {"1": ends["1"]}


def test_checkpoint_of_another_topic_is_refused(node: RunningNode) -> None:
    send_due_now(node.endpoint, 10)
    source = stream(node)
    with pytest.raises(SetupError, match=r"stands at offset 10000 of queue 0 .* remove the checkpoint"):
        source.latestOffset({"0": 10_000}, ReadAllAvailable())
    with pytest.raises(NotFound, match=r"option topic='no\.such'"):
        stream(node, topic="no.such").initialOffset()
    with pytest.raises(SetupError, match="option to_offset: only for batch reads"):
        stream(node, to_offset=5)
    with pytest.raises(OutOfRange, match="option from_offset"):
        stream(node, from_offset=10_000).initialOffset()
    source.stop()


@pytest.mark.smoke
@pytest.mark.spark
def test_a_query_sees_every_row_once_over_a_restart(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    def drain() -> list[int]:
        reader = spark.readStream.format("timeball").option("endpoint", node.endpoint)
        reader = reader.option("read", "queue").option("topic", "orders").option("max_rows_per_batch", "15")
        writer = reader.load().select("queue_id", "queue_offset", "body").writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.option("path", str(tmp_path / "out")).trigger(availableNow=True).start()
        query.awaitTermination()
        return [p["batchId"] for p in query.recentProgress]

    with node.client() as ball:
        ball.create_topic("orders", 2)  # each batch has a task for each queue
    send_due_now(node.endpoint, 40)
    assert len(drain()) >= 3
    with node.client() as ball:
        ball.create_topic("orders", 3)
    send_due_now(node.endpoint, 70)  # those of before among them
    drain()
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    places = [(row.queue_id, row.queue_offset) for row in rows]
    assert len(places) == len(set(places)) >= 70
    assert {row.queue_id for row in rows} == {0, 1, 2}
    assert {bytes(row.body).decode() for row in rows} >= {f"now {i}" for i in range(70)}


def test_a_topic_over_groups_and_one_that_is_added(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        send_due_now(groups.one.endpoint, 10)
        send_due_now(groups.other.endpoint, 4)
        send_due_now(groups.other.endpoint, 3, topic="elsewhere")
        clock = ManualClock()
        source = stream(groups.one, clock)
        old = dict.fromkeys(source.initialOffset()["g1"], 0)
        first = source.latestOffset({"g1": old}, ReadAllAvailable())
        assert set(first) == {"g1"} and sum(first["g1"].values()) == 10
        groups.add()
        assert source.latestOffset(first, ReadAllAvailable()) is first, "it is looked for once a second"
        clock.advance(1_000)
        second = source.latestOffset(first, ReadAllAvailable())
        assert second["g1"] == first["g1"] and sum(second["g2"].values()) == 4
        parts = source.partitions(first, second)
        rows = pa.concat_tables(pa.Table.from_batches(source.read(part)) for part in parts)
        assert rows.num_rows == 4 and {part.group.name for part in parts} == {"g2"}
        assert source.latestOffset(old, ReadAllAvailable()) == second, "an offset of a time without groups"
        both = rows_of(groups.one, columns="queue_id,queue_offset,group")
        assert len(both) == 14
        assert len(rows_of(groups.one, topic="elsewhere")) == 3, "one group alone has it"
        assert len(rows_of(groups.one, group="g2")) == 4
        with pytest.raises(SetupError, match="option from_offset: each of the 2 groups has its own queues"):
            rows_of(groups.one, from_offset="0=1")
        source.stop()
