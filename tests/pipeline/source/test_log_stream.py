"""Tests of timeball.pipeline.source.log_stream: offsets, admission control, and what a query sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from tests.node_fixture import RunningNode
from tests.pipeline.traffic import send

from timeball.clock import ManualClock
from timeball.errors import OutOfRange, SetupError
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.source.log_stream import LogStream
from timeball.pipeline.source.options import read_options


def stream(node: RunningNode, clock: ManualClock | None = None, **options: object) -> LogStream:
    given = {name: str(value) for name, value in options.items()}
    return LogStream(read_options({"endpoint": node.endpoint, **given}), clock)


def test_an_idle_log_gives_the_start_back(node: RunningNode) -> None:
    source = stream(node)
    start = source.initialOffset()
    assert source.latestOffset(start, source.getDefaultReadLimit()) is start
    source.stop()


def test_a_batch_is_bounded_unless_everything_is_asked_for(node: RunningNode) -> None:
    source = stream(node, max_rows_per_batch=40)
    send(node.endpoint, 100)
    start = source.initialOffset()
    assert source.getDefaultReadLimit() == ReadMaxRows(40)
    assert source.latestOffset(start, ReadMaxRows(40)) == {"seq": start["seq"] + 40}
    assert source.latestOffset(start, ReadAllAvailable()) == {
        "seq": start["seq"] + 101
    }  # the topic stands before the rows
    assert source.reportLatestOffset() == {"seq": start["seq"] + 101}  # and the topic
    source.stop()


def test_a_small_batch_waits_for_its_time(node: RunningNode) -> None:
    clock = ManualClock()
    source = stream(node, clock, min_rows_per_batch=50, max_trigger_delay_ms=1000, few_rows=10)
    start = source.initialOffset()
    limit = source.getDefaultReadLimit()
    send(node.endpoint, 8)  # and the row of their topic
    clock.advance(5000)
    assert source.latestOffset(start, limit) is start  # too few, however long
    send(node.endpoint, 1)
    assert source.latestOffset(start, limit) == {"seq": start["seq"] + 10}
    source.latestOffset({"seq": start["seq"] + 10}, limit)
    send(node.endpoint, 20)
    assert source.latestOffset({"seq": start["seq"] + 10}, limit) == {"seq": start["seq"] + 10}  # not yet
    send(node.endpoint, 30)
    assert source.latestOffset({"seq": start["seq"] + 10}, limit) == {"seq": start["seq"] + 60}  # enough
    source.stop()


def test_available_now_ends_where_the_log_ended(node: RunningNode) -> None:
    source = stream(node, min_rows_per_batch=1000)
    send(node.endpoint, 30)
    start = source.initialOffset()
    source.prepareForTriggerAvailableNow()
    send(node.endpoint, 30)
    end = source.latestOffset(start, source.getDefaultReadLimit())
    assert end == {"seq": start["seq"] + 31}
    assert source.latestOffset(end, source.getDefaultReadLimit()) == end
    source.stop()


def test_named_starts(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 10)
    node.run(node.broker.compact())
    status = broker.status()
    assert stream(node).initialOffset() == {"seq": status.log.first_seq}
    assert stream(node, from_seq="latest").initialOffset() == {"seq": status.log.durable_seq}
    assert stream(node, from_seq="watermark").initialOffset() == {"seq": status.watermark}
    assert stream(node, from_seq=7).initialOffset() == {"seq": 7}


def test_only_rows_of_the_topic_reach_a_task(node: RunningNode) -> None:
    send(node.endpoint, 30)
    send(node.endpoint, 5, topic="cards")
    source = stream(node, topic="cards", columns="seq")
    start = source.initialOffset()
    parts = source.partitions(start, source.latestOffset(start, ReadAllAvailable()))
    rows = [batch for part in parts for batch in source.read(part)]
    assert [batch.schema.names for batch in rows] == [["seq"]]
    assert sum(batch.num_rows for batch in rows) == 5
    source.stop()


def test_ranges_begin_at_the_watermark_whatever_the_checkpoint_says(
    node: RunningNode, broker: Endpoint
) -> None:
    send(node.endpoint, 100)
    node.run(node.broker.compact())
    send(node.endpoint, 50)
    watermark, end = broker.status().watermark, broker.status().log.durable_seq
    source = stream(node, read="ranges", from_seq="watermark")
    for start in (1, watermark, end - 1):
        parts = source.partitions({"seq": start}, {"seq": end})
        assert [(p.from_seq, p.to_seq) for p in parts] == [(watermark, end)]
    assert source.partitions({"seq": 1}, {"seq": watermark}) == []
    source.stop()


def test_a_checkpoint_of_another_log_is_refused(node: RunningNode) -> None:
    source = stream(node)
    with pytest.raises(SetupError, match=r"stands at row 10000 .* remove the checkpoint"):
        source.latestOffset({"seq": 10_000}, ReadAllAvailable())
    with pytest.raises(OutOfRange, match="retention"):
        source.partitions({"seq": 0}, {"seq": 1})
    source.stop()


def test_options_of_batches_are_refused() -> None:
    with pytest.raises(SetupError, match="read=pending"):
        LogStream(read_options({"read": "pending"}))
    with pytest.raises(SetupError, match="to_seq"):
        LogStream(read_options({"to_seq": "5"}))


@pytest.mark.smoke
@pytest.mark.spark
def test_a_query_sees_every_row_once_over_a_restart(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    def drain() -> list[int]:
        reader = spark.readStream.format("timeball").option("endpoint", node.endpoint)
        rows = (
            reader.option("max_rows_per_batch", "30").option("kinds", "promise").load().select("seq", "body")
        )
        writer = rows.writeStream.format("parquet").option("path", str(tmp_path / "out"))
        query = (
            writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [p["batchId"] for p in query.recentProgress]

    send(node.endpoint, 100)
    assert len(drain()) >= 4
    send(node.endpoint, 50)
    drain()
    found = [row.seq for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    assert len(found) == len(set(found)) == 150
