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
    decode_offsets,
    encode_offsets,
    offsets_at,
    queue_parts,
)

ONLY_GROUP = Group("", "grpc://a:1")
KEPT = {0: (5, 20), 1: (0, 8)}  # queue -> (first kept offset, next offset)


def test_a_position_is_a_name_an_offset_or_an_offset_for_some_queues() -> None:
    assert offsets_at("from_offset", "first", KEPT) == {0: 5, 1: 0}
    assert offsets_at("to_offset", "latest", KEPT) == {0: 20, 1: 8}
    assert offsets_at("to_offset", 7, KEPT) == {0: 7, 1: 7}
    assert offsets_at("from_offset", {0: 20}, KEPT) == {0: 20, 1: 0}
    assert offsets_at("to_offset", {1: 0}, KEPT) == {0: 20, 1: 0}


def test_offsets_and_queues_that_are_not_kept_are_refused_with_the_name_of_the_option() -> None:
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


def test_each_queue_is_cut_into_even_pieces() -> None:
    options = read_options({"read": "queue", "topic": "t", "rows_per_partition": "10"})
    begin, end = {("", 0): 5}, {("", 0): 20, ("", 1): 8, ("", 2): 0}
    parts = queue_parts(begin, end, options, [ONLY_GROUP])
    bounds = [(part.queue_id, part.from_offset, part.to_offset) for part in parts]
    assert bounds == [(0, 5, 12), (0, 12, 20), (1, 0, 8)]


def rows_of(node: RunningNode, **options: str) -> list[tuple[int, int]]:
    """Read (queue, offset) of the rows that the tasks of a batch read pass to Spark."""
    defaults = {"endpoint": node.endpoint, "read": "queue", "topic": "orders"}
    reader = QueueReader(read_options({**defaults, "columns": "queue_id,queue_offset", **options}))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return [(row["queue_id"], row["queue_offset"]) for batch in batches for row in batch.to_pylist()]


def test_options_select_a_queue_and_offsets(node: RunningNode) -> None:
    send_due_now(node.endpoint, 40)
    everything = rows_of(node)
    assert len(everything) == len(set(everything)) == 40
    queue = everything[0][0]
    assert rows_of(node, queue_id=str(queue)) == [pair for pair in everything if pair[0] == queue]
    assert rows_of(node, from_offset="latest") == []
    assert rows_of(node, to_offset="0") == []
    assert rows_of(node, rows_per_partition="3") == everything


def test_a_queue_or_offset_that_does_not_exist_is_refused(node: RunningNode) -> None:
    send_due_now(node.endpoint, 1)
    with pytest.raises(NotFound, match="option queue_id=900: the topic 'orders' has the queues 0 to"):
        rows_of(node, queue_id="900")
    reader = QueueReader(read_options({"endpoint": node.endpoint, "read": "queue", "topic": "orders"}))
    with pytest.raises(OutOfRange):
        list(reader.read(QueuePart(0, 0, 1_000)))


def test_offsets_are_encoded_in_the_order_of_queues() -> None:
    offsets = {("", 10): 1, ("", 2): 5}
    assert list(encode_offsets(offsets)) == ["2", "10"]
    assert decode_offsets(encode_offsets(offsets), [ONLY_GROUP]) == offsets


def test_offsets_with_and_without_groups_are_decoded() -> None:
    groups = [Group("g1", "grpc://a:1"), Group("g2", "grpc://b:1")]
    offsets = {("g1", 0): 5, ("g2", 0): 7, ("g2", 3): 1}
    assert encode_offsets(offsets) == {"g1": {"0": 5}, "g2": {"0": 7, "3": 1}}
    assert decode_offsets(encode_offsets(offsets), groups) == offsets
    assert decode_offsets({"0": 5}, groups) == {("g1", 0): 5}, "it counts for the group of the named node"
    with pytest.raises(SetupError, match="'g2', which is not there"):
        decode_offsets({"g2": {"0": 7}}, groups[:1])


def stream(node: RunningNode, clock: ManualClock | None = None, **options: object) -> QueueStream:
    """Make a stream of the topic `orders` with these options."""
    texts = {name: str(value) for name, value in options.items()}
    defaults = {"endpoint": node.endpoint, "read": "queue", "topic": "orders"}
    return QueueStream(read_options({**defaults, **texts}), clock)


def total(offset: dict[str, int]) -> int:
    """Add the offsets of all queues."""
    return sum(offset.values())


def test_a_batch_is_limited_and_without_new_rows_the_start_offset_is_returned(node: RunningNode) -> None:
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


def test_few_rows_start_a_batch_after_the_delay(node: RunningNode) -> None:
    clock = ManualClock()
    send_due_now(node.endpoint, 5)
    source = stream(node, clock, min_rows_per_batch=50, max_trigger_delay_ms=1000, few_rows=3)
    start = source.initialOffset()
    assert source.latestOffset(start, source.getDefaultReadLimit()) is start
    clock.advance(1000)
    assert total(source.latestOffset(start, source.getDefaultReadLimit())) == 5
    source.stop()


def test_available_now_ends_at_the_ends_of_the_queues_when_it_was_prepared(node: RunningNode) -> None:
    send_due_now(node.endpoint, 10)
    source = stream(node, min_rows_per_batch=1000)
    start = source.initialOffset()
    source.prepareForTriggerAvailableNow()
    send_due_now(node.endpoint, 20)
    end = source.latestOffset(start, source.getDefaultReadLimit())
    assert total(end) == 10
    assert source.latestOffset(end, source.getDefaultReadLimit()) == end
    source.stop()


def test_a_queue_that_is_not_in_the_offset_is_read_from_its_first_row(node: RunningNode) -> None:
    send_due_now(node.endpoint, 10)
    source = stream(node)
    everything = source.latestOffset(source.initialOffset(), ReadAllAvailable())
    without_queue_0 = {queue: offset for queue, offset in everything.items() if queue != "0"}
    end = source.latestOffset(without_queue_0, ReadAllAvailable())
    assert end == everything
    parts = source.partitions(without_queue_0, end)
    assert sum(batch.num_rows for part in parts for batch in source.read(part)) == everything["0"]
    source.stop()


def test_a_stream_starts_at_a_named_position_or_an_offset_of_one_queue(node: RunningNode) -> None:
    send_due_now(node.endpoint, 20)
    ends = stream(node, from_offset="latest").initialOffset()
    assert total(ends) == 20
    assert stream(node, queue_id=1, from_offset=1).initialOffset() == {"1": 1}
    assert stream(node, queue_id=1).latestOffset({"1": 0}, ReadAllAvailable()) == {"1": ends["1"]}


def test_an_offset_beyond_the_queue_and_a_missing_topic_are_refused(node: RunningNode) -> None:
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
def test_a_query_that_is_started_again_reads_every_row_once(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    def run_query() -> int:
        """Run the query until it has read all rows. Returns the number of micro-batches."""
        reader = spark.readStream.format("timeball").option("endpoint", node.endpoint)
        reader = reader.option("read", "queue").option("topic", "orders").option("max_rows_per_batch", "15")
        writer = reader.load().select("queue_id", "queue_offset", "body").writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.option("path", str(tmp_path / "out")).trigger(availableNow=True).start()
        query.awaitTermination()
        return len(query.recentProgress)

    with node.client() as ball:
        ball.create_topic("orders", 2)  # a task for each queue
    send_due_now(node.endpoint, 40)
    assert run_query() >= 3
    with node.client() as ball:
        ball.create_topic("orders", 3)
    send_due_now(node.endpoint, 70)  # waits until 70 rows are visible, among them the first 40
    run_query()
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    positions = [(row.queue_id, row.queue_offset) for row in rows]
    assert len(positions) == len(set(positions)) >= 70
    assert {row.queue_id for row in rows} == {0, 1, 2}
    assert {bytes(row.body).decode() for row in rows} >= {f"now {i}" for i in range(70)}


def test_a_topic_is_read_in_all_groups_also_in_a_group_that_is_added(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        send_due_now(groups.one.endpoint, 10)
        send_due_now(groups.other.endpoint, 4)
        send_due_now(groups.other.endpoint, 3, topic="elsewhere")
        clock = ManualClock()
        source = stream(groups.one, clock)
        before_cluster = dict.fromkeys(source.initialOffset()["g1"], 0)
        first = source.latestOffset({"g1": before_cluster}, ReadAllAvailable())
        assert set(first) == {"g1"} and sum(first["g1"].values()) == 10
        groups.add()
        assert source.latestOffset(first, ReadAllAvailable()) is first, "groups are read once a second"
        clock.advance(1_000)
        second = source.latestOffset(first, ReadAllAvailable())
        assert second["g1"] == first["g1"] and sum(second["g2"].values()) == 4
        parts = source.partitions(first, second)
        rows = pa.concat_tables(pa.Table.from_batches(source.read(part)) for part in parts)
        assert rows.num_rows == 4 and {part.group.name for part in parts} == {"g2"}
        assert source.latestOffset(before_cluster, ReadAllAvailable()) == second
        both = rows_of(groups.one, columns="queue_id,queue_offset,group")
        assert len(both) == 14
        assert len(rows_of(groups.one, topic="elsewhere")) == 3, "only one group has this topic"
        assert len(rows_of(groups.one, group="g2")) == 4
        with pytest.raises(SetupError, match="option from_offset: each of the 2 groups has its own queues"):
            rows_of(groups.one, from_offset="0=1")
        source.stop()
