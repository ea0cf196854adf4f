"""Tests of snapshots of pending messages on a real broker, with DuckDB and Spark, wherever a message is stored."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import write_deltalake
from tests.node_fixture import RunningNode, eventually, running_node
from tests.spark.traffic import commit_half, send, send_due_now, visible
from tests.written_again import apply_retention, fill_segment, write_again

from timeball.io.clock import ManualClock
from timeball.model.config import MIB
from timeball.model.errors import NotFound, OutOfRange, SetupError
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.model.message import Kind
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import ledger
from timeball.spark.jobs.marked import InProcessEngine
from timeball.spark.log_events import EVENT_SCHEMA
from timeball.spark.source import scheduled_writer
from timeball.spark.table_store import ANY_DUE_TIME, Due, Store, TableFile, open_version, read_files, sibling
from timeball.spark.views.duckdb_session import SqlSession
from timeball.spark.views.snapshot import (
    Snapshot,
    status_of_version,
    status_with_all_attaches,
    table_row_of_version,
)
from timeball.spark.views.view_sql import PENDING_COLUMNS
from timeball.table.attachment import Attachment

Row = dict[str, Any]


class Engine:
    """Reads the pending messages of a snapshot with DuckDB or Spark. `read`: (endpoint, snapshot, due) -> rows."""

    def __init__(self, read: Callable[[str, Snapshot, Due], list[Row]]) -> None:
        self._read = read

    def rows(self, broker: Endpoint, shot: Snapshot | None = None, due: Due = ANY_DUE_TIME) -> list[Row]:
        """Read the pending messages of a snapshot, by default a new one, sorted by number."""
        result = self._read(broker.uri, shot or Snapshot.pin(broker), due)
        assert len(result) == len({row["seq"] for row in result}), "each message is there once"
        return sorted(result, key=lambda row: row["seq"])

    def seqs(self, broker: Endpoint, shot: Snapshot | None = None, due: Due = ANY_DUE_TIME) -> list[int]:
        """Read the numbers of the pending messages, sorted."""
        return [row["seq"] for row in self.rows(broker, shot, due)]


def read_by_duckdb(endpoint: str, shot: Snapshot, due: Due) -> list[Row]:
    with SqlSession(endpoint, snapshot=shot, due=due) as session:
        columns = ", ".join([*PENDING_COLUMNS, "place"])
        result: list[Row] = session.run(f"select {columns} from pending").rows.read_all().to_pylist()
    return result


@pytest.fixture(params=["duckdb", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.timeout(600)])])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine that reads the pending messages of a snapshot."""
    if request.param == "duckdb":
        return Engine(read_by_duckdb)
    from timeball.spark.views import spark_views

    spark = request.getfixturevalue("spark")

    def read_by_spark(endpoint: str, shot: Snapshot, due: Due) -> list[Row]:
        result = spark_views.pending_in_snapshot(spark, endpoint, shot, due=due).collect()
        return [{**row.asDict(), "body": bytes(row.body)} for row in result]

    return Engine(read_by_spark)


DUCKDB = Engine(read_by_duckdb)


def send_level(node: RunningNode, level: int) -> int:
    """Send a message with a delay level. Returns its number."""
    row = {"topic": ["orders"], "body": [b"level"], "delay_level": pa.array([level], pa.int32())}
    return node.run(node.broker.send(pa.record_batch(row))).first_seq


def test_snapshot_has_each_pending_message_once(engine: Engine, node: RunningNode, broker: Endpoint) -> None:
    assert engine.seqs(broker) == []
    send(node.endpoint, 10)  # numbers 2 to 11; 1 is the row of the topic
    node.run(node.broker.compact())
    send_due_now(node.endpoint, 3)
    in_level = send_level(node, 18)
    with node.client() as ball:
        in_tail = ball.send("mail", b"tail", after="1d", tag="blue")
        cancelled = ball.send("orders", b"tail", after="1d")
        assert [each.verdict for each in ball.cancel(ids=[cancelled.id])] == ["cancelled"]
        node.run(node.broker.cancel(seqs=[4]))
    rows = engine.rows(broker)
    assert [row["seq"] for row in rows] == [2, 3, 5, 6, 7, 8, 9, 10, 11, in_level, in_tail.seq]
    assert Counter(row["place"] for row in rows) == {"tail": 1, "table": 9, "level": 1}
    row_of = {row["seq"]: row for row in rows}
    # The log has a message of a level with the level's topic and queue. The view has those of the message.
    assert (row_of[in_level]["topic"], row_of[in_level]["queue_id"]) == ("orders", -1)
    fields = [row_of[in_tail.seq][name] for name in ("topic", "tag", "body")]
    assert fields == ["mail", "blue", b"tail"]
    assert all(row["accepted_ms"] > 0 and row["due_ms"] > row["accepted_ms"] for row in rows)
    # An upcoming snapshot reads only CANCEL rows. Here it has the same messages.
    assert engine.seqs(broker, Snapshot.pin(broker, upcoming=True)) == [row["seq"] for row in rows]


def test_half_message_committed_with_a_delay_is_pending_under_its_number(
    engine: Engine, node: RunningNode, broker: Endpoint
) -> None:
    in_table, moved_from_table = (commit_half(node, delay_ms=HOUR_MS) for _ in range(2))
    node.run(node.broker.compact())
    in_tail = commit_half(node, delay_ms=HOUR_MS)
    in_level, moved_from_level, cancelled = (commit_half(node, delay_level=18) for _ in range(3))
    for seq in (moved_from_table, moved_from_level):
        assert node.run(node.broker.reschedule(seqs=[seq], delay_ms=DAY_MS))[0].verdict == "rescheduled"
    assert node.run(node.broker.cancel(seqs=[cancelled]))[0].verdict == "cancelled"
    rows = engine.rows(broker)
    assert [(row["seq"], row["place"]) for row in rows] == [
        (in_table, "table"), (moved_from_table, "tail"), (in_tail, "tail"), (in_level, "level"),
        (moved_from_level, "tail"),
    ]  # fmt: skip
    assert all(row["topic"] == "orders" and 0 < row["accepted_ms"] < row["due_ms"] for row in rows)
    node.run(node.broker.compact())
    assert engine.seqs(broker) == [row["seq"] for row in rows]


def test_due_bounds_select_pending_messages(engine: Engine, node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 100)
    node.run(node.broker.compact())
    send(node.endpoint, 20)
    due = sorted(row["due_ms"] for row in engine.rows(broker))
    low, high = due[20], due[60]
    assert len(engine.seqs(broker, due=(low, high))) == sum(low <= each < high for each in due)
    assert len(engine.seqs(broker, due=(low, None))) == sum(low <= each for each in due)
    assert engine.seqs(broker, due=(None, 0)) == []


def test_rewritten_message_is_pending_once_after_its_rows_are_removed(engine: Engine, tmp_path: Path) -> None:
    with running_node(tmp_path / "d", segment_bytes=MIB) as node, Endpoint(node.endpoint) as broker:
        with node.client() as ball:
            ball.send_many([{"topic": "t", "body": b"x", "delay_ms": DAY_MS} for _ in range(10)])
        repeated = write_again(node, 2, 3, 4)
        write_again(node, repeated[2])
        assert engine.seqs(broker) == list(range(2, 12))
        fill_segment(node)
        write_again(node, 2, 4, 5, 6)
        write_again(node, 2)
        assert apply_retention(node) > 10
        rows = engine.rows(broker)
        # The control: messages that were not written again are missing, because their rows were removed.
        assert [row["seq"] for row in rows] == [2, 4, 5, 6]
        assert min(row["accepted_ms"] for row in rows) > 0


def test_older_version_has_the_messages_pending_at_its_time(
    engine: Engine, node: RunningNode, broker: Endpoint
) -> None:
    send(node.endpoint, 5)  # numbers 2 to 6
    node.run(node.broker.compact())
    first_version = broker.status().table.version
    send(node.endpoint, 3)
    node.run(node.broker.compact())
    before_cancel = Snapshot.pin(broker)
    node.run(node.broker.cancel(seqs=[2, 3]))
    new = node.run(node.broker.send(pa.record_batch({"topic": ["t"], "body": [b"x"], "delay_ms": [DAY_MS]})))
    # Without messages that were sent later, but with those that were cancelled later.
    assert engine.seqs(broker, Snapshot.pin(broker, version=first_version)) == [2, 3, 4, 5, 6]
    assert engine.seqs(broker, Snapshot.pin(broker, version=0)) == []
    assert len(engine.seqs(broker, before_cancel)) == 8
    now = engine.seqs(broker)
    assert 2 not in now and new.first_seq in now and len(now) == 7
    with pytest.raises(NotFound, match="no version 99"):
        Snapshot.pin(broker, version=99)


def attach(broker: Endpoint, rows: int) -> int:
    """Attach this number of messages as Spark's writer does. Returns the number of the first."""
    status = broker.status()
    due = [status.now_ms + 30 * DAY_MS] * rows
    given = pa.table({"topic": ["bulk"] * rows, "body": ["b"] * rows, "due_ms": due})
    first = broker.reserve(rows)
    table = scheduled_writer.numbered(scheduled_writer.to_table_columns(given, status.now_ms), first)
    files = list(Store(status.table.uri).put_rows(table, status.now_ms))
    broker.attach(Attachment(job="bulk", job_id=f"job-{first}", epoch=0, files=files, ranges=[(first, rows)]))
    return first


def test_older_version_has_the_log_tail_of_its_time(
    engine: Engine, node: RunningNode, broker: Endpoint
) -> None:
    """A bulk attach makes a version while other scheduled messages are in the log only."""
    send(node.endpoint, 2)  # numbers 2 and 3
    first = attach(broker, 3)
    send(node.endpoint, 1)
    node.run(node.broker.compact())
    assert broker.status().table.version == 2
    of_attach = Snapshot.pin(broker, version=1)
    rows = engine.rows(broker, of_attach)
    assert ([row["seq"] for row in rows], of_attach.is_whole) == ([2, 3, first, first + 1, first + 2], True)
    assert Counter(row["place"] for row in rows) == {"tail": 2, "table": 3}
    assert len(engine.seqs(broker)) == 6


def test_messages_that_became_due_are_not_pending_after_their_release(engine: Engine, tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "d", clock, compact_rows=0) as node, Endpoint(node.endpoint) as broker:
        send(node.endpoint, 10, after_ms=HOUR_MS)
        node.run(node.broker.compact())
        assert len(engine.seqs(broker)) == 10
        clock.advance(6 * HOUR_MS)  # the messages are due after 1, 2, … 10 hours
        with node.client() as ball:
            eventually(lambda: visible(ball, "orders") == 6, "six messages are released")
        assert len(engine.seqs(broker)) == 4
        assert len(engine.seqs(broker, Snapshot.pin(broker, upcoming=True))) == 4


def test_version_number_gives_the_same_snapshot_before_and_after_newer_versions(
    engine: Engine, node: RunningNode, broker: Endpoint
) -> None:
    send(node.endpoint, 5)
    node.run(node.broker.compact())
    send(node.endpoint, 3)
    node.run(node.broker.cancel(seqs=[2]))
    assert engine.seqs(broker, Snapshot.pin(broker, version=1)) == [2, 3, 4, 5, 6]
    node.run(node.broker.compact())
    assert engine.seqs(broker, Snapshot.pin(broker, version=1)) == [2, 3, 4, 5, 6]
    assert len(engine.seqs(broker)) == 7


def test_snapshot_during_moves_hides_and_repeats_no_message(node: RunningNode, broker: Endpoint) -> None:
    stop, sent = threading.Event(), 0

    def send_and_compact() -> None:
        """Send 100 messages and compact, again and again until `stop`."""
        nonlocal sent
        with node.client() as ball:
            while not stop.is_set():
                ball.send_many([{"topic": "t", "body": b"x", "delay_ms": DAY_MS}] * 100)
                sent += 100
                ball.compact()

    thread = threading.Thread(target=send_and_compact)
    thread.start()
    try:
        for _ in range(10):
            sent_before = sent
            assert sent_before <= len(DUCKDB.seqs(broker)) <= sent + 100
    finally:
        stop.set()
        thread.join()
    # The control: the watermark with the table version before it hides the messages of the last compaction.
    status = status_with_all_attaches(broker)
    wrong_status = msgspec.structs.replace(
        status, table=msgspec.structs.replace(status.table, version=status.table.version - 1)
    )
    assert len(DUCKDB.seqs(broker, Snapshot.of(wrong_status, status.table.uri, 0))) == sent - 100


def test_cancel_removed_by_retention_is_read_from_the_ledger(engine: Engine, tmp_path: Path) -> None:
    with running_node(tmp_path / "d", segment_bytes=MIB) as node, Endpoint(node.endpoint) as broker:
        send(node.endpoint, 10)
        node.run(node.broker.compact())
        node.run(node.broker.cancel(seqs=[3, 4]))
        uri = broker.status().table.uri
        with SqlSession(node.endpoint) as session:
            columns = ", ".join(EVENT_SCHEMA.names)
            events = session.run(f"select {columns} from ledger").rows.read_all().cast(EVENT_SCHEMA)
        fill_segment(node)
        node.run(node.broker.compact())
        node.run(node.node.maintenance.checkpoint())
        assert apply_retention(node) > 14
        # The control: the log has no CANCEL rows any more, and the cancelled messages are still in the table.
        assert engine.seqs(broker) == list(range(2, 12))
        write_deltalake(sibling(uri, "ledger"), events)
        for upcoming in (False, True):
            assert engine.seqs(broker, Snapshot.pin(broker, upcoming=upcoming)) == [2, 5, 6, 7, 8, 9, 10, 11]
        # This version is older than the cancels and than the first row of the kept log.
        older = Snapshot.pin(broker, version=1)
        assert (engine.seqs(broker, older), older.is_whole) == (list(range(2, 12)), False)


def test_a_gap_between_ledger_and_log_is_refused(tmp_path: Path) -> None:
    """The ledger was not extended for longer than retention keeps rows. Without the error, events would be missing."""
    with running_node(tmp_path / "d", segment_bytes=MIB) as node, Endpoint(node.endpoint) as broker:
        send(node.endpoint, 5)
        node.run(node.broker.compact())
        mark = broker.status().log.durable_seq
        uri = sibling(broker.status().table.uri, "ledger")
        ledger.extend(InProcessEngine(), node.endpoint, uri, mark)
        node.run(node.broker.cancel(seqs=[3]))
        fill_segment(node)
        node.run(node.broker.compact())
        first = apply_retention(node)
        gap = f"the ledger ends at row {mark}, the log begins at {first}: events are lost; move .*{uri}"
        with SqlSession(node.endpoint) as session:
            for view in ("ledger", "scheduled"):
                with pytest.raises(OutOfRange, match=gap):
                    session.run(f"select * from {view}")
            assert len(session.run("select * from pending").rows.read_all()) == 5
        with SqlSession(node.endpoint, version=1) as session:  # this version ends at the ledger's mark
            assert session.run("select * from ledger").rows.read_all().num_rows == 5
        shutil.rmtree(uri)
        with SqlSession(node.endpoint) as session:
            assert session.run("select * from ledger").rows.read_all().num_rows == 0


# ---- versions and files -------------------------------------------------------------------------------------


def test_status_with_all_attaches_does_not_wait_for_a_reservation(
    node: RunningNode, broker: Endpoint
) -> None:
    send(node.endpoint, 3)
    node.run(node.broker.compact())
    reserved = broker.reserve(5)  # a TABLE row that makes no version of the table
    status = status_with_all_attaches(broker)
    assert (status.table.version, status.watermark) == (1, 5)
    batches = broker.read_log(1, status.log.durable_seq, [Kind.TABLE])
    assert sum(batch.num_rows for batch in batches) == 2, "the attach and the reservation"
    assert table_row_of_version(status.table.uri, 1) == reserved - 2
    assert table_row_of_version(status.table.uri, 0) == 0


def test_status_of_a_version_ends_at_its_table_row(node: RunningNode, broker: Endpoint) -> None:
    for _ in range(2):
        send(node.endpoint, 3)
        node.run(node.broker.compact())
    current = status_with_all_attaches(broker)
    status, is_whole = status_of_version(broker, current, current.table.uri, 1)
    assert is_whole and (status.table.version, status.watermark, status.log.durable_seq) == (1, 5, 6)
    empty, _ = status_of_version(broker, current, current.table.uri, 0)
    assert (empty.watermark, empty.log.durable_seq) == (1, 1)
    with pytest.raises(NotFound, match="there are 0 to 2"):
        status_of_version(broker, current, current.table.uri, 3)


@pytest.mark.parametrize(
    ("due", "may_hold"),
    [((201, None), False), ((200, None), True), ((None, 100), False), ((None, 101), True)],
)
def test_a_file_may_hold_rows_within_its_bounds_of_due_times(due: Due, may_hold: bool) -> None:
    assert TableFile("p", 1, 1, min_due_ms=100, max_due_ms=200).may_hold(due) == may_hold
    assert TableFile("p", 1, 1, min_due_ms=None, max_due_ms=None).may_hold(due), "the bounds are unknown"


def test_unreachable_table_missing_version_and_deleted_file_raise_different_errors(
    node: RunningNode, broker: Endpoint, tmp_path: Path
) -> None:
    send(node.endpoint, 3)
    node.run(node.broker.compact())
    with pytest.raises(SetupError, match="run this where the broker's data folder is"):
        Snapshot.pin(broker, table_uri=str(tmp_path / "elsewhere"))
    uri = broker.status().table.uri
    with pytest.raises(NotFound, match="no version 7"):
        open_version(uri, 7)
    with pytest.raises(OutOfRange, match="has gone meanwhile"):
        list(read_files(uri, ["bucket=x/gone.parquet"], ["seq"], ds.field("seq") > 0))
    # If a file is deleted between the snapshot and the query, the query fails. It does not return fewer rows.
    shot = Snapshot.pin(broker)
    for file in Path(uri.removeprefix("file://")).rglob("*.parquet"):
        file.unlink()
    with pytest.raises(OutOfRange, match="has gone meanwhile"):
        DUCKDB.seqs(broker, shot)


@pytest.mark.parametrize("module", ["duckdb_session", "forecast"])
def test_snapshot_does_not_import_spark(module: str) -> None:
    code = f"import sys, timeball.spark.views.{module}; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
