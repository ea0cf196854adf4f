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
from tests.written_again import fill_segment, let_go, write_again

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
    """Reads the pending messages of a snapshot with one of the two engines."""

    def __init__(self, rows: Callable[[str, Snapshot, Due], list[Row]]) -> None:
        self.rows_at = rows

    def rows(self, broker: Endpoint, shot: Snapshot | None = None, due: Due = ANY_DUE_TIME) -> list[Row]:
        result = self.rows_at(broker.uri, shot or Snapshot.pin(broker), due)
        assert len(result) == len({row["seq"] for row in result}), "a scheduled message is there once"
        return sorted(result, key=lambda row: row["seq"])

    def seqs(self, broker: Endpoint, shot: Snapshot | None = None, due: Due = ANY_DUE_TIME) -> list[int]:
        return [row["seq"] for row in self.rows(broker, shot, due)]


def by_duckdb(endpoint: str, shot: Snapshot, due: Due) -> list[Row]:
    with SqlSession(endpoint, snapshot=shot, due=due) as session:
        columns = ", ".join([*PENDING_COLUMNS, "place"])
        result: list[Row] = session.run(f"select {columns} from pending").rows.read_all().to_pylist()
    return result


@pytest.fixture(params=["duckdb", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.timeout(600)])])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "duckdb":
        return Engine(by_duckdb)
    from timeball.spark.views import spark_views

    spark = request.getfixturevalue("spark")

    def by_spark(endpoint: str, shot: Snapshot, due: Due) -> list[Row]:
        result = spark_views.pending_in_snapshot(spark, endpoint, shot, due=due).collect()
        return [{**row.asDict(), "body": bytes(row.body)} for row in result]

    return Engine(by_spark)


DUCKDB = Engine(by_duckdb)


def send_level(node: RunningNode, level: int) -> int:
    row = {"topic": ["orders"], "body": [b"level"], "delay_level": pa.array([level], pa.int32())}
    return node.run(node.broker.send(pa.record_batch(row))).first_seq


def test_snapshot_has_each_pending_message_once(engine: Engine, node: RunningNode, broker: Endpoint) -> None:
    assert engine.seqs(broker) == []
    send(node.endpoint, 10)  # 2..11, behind the topic
    node.run(node.broker.compact())
    send_due_now(node.endpoint, 3)
    kept = send_level(node, 18)
    with node.client() as ball:
        sent = ball.send("mail", b"tail", after="1d", tag="blue")
        deleted = ball.send("orders", b"tail", after="1d")
        assert [each.verdict for each in ball.cancel(ids=[deleted.id])] == ["cancelled"]
        node.run(node.broker.cancel(seqs=[4]))
    rows = engine.rows(broker)
    assert [row["seq"] for row in rows] == [2, 3, 5, 6, 7, 8, 9, 10, 11, kept, sent.seq]
    assert Counter(row["place"] for row in rows) == {"tail": 1, "table": 9, "level": 1}
    result = {row["seq"]: row for row in rows}
    # One of a level stands in the log under the topic and queue it waits in, not the ones it is for.
    assert (result[kept]["topic"], result[kept]["queue_id"]) == ("orders", -1)
    assert (result[sent.seq]["topic"], result[sent.seq]["tag"], result[sent.seq]["body"]) == (
        "mail",
        "blue",
        b"tail",
    )
    assert all(row["accepted_ms"] > 0 and row["due_ms"] > row["accepted_ms"] for row in rows)
    # Scheduled messages due after now cannot have been released: the same with only the cancels read.
    assert engine.seqs(broker, Snapshot.pin(broker, upcoming=True)) == [row["seq"] for row in rows]


def test_half_message_committed_with_a_delay_is_pending_under_its_number(
    engine: Engine, node: RunningNode, broker: Endpoint
) -> None:
    filed = [commit_half(node, delay_ms=HOUR_MS) for _ in range(2)]
    node.run(node.broker.compact())
    tail = commit_half(node, delay_ms=HOUR_MS)
    level, moved, deleted = (commit_half(node, delay_level=18) for _ in range(3))
    for seq in (filed[1], moved):
        assert node.run(node.broker.reschedule(seqs=[seq], delay_ms=DAY_MS))[0].verdict == "rescheduled"
    assert node.run(node.broker.cancel(seqs=[deleted]))[0].verdict == "cancelled"
    rows = engine.rows(broker)
    assert [(row["seq"], row["place"]) for row in rows] == [
        (filed[0], "table"), (filed[1], "tail"), (tail, "tail"), (level, "level"), (moved, "tail"),
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
        assert let_go(node) > 10
        rows = engine.rows(broker)
        # The control: those that were not written again have gone with their rows.
        assert [row["seq"] for row in rows] == [2, 4, 5, 6]
        assert min(row["accepted_ms"] for row in rows) > 0


def test_older_version_has_the_messages_pending_at_its_time(
    engine: Engine, node: RunningNode, broker: Endpoint
) -> None:
    send(node.endpoint, 5)  # 2..6
    node.run(node.broker.compact())
    first = broker.status().table.version
    send(node.endpoint, 3)
    node.run(node.broker.compact())
    second = Snapshot.pin(broker)
    node.run(node.broker.cancel(seqs=[2, 3]))
    later = node.run(
        node.broker.send(pa.record_batch({"topic": ["t"], "body": [b"x"], "delay_ms": [DAY_MS]}))
    )
    assert engine.seqs(broker, Snapshot.pin(broker, version=first)) == [2, 3, 4, 5, 6]
    assert engine.seqs(broker, Snapshot.pin(broker, version=0)) == []
    assert len(engine.seqs(broker, second)) == 8
    # The version's own moment: what came later is not in it, what has gone since still is.
    now = engine.seqs(broker)
    assert 2 not in now and later.first_seq in now and len(now) == 7
    with pytest.raises(NotFound, match="no version 99"):
        Snapshot.pin(broker, version=99)


def attach(broker: Endpoint, rows: int) -> int:
    """Make a bulk attach as Spark's writer does. Returns the first number."""
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
    send(node.endpoint, 2)  # 2, 3
    first = attach(broker, 3)
    send(node.endpoint, 1)
    node.run(node.broker.compact())
    assert broker.status().table.version == 2
    then = Snapshot.pin(broker, version=1)
    rows = engine.rows(broker, then)
    assert ([row["seq"] for row in rows], then.is_whole) == ([2, 3, first, first + 1, first + 2], True)
    assert Counter(row["place"] for row in rows) == {"tail": 2, "table": 3}
    assert len(engine.seqs(broker)) == 6


def test_overdue_message_stays_pending_while_the_clock_stands_still(engine: Engine, tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "d", clock, compact_rows=0) as node, Endpoint(node.endpoint) as broker:
        send(node.endpoint, 10, after_ms=HOUR_MS)
        node.run(node.broker.compact())
        assert len(engine.seqs(broker)) == 10
        clock.advance(HOUR_MS + 5 * HOUR_MS)
        with node.client() as ball:
            eventually(lambda: visible(ball, "orders") == 6, "six hours are over")
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
    stop, sent = threading.Event(), [0]

    def work() -> None:
        with node.client() as ball:
            while not stop.is_set():
                ball.send_many([{"topic": "t", "body": b"x", "delay_ms": DAY_MS}] * 100)
                sent[0] += 100
                ball.compact()

    mover = threading.Thread(target=work)
    mover.start()
    try:
        for _ in range(10):
            least = sent[0]
            assert least <= len(DUCKDB.seqs(broker)) <= sent[0] + 100
    finally:
        stop.set()
        mover.join()
    # The control: the watermark of one moment and the table of another hide what was moved in between.
    status = status_with_all_attaches(broker)
    torn = msgspec.structs.replace(
        status, table=msgspec.structs.replace(status.table, version=status.table.version - 1)
    )
    assert len(DUCKDB.seqs(broker, Snapshot.of(torn, status.table.uri, 0))) == sent[0] - 100


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
        assert let_go(node) > 14
        # The control: the log has forgotten that they were cancelled, and their rows are still in the table.
        assert engine.seqs(broker) == list(range(2, 12))
        write_deltalake(sibling(uri, "ledger"), events)
        for upcoming in (False, True):
            assert engine.seqs(broker, Snapshot.pin(broker, upcoming=upcoming)) == [2, 5, 6, 7, 8, 9, 10, 11]
        then = Snapshot.pin(
            broker, version=1
        )  # was made before they were cancelled, and before the log begins
        assert (engine.seqs(broker, then), then.is_whole) == (list(range(2, 12)), False)


def test_a_gap_between_ledger_and_log_is_refused(tmp_path: Path) -> None:
    """The ledger was not extended for longer than retention keeps rows. Before, these events were left out."""
    with running_node(tmp_path / "d", segment_bytes=MIB) as node, Endpoint(node.endpoint) as broker:
        send(node.endpoint, 5)
        node.run(node.broker.compact())
        mark = broker.status().log.durable_seq
        uri = sibling(broker.status().table.uri, "ledger")
        ledger.extend(InProcessEngine(), node.endpoint, uri, mark)
        node.run(node.broker.cancel(seqs=[3]))
        fill_segment(node)
        node.run(node.broker.compact())
        first = let_go(node)
        gap = f"the ledger ends at row {mark}, the log begins at {first}: events are lost; move .*{uri}"
        with SqlSession(node.endpoint) as session:
            for view in ("ledger", "scheduled"):
                with pytest.raises(OutOfRange, match=gap):
                    session.run(f"select * from {view}")
            assert len(session.run("select * from pending").rows.read_all()) == 5
        with SqlSession(node.endpoint, version=1) as session:  # it ends at the ledger's mark
            assert session.run("select * from ledger").rows.read_all().num_rows == 5
        shutil.rmtree(uri)
        with SqlSession(node.endpoint) as session:
            assert session.run("select * from ledger").rows.read_all().num_rows == 0


# ---- which version, and which files -------------------------------------------------------------------------


def test_status_with_all_attaches_waits_for_the_table(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 3)
    node.run(node.broker.compact())
    reserved = broker.reserve(5)  # no attach, so no version of the table is waited for
    status = status_with_all_attaches(broker)
    assert (status.table.version, status.watermark) == (1, 5)
    attached = [batch.num_rows for batch in broker.read_log(1, status.log.durable_seq, [Kind.TABLE])]
    assert sum(attached) == 2
    assert table_row_of_version(status.table.uri, 1) == reserved - 2
    assert table_row_of_version(status.table.uri, 0) == 0


def test_status_of_a_version_ends_at_its_table_row(node: RunningNode, broker: Endpoint) -> None:
    for _ in range(2):
        send(node.endpoint, 3)
        node.run(node.broker.compact())
    now = status_with_all_attaches(broker)
    then, is_whole = status_of_version(broker, now, now.table.uri, 1)
    assert is_whole and (then.table.version, then.watermark, then.log.durable_seq) == (1, 5, 6)
    empty, _ = status_of_version(broker, now, now.table.uri, 0)
    assert (empty.watermark, empty.log.durable_seq) == (1, 1)
    with pytest.raises(NotFound, match="there are 0 to 2"):
        status_of_version(broker, now, now.table.uri, 3)


def test_statistics_rule_files_out() -> None:
    file = TableFile("p", 1, 1, 100, 200)
    assert [file.may_hold(due) for due in ((201, None), (200, None), (None, 100), (None, 101))] == [
        False, True, False, True,
    ]  # fmt: skip
    assert TableFile("p", 1, 1, None, None).may_hold((1, 2))


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
    # A file that goes between the snapshot and the query fails the query, and never makes it shorter.
    shot = Snapshot.pin(broker)
    for file in Path(uri.removeprefix("file://")).rglob("*.parquet"):
        file.unlink()
    with pytest.raises(OutOfRange, match="has gone meanwhile"):
        DUCKDB.seqs(broker, shot)


@pytest.mark.parametrize("module", ["duckdb_session", "forecast"])
def test_snapshot_does_not_import_spark(module: str) -> None:
    code = f"import sys, timeball.spark.views.{module}; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
