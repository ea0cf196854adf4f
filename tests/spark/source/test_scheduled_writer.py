"""Tests of timeball.spark.source.scheduled_writer: a DataFrame becomes scheduled messages, all or none, once."""

from __future__ import annotations

import datetime as dt
import logging
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.node_fixture import RunningNode, eventually
from tests.spark.traffic import attached_seqs, visible

from timeball.model import limits
from timeball.model.errors import InvalidMessage, OverLimit, RequestError, SetupError
from timeball.model.limits import DAY_MS
from timeball.spark import table_store
from timeball.spark.endpoint import Endpoint
from timeball.spark.source import scheduled_writer as sink
from timeball.spark.source.data_source import TimeballDataSource
from timeball.spark.source.options import write_options
from timeball.spark.source.scheduled_writer import ScheduledTask, ScheduledWriter, TaskResult
from timeball.spark.source.spark_api import spark_errors, spark_schema
from timeball.table import layout


def later(broker: Endpoint) -> int:
    """Compute a due time (ms) three days from now."""
    return broker.status().now_ms + 3 * DAY_MS


def task(node: RunningNode, rows: dict[str, object], **options: str) -> TaskResult:
    """Write rows as a task does, without an attach."""
    table = pa.table({name: pa.array(values) for name, values in rows.items()})
    return ScheduledTask(write_options({"endpoint": node.endpoint, **options})).write(
        iter(table.to_batches())
    )


def data_files(broker: Endpoint) -> list[Path]:
    """List the data files on disk, in the table or not."""
    return sorted(Path(broker.status().table.uri).glob("bucket=*/*.parquet"))


def test_a_task_writes_sorted_numbered_rows_and_attaches_nothing(node: RunningNode, broker: Endpoint) -> None:
    due = later(broker)
    result = task(node, {"topic": ["t"] * 3, "body": ["b"] * 3, "due_ms": [due + 2, due, due + 1]})
    assert (result.rows, result.dropped, len(result.ranges)) == (3, 0, 1)
    assert attached_seqs(broker) == []
    sink.attach_all([result], write_options({"endpoint": node.endpoint}), "job", 0)
    first, count = result.ranges[0]
    assert attached_seqs(broker) == list(range(first, first + count))


def test_a_repeated_epoch_schedules_its_rows_once_and_a_new_epoch_again(
    node: RunningNode, broker: Endpoint
) -> None:
    options = write_options({"endpoint": node.endpoint})
    rows = {"topic": ["t"], "body": ["b"], "due_ms": [later(broker)]}
    first = task(node, rows)
    sink.attach_all([first], options, "job", 0)
    sink.attach_all([first], options, "job", 0)
    sink.attach_all([task(node, rows)], options, "job", 0)
    assert len(attached_seqs(broker)) == 1
    sink.attach_all([task(node, rows)], options, "job", 1)
    assert len(attached_seqs(broker)) == 2


def test_other_rows_under_a_known_name_are_refused(node: RunningNode, broker: Endpoint) -> None:
    """The same rows in another order, or in other tasks, are a repeat. Due times may differ."""
    due, options = later(broker), write_options({"endpoint": node.endpoint})
    rows = {"topic": ["t"] * 4, "body": ["a", "b", "c", "d"], "due_ms": [due] * 4}
    sink.attach_all([task(node, rows)], options, "job", 3)
    repeated = [
        task(node, {"topic": ["t"] * 2, "body": bodies, "due_ms": [due + 5] * 2})
        for bodies in (["d", "b"], ["c", "a"])
    ]
    sink.attach_all(repeated, options, "job", 3)
    for bodies in (["a", "b", "c", "x"], ["a", "b", "c"], ["a", "a", "c", "d"]):
        other = task(node, {"topic": ["t"] * len(bodies), "body": bodies, "due_ms": [due] * len(bodies)})
        with pytest.raises(RequestError, match="job, epoch 3 was written before, with other rows"):
            sink.attach_all([other], options, "job", 3)
        skip = write_options({"endpoint": node.endpoint, "on_repeat": "skip"})
        sink.attach_all([other], skip, "job", 3)
    with pytest.raises(RequestError, match="job has come to epoch 3, this is 2"):
        sink.attach_all([task(node, rows)], options, "job", 2)
    assert len(attached_seqs(broker)) == 4


def test_repeat_is_recognised_after_many_jobs_and_a_restart(
    node: RunningNode, broker: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOBS_UNNAMED_MAX", 2)
    options = write_options({"endpoint": node.endpoint})
    rows = {"topic": ["t"], "body": ["b"], "due_ms": [later(broker)]}
    sink.attach_all([task(node, rows)], options, "stream-1", 0)
    for number in range(4):
        sink.attach_all([task(node, rows)], options, f"once{number}", 0, with_checksum=False)
    node.stop()  # writes a checkpoint
    node.start()  # reads only the checkpoint
    sink.attach_all([task(node, rows)], options, "stream-1", 0)
    assert len(attached_seqs(broker)) == 5


def test_invalid_rows_fail_the_task_with_number_and_reason(node: RunningNode, broker: Endpoint) -> None:
    rows = {"topic": ["fine", "not fine", "worse!"], "body": ["b"] * 3}
    with pytest.raises(
        InvalidMessage,
        match=r"2 of 3 rows .*first \(row 1 of its task, topic 'not fine'\): topic: .*on_invalid=drop",
    ):
        task(node, rows)
    result = task(node, rows, on_invalid="drop")
    assert (result.rows, result.dropped) == (1, 2)


def test_a_text_with_a_blank_is_no_key_and_is_quoted_in_the_error(
    node: RunningNode, broker: Endpoint
) -> None:
    rows = {
        "topic": ["t"] * 2,
        "body": ["b"] * 2,
        "due_ms": [later(broker)] * 2,
        "keys": ["fine", "customer 4"],
    }
    with pytest.raises(
        InvalidMessage, match=r"topic 't'\): 'customer 4' keys: a key has no blanks.*array<string>"
    ):
        task(node, rows)
    assert task(node, rows, on_invalid="drop").dropped == 1
    assert task(node, rows, as_stored="true").dropped == 0


def test_failed_task_removes_its_files(
    node: RunningNode, broker: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_store, "CHUNK_ROWS", 1)
    numbers = [broker.reserve(1), broker.reserve(1)]
    with pytest.raises(InvalidMessage, match=r"^1 of 1 rows"):
        task(node, {"topic": ["fine", "not fine"], "body": ["b"] * 2, "due_ms": [later(broker)] * 2})
    numbers.append(broker.reserve(1))
    # The task has reserved a number for its first row, so it has written this row before it failed.
    assert numbers[2] - numbers[1] == 2 * (numbers[1] - numbers[0])
    assert data_files(broker) == []


def test_too_many_files_are_refused_and_removed(
    node: RunningNode, broker: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink.limits, "ATTACH_FILES_MAX", 1)
    monkeypatch.setattr(layout, "FILE_ROWS", 1)
    due = later(broker)
    result = task(node, {"topic": ["t"] * 2, "body": ["b"] * 2, "due_ms": [due, due + 9 * DAY_MS]})
    with pytest.raises(OverLimit, match="2 files in one write"):
        sink.attach_all([result], write_options({"endpoint": node.endpoint}), "job", 0)
    assert data_files(broker) == []


def test_files_of_other_tasks_are_removed_after_a_failed_task(node: RunningNode, broker: Endpoint) -> None:
    options = write_options({"endpoint": node.endpoint})
    result = task(node, {"topic": ["t"], "body": ["b"], "due_ms": [later(broker)]})
    sink.remove_written([result], options)  # no task has failed, so a commit was tried
    assert len(data_files(broker)) == 1
    sink.remove_written([result, None], options)
    assert data_files(broker) == []


MESSAGES = spark_schema(pa.schema([("topic", pa.string()), ("body", pa.binary())]))


def test_a_stream_with_an_epoch_or_without_a_query_id_is_refused() -> None:
    with pytest.raises(SetupError, match="option epoch: not for a stream"):
        sink.ScheduledStreamWriter(MESSAGES, write_options({"job_id": "import", "epoch": "1"}))
    with pytest.raises(SetupError, match=r"no sql\.streaming\.queryId: .*foreachBatch"):
        sink.ScheduledStreamWriter(MESSAGES, write_options({})).write(iter([]))


def test_a_write_in_the_mode_overwrite_is_refused() -> None:
    with pytest.raises(SetupError, match="mode overwrite"):
        TimeballDataSource({}).writer(MESSAGES, True)


def test_each_write_without_a_job_id_has_another_name() -> None:
    names = {ScheduledWriter(MESSAGES, write_options({})).job_id for _ in range(2)}
    assert len(names) == 2


# ---- with Spark -------------------------------------------------------------------------------------------


def save(frame: DataFrame, node: RunningNode, **options: str) -> None:
    with spark_errors():
        frame.write.format("timeball").option("endpoint", node.endpoint).options(**options).mode(
            "append"
        ).save()


@pytest.mark.smoke
@pytest.mark.spark
def test_a_dataframe_becomes_scheduled_messages_in_one_attach(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    version, due = broker.status().table.version, later(broker)
    rows = spark.range(0, 1000, numPartitions=4)
    save(
        rows.selectExpr("'orders' as topic", "concat('b', id) as body", f"{due} + id * 1000 as due_ms"), node
    )
    assert broker.status().table.version == version + 1
    assert len(set(attached_seqs(broker))) == 1000


@pytest.mark.smoke
@pytest.mark.spark
def test_due_rows_are_released_with_all_their_fields(spark: SparkSession, node: RunningNode) -> None:
    now = dt.datetime.now(dt.UTC)
    frame = spark.createDataFrame(
        [
            ("t", b"at once", now - dt.timedelta(days=1), "k1", {"colour": "red"}),
            ("t", b"past", now, "k2", {}),
        ],
        "topic string, body binary, due timestamp, keys string, properties map<string,string>",
    )
    save(frame, node)
    with node.client() as ball:
        eventually(lambda: visible(ball, "t") == 2, "both rows released")
        result = {m.body: m for m in ball.browse("t", max_messages=10, wait="5s")}
    assert set(result) == {b"at once", b"past"}
    assert result[b"at once"].properties["colour"] == "red"
    assert result[b"past"].lateness_ms is not None and result[b"past"].lateness_ms >= 0


@pytest.mark.spark
def test_a_cancel_by_key_ends_the_messages_of_this_key_alone(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    """A key "customer 4" would be two keys, and a cancel of "4" would end messages of other customers."""
    rows = spark.range(4).selectExpr("'t' as topic", "'b' as body", f"{later(broker)} as due_ms", "id")
    with pytest.raises(InvalidMessage, match=r"'customer [0-3]' keys: a key has no blanks"):
        save(rows.selectExpr("topic", "body", "due_ms", "concat('customer ', id) as keys"), node)
    assert attached_seqs(broker) == []
    save(
        rows.selectExpr("topic", "body", "due_ms", "array('customers', concat('customer-', id)) as keys"),
        node,
    )
    with node.client() as ball:
        assert [each.verdict for each in ball.cancel(key="customer-3")] == ["cancelled"]
        verdicts = sorted(each.verdict for each in ball.cancel(key="customers"))
        assert verdicts == ["already_cancelled", *["cancelled"] * 3]


@pytest.mark.spark
def test_one_bad_row_fails_the_whole_write(spark: SparkSession, node: RunningNode, broker: Endpoint) -> None:
    version = broker.status().table.version
    rows = spark.range(0, 100, numPartitions=4)
    frame = rows.selectExpr(
        "if(id = 77, 'no good', 'fine') as topic", "'b' as body", f"{later(broker)} as due_ms"
    )
    with pytest.raises(InvalidMessage, match=r"^1 of 25 rows are invalid"):
        save(frame, node)
    # Spark may kill other tasks, which then leave files in the folder. The table has none of these files.
    assert attached_seqs(broker) == []
    assert broker.status().table.version == version
    save(frame, node, on_invalid="drop")
    assert len(attached_seqs(broker)) == 99


@pytest.mark.spark
def test_an_unknown_column_is_refused_before_anything_is_written(
    spark: SparkSession, node: RunningNode
) -> None:
    with pytest.raises(InvalidMessage, match=r"^column colour: unknown"):
        save(spark.range(1).selectExpr("'t' as topic", "'b' as body", "id as colour"), node)


@pytest.mark.smoke
@pytest.mark.spark
def test_a_restarted_stream_schedules_each_message_once(
    spark: SparkSession, node: RunningNode, broker: Endpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    due = later(broker)

    def run_once() -> None:
        rows = spark.readStream.schema("id long").json(str(tmp_path / "in"))
        rows = rows.selectExpr("'orders' as topic", "cast(id as string) as body", f"{due} + id as due_ms")
        writer = (
            rows.writeStream.format("timeball").option("endpoint", node.endpoint).option("job_id", "import")
        )
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        writer.start().awaitTermination()

    with caplog.at_level(logging.WARNING):
        spark.range(0, 50).write.json(str(tmp_path / "in"), mode="append")
        run_once()
        spark.range(50, 80).write.json(str(tmp_path / "in"), mode="append")
        run_once()
    assert len(set(attached_seqs(broker))) == 80


@pytest.mark.spark
def test_new_checkpoint_is_a_new_stream_under_an_old_job_id(
    spark: SparkSession, node: RunningNode, broker: Endpoint, tmp_path: Path
) -> None:
    """Its batch ids begin at 0 again, and must not be taken for repeats of the first stream."""
    due = later(broker)

    def run_once(checkpoint: str) -> None:
        rows = spark.readStream.schema("id long").json(str(tmp_path / checkpoint))
        rows = rows.selectExpr("'orders' as topic", "cast(id as string) as body", f"{due} + id as due_ms")
        writer = rows.writeStream.format("timeball").option("endpoint", node.endpoint)
        writer = writer.option("job_id", "import").option(
            "checkpointLocation", str(tmp_path / f"{checkpoint}-ck")
        )
        with spark_errors():
            writer.trigger(availableNow=True).start().awaitTermination()

    for begin, checkpoint in ((0, "first"), (30, "second")):
        spark.range(begin, begin + 30, numPartitions=1).write.json(str(tmp_path / checkpoint))
        run_once(checkpoint)
    assert len(set(attached_seqs(broker))) == 60
    # Without this file, Spark runs the batch again: first with the same rows, then with other rows.
    [commit] = [path for path in (tmp_path / "second-ck/commits").iterdir() if path.name == "0"]
    commit.unlink()
    run_once("second")
    assert len(set(attached_seqs(broker))) == 60
    commit.unlink()
    [data] = (tmp_path / "second").glob("*.json")
    data.write_text(data.read_text().replace("31", "131"))
    with pytest.raises(RequestError, match="epoch 0 was written before, with other rows"):
        run_once("second")
    assert len(set(attached_seqs(broker))) == 60


@pytest.mark.spark
def test_failed_epoch_leaves_no_files_and_is_written_once_when_repeated(
    spark: SparkSession, node: RunningNode, broker: Endpoint, tmp_path: Path
) -> None:
    due = later(broker)

    def run_once(**options: str) -> None:
        rows = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).json(str(tmp_path / "in"))
        topic = "if(id = 77, 'no good', 'fine') as topic"
        rows = rows.selectExpr(topic, "cast(id as string) as body", f"{due} + id as due_ms")
        writer = (
            rows.writeStream.format("timeball").option("endpoint", node.endpoint).option("job_id", "import")
        )
        writer = writer.options(**options).option("checkpointLocation", str(tmp_path / "checkpoint"))
        with spark_errors():
            writer.trigger(availableNow=True).start().awaitTermination()

    for begin in (0, 50):
        spark.range(begin, begin + 50, numPartitions=1).write.json(str(tmp_path / "in"), mode="append")
        if begin == 0:
            run_once()
    version, files = broker.status().table.version, data_files(broker)
    with pytest.raises(InvalidMessage, match=r"^1 of 50 rows are invalid"):
        run_once()
    assert (broker.status().table.version, len(attached_seqs(broker))) == (version, 50)
    assert data_files(broker) == files
    run_once(on_invalid="drop")
    assert len(set(attached_seqs(broker))) == 99
    assert broker.status().table.version == version + 1
