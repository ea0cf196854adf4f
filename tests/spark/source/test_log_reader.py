"""Tests of timeball.spark.source.log_reader: batch and stream reads, also across restarts of the broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from tests.node_fixture import RunningNode
from tests.spark.traffic import log_rows, send, send_due_now
from tests.spark.two_groups import two_groups

from timeball.io.clock import ManualClock
from timeball.model.errors import OutOfRange, SetupError, Unavailable
from timeball.model.message import READ_SCHEMA, Kind
from timeball.spark.endpoint import READ_TRIES, Endpoint, after_last_seq, after_rows, retrying_read
from timeball.spark.source.log_reader import (
    LogPart,
    LogReader,
    LogStream,
    apply_options,
    columns_to_fetch,
    log_parts,
    read_part,
)
from timeball.spark.source.options import read_options


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, 1),
        ({"rows_per_partition": "400"}, 3),
        ({"min_partitions": "8"}, 8),
        ({"min_partitions": "5000"}, 1000),
    ],
)
def test_a_read_of_1000_rows_is_cut_into_the_requested_number_of_pieces(
    options: dict[str, str], parts: int
) -> None:
    assert len(log_parts(1, 1001, read_options(options))) == parts


def test_body_kinds_leaves_out_bodies_of_other_kinds() -> None:
    batch = log_rows(Kind.SCHEDULED, 2, body=[b"a", b"b"])
    for kinds, bodies in (("table", [None, None]), ("scheduled", [b"a", b"b"])):
        result = apply_options(batch, read_options({"body_kinds": kinds}))
        assert result.column("body").to_pylist() == bodies


def test_columns_selects_and_orders_the_columns() -> None:
    result = apply_options(log_rows(Kind.SCHEDULED, 2), read_options({"columns": "body,seq"}))
    assert result.schema.names == ["body", "seq"]


def test_the_requested_columns_and_those_that_options_need_are_fetched() -> None:
    """Always `seq`: by it, the read continues after an interruption."""
    assert columns_to_fetch(read_options({"topic": "orders"})) is None
    assert columns_to_fetch(read_options({"columns": "body,seq"})) == ["seq", "body"]
    assert columns_to_fetch(read_options({"columns": "seq", "topic": "orders"})) == ["seq", "topic"]
    with_bodies = read_options({"columns": "body", "body_kinds": "table"})
    assert columns_to_fetch(with_bodies) == ["seq", "kind", "body"]
    assert columns_to_fetch(read_options({"columns": "seq", "body_kinds": "table"})) == ["seq"]


def rows_of(node: RunningNode, **options: str) -> pa.Table:
    """Read the rows that the tasks of a batch read pass to Spark."""
    reader = LogReader(read_options({"endpoint": node.endpoint, **options}))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(batches, batches[0].schema if batches else READ_SCHEMA)


def test_a_task_passes_only_rows_of_the_topic_to_spark(node: RunningNode) -> None:
    send(node.endpoint, 40, topic="orders")
    send(node.endpoint, 10, topic="cards")
    assert rows_of(node, topic="cards").num_rows == 10
    cards = rows_of(node, topic="cards", columns="seq,body")
    assert (cards.num_rows, cards.column_names) == (10, ["seq", "body"])
    assert rows_of(node, topic="others").num_rows == 0


def test_a_read_of_ranges_yields_the_bounds_of_a_piece(node: RunningNode) -> None:
    options = read_options({"endpoint": node.endpoint, "read": "ranges", "columns": "to_seq"})
    (batch,) = read_part(options, LogPart(3, 9))
    assert batch.to_pydict() == {"to_seq": [9]}


def restart(node: RunningNode) -> None:
    """Restart the broker."""
    node.stop()
    node.start()


def test_interrupted_log_read_resumes_at_the_last_row(node: RunningNode, broker: Endpoint) -> None:
    with node.client() as ball:
        # More bytes than the connection buffers for the reader.
        ball.send_many([{"body": bytes(65_536), "after": "86400s"}] * 400, topic="orders", batch_rows=20)
    end = broker.status().log.durable_seq
    begins: list[int] = []

    def read(begin: int) -> Iterator[pa.RecordBatch]:
        begins.append(begin)
        return broker.read_log(begin, end, coalesce_rows=20)

    rows = retrying_read(broker, read, 1, after_last_seq)
    seqs = next(rows).column("seq").to_pylist()
    restart(node)
    seqs += [seq for batch in rows for seq in batch.column("seq").to_pylist()]
    assert seqs == list(range(1, end))
    assert len(begins) == 2 and begins[1] > 1, "it was interrupted, and did not begin again at row 1"


def test_interrupted_queue_read_resumes_at_the_last_row(node: RunningNode, broker: Endpoint) -> None:
    send_due_now(node.endpoint, 40)
    queue, (first, end) = next(iter(broker.queues("orders").items()))

    def read(begin: int) -> Iterator[pa.RecordBatch]:
        for offset in range(begin, end):
            yield from broker.read_queue("orders", queue, offset, offset + 1)

    rows = retrying_read(broker, read, first, after_rows)
    offsets = next(rows).column("queue_offset").to_pylist()
    restart(node)
    offsets += [offset for batch in rows for offset in batch.column("queue_offset").to_pylist()]
    assert offsets == list(range(first, end))


def test_repeated_interruptions_without_progress_raise_unavailable(broker: Endpoint) -> None:
    begins: list[int] = []

    def read(begin: int) -> Iterator[pa.RecordBatch]:
        begins.append(begin)
        raise Unavailable("interrupted")
        yield

    with pytest.raises(Unavailable, match="interrupted"):
        list(retrying_read(broker, read, 7, after_rows))
    assert begins == [7] * (READ_TRIES + 1)


def test_other_errors_are_not_retried(broker: Endpoint) -> None:
    with pytest.raises(OutOfRange):
        list(retrying_read(broker, lambda begin: broker.read_log(begin, 1), 0, after_last_seq))


def test_a_read_of_a_broker_that_does_not_come_back_raises_unavailable(node: RunningNode) -> None:
    send(node.endpoint, 10)
    with Endpoint(node.endpoint, patience_s=0) as impatient:
        rows = retrying_read(impatient, lambda begin: impatient.read_log(begin, 11), 1, after_last_seq)
        node.stop()
        with pytest.raises(Unavailable):
            list(rows)
    node.start()


def stream(node: RunningNode, clock: ManualClock | None = None, **options: object) -> LogStream:
    """Make a stream of the log with these options."""
    texts = {name: str(value) for name, value in options.items()}
    return LogStream(read_options({"endpoint": node.endpoint, **texts}), clock)


def test_without_new_rows_latest_offset_returns_the_start_offset(node: RunningNode) -> None:
    source = stream(node)
    start = source.initialOffset()
    assert source.latestOffset(start, source.getDefaultReadLimit()) is start
    source.stop()


def test_batch_is_limited_unless_everything_is_requested(node: RunningNode) -> None:
    source = stream(node, max_rows_per_batch=40)
    send(node.endpoint, 100)
    start = source.initialOffset()
    end = {"seq": start["seq"] + 101}  # the messages, and the row of their topic
    assert source.getDefaultReadLimit() == ReadMaxRows(40)
    assert source.latestOffset(start, ReadMaxRows(40)) == {"seq": start["seq"] + 40}
    assert source.latestOffset(start, ReadAllAvailable()) == end
    assert source.reportLatestOffset() == end
    source.stop()


def test_few_rows_start_a_batch_after_the_delay_and_many_rows_at_once(node: RunningNode) -> None:
    clock = ManualClock()
    source = stream(node, clock, min_rows_per_batch=50, max_trigger_delay_ms=1000, few_rows=10)
    start = source.initialOffset()
    limit = source.getDefaultReadLimit()
    send(node.endpoint, 8)  # with the row of their topic, 9 rows
    clock.advance(5000)
    assert source.latestOffset(start, limit) is start, "fewer than few_rows never start a batch"
    send(node.endpoint, 1)
    first = {"seq": start["seq"] + 10}
    assert source.latestOffset(start, limit) == first, "few_rows, and the delay is over"
    send(node.endpoint, 20)
    assert source.latestOffset(first, limit) == first, "few_rows, but the delay has begun again"
    send(node.endpoint, 30)
    assert source.latestOffset(first, limit) == {"seq": first["seq"] + 50}, "min_rows_per_batch"
    source.stop()


def test_available_now_ends_at_the_end_of_the_log_when_it_was_prepared(node: RunningNode) -> None:
    source = stream(node, min_rows_per_batch=1000)
    send(node.endpoint, 30)
    start = source.initialOffset()
    source.prepareForTriggerAvailableNow()
    send(node.endpoint, 30)
    end = source.latestOffset(start, source.getDefaultReadLimit())
    assert end == {"seq": start["seq"] + 31}
    assert source.latestOffset(end, source.getDefaultReadLimit()) == end
    source.stop()


def test_a_stream_starts_at_a_named_position_or_a_row_number(node: RunningNode, broker: Endpoint) -> None:
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


def test_a_checkpoint_of_another_log_is_refused(node: RunningNode) -> None:
    source = stream(node)
    with pytest.raises(SetupError, match=r"stands at row 10000 .* remove the checkpoint"):
        source.latestOffset({"seq": 10_000}, ReadAllAvailable())
    with pytest.raises(OutOfRange, match="retention"):
        source.partitions({"seq": 0}, {"seq": 1})
    source.stop()


def test_a_stream_refuses_reads_and_options_of_batches() -> None:
    with pytest.raises(SetupError, match="read=pending"):
        LogStream(read_options({"read": "pending"}))
    with pytest.raises(SetupError, match="to_seq"):
        LogStream(read_options({"to_seq": "5"}))


@pytest.mark.smoke
@pytest.mark.spark
def test_a_query_that_is_started_again_reads_every_row_once(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    def run_query() -> int:
        """Run the query until it has read all rows. Returns the number of micro-batches."""
        reader = spark.readStream.format("timeball").option("endpoint", node.endpoint)
        reader = reader.option("max_rows_per_batch", "30").option("kinds", "scheduled")
        writer = reader.load().select("seq", "body").writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.option("path", str(tmp_path / "out")).trigger(availableNow=True).start()
        query.awaitTermination()
        return len(query.recentProgress)

    send(node.endpoint, 100)
    assert run_query() >= 4
    send(node.endpoint, 50)
    run_query()
    result = [row.seq for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    assert len(result) == len(set(result)) == 150


def rows_by_group(parts: list[LogPart], reader: LogReader | LogStream) -> dict[str | None, int]:
    """Read these parts, and count the rows of each group by their column `group`."""
    result: dict[str | None, int] = {}
    for part in parts:
        for batch in reader.read(part):
            for name in batch.column("group").to_pylist():
                result[name] = result.get(name, 0) + 1
    return result


def test_a_batch_reads_all_groups_or_the_group_of_the_option(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        send(groups.one.endpoint, 30)
        send(groups.other.endpoint, 20)

        def reader(**options: str) -> LogReader:
            defaults = {"endpoint": groups.endpoint, "kinds": "scheduled", "columns": "group,seq"}
            return LogReader(read_options({**defaults, **options}))

        def read(**options: str) -> dict[str | None, int]:
            log_reader = reader(**options)
            return rows_by_group(list(log_reader.partitions()), log_reader)

        assert read() == {"g1": 30}
        groups.add()
        assert read() == read(columns="*,group") == {"g1": 30, "g2": 20}
        assert read(group="g2") == read(endpoint=f"{groups.endpoint}#g2") == {"g2": 20}
        assert read(group="g2", from_seq="1") == {"g2": 20}
        assert len(reader(min_partitions="10").partitions()) >= 10
        with pytest.raises(SetupError, match="option from_seq: each of the 2 groups has numbers of its own"):
            read(from_seq="1")
        groups.leave()
        assert read() == {None: 30}, "a broker that is in no cluster"


def test_a_stream_reads_a_group_that_is_added_from_its_first_row(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        send(groups.one.endpoint, 30)
        options = {"endpoint": groups.endpoint, "kinds": "scheduled", "columns": "seq,group"}
        source = LogStream(read_options(options))
        start = source.initialOffset()
        assert set(start) == {"g1"}
        first = source.latestOffset(start, ReadAllAvailable())
        send(groups.other.endpoint, 20)
        groups.add()
        second = source.latestOffset(first, ReadAllAvailable())
        assert second["g1"] == first["g1"] and second["g2"] > 20
        assert rows_by_group(list(source.partitions(first, second)), source) == {"g2": 20}
        assert rows_by_group(list(source.partitions(start, second)), source) == {"g1": 30, "g2": 20}
        assert source.latestOffset(second, ReadAllAvailable()) is second

        limited = source.latestOffset(start, ReadMaxRows(25))
        # The offset of a group that is not in `start` counts from its first row, 1.
        assert sum(limited.values()) == sum(start.values()) + 1 + 25
        before_cluster = {"seq": start["g1"]}
        assert source.latestOffset(before_cluster, ReadAllAvailable()) == second
        assert rows_by_group(list(source.partitions({"seq": first["g1"]}, second)), source) == {"g2": 20}
        with pytest.raises(SetupError, match="'g3', which is not there"):
            source.latestOffset({"g1": 1, "g3": 1}, ReadAllAvailable())
        with pytest.raises(SetupError, match="row 900 but the log of group g2 ends at"):
            source.latestOffset({"g1": 1, "g2": 900}, ReadAllAvailable())
        source.stop()


def test_available_now_reads_only_groups_and_rows_that_existed_when_it_was_prepared(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        send(groups.one.endpoint, 5)
        source = LogStream(read_options({"endpoint": groups.endpoint}))
        start = source.initialOffset()
        source.prepareForTriggerAvailableNow()
        groups.add()
        send(groups.one.endpoint, 5)
        end = source.latestOffset(start, ReadAllAvailable())
        assert end["g1"] < groups.one.broker.log.writer.next_seq, "the second five messages are not read"
        assert end["g2"] == 1, "no row of the group that was added is read"
        source.stop()


def test_a_stream_with_the_option_group_reads_only_this_group(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        groups.add()
        send(groups.other.endpoint, 20)
        source = LogStream(read_options({"endpoint": groups.endpoint, "read": "ranges", "group": "g2"}))
        start = source.initialOffset()
        end = source.latestOffset(start, ReadAllAvailable())
        assert [part.group.name for part in source.partitions(start, end)] == ["g2"]
        source.stop()
