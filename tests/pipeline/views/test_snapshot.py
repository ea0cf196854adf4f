"""Tests of timeball.pipeline.views.snapshot: what waits, wherever it lies, on a real broker; no Spark."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from tests.node_fixture import RunningNode, eventually, running_node
from tests.pipeline.traffic import send, send_due_now, visible
from tests.written_again import fill_segment, let_go, write_again

from timeball import Timeball
from timeball.clock import ManualClock
from timeball.config import MIB
from timeball.errors import NotFound, OutOfRange, SetupError
from timeball.limits import DAY_MS, HOUR_MS
from timeball.message import TABLE_SCHEMA
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.source import promise_columns
from timeball.pipeline.table_store import Store, sibling
from timeball.pipeline.views.log_events import EVENT_SCHEMA, read_events
from timeball.pipeline.views.snapshot import Snapshot, TableFile, read_files
from timeball.pipeline.views.table_version import settled_status
from timeball.table.attachment import Attachment


def seqs(snapshot: Snapshot, **bounds: tuple[int | None, int | None]) -> list[int]:
    found = [seq for rows in snapshot.batches(["seq"], **bounds) for seq in rows.column("seq").to_pylist()]
    assert len(found) == len(set(found)), "a promise is there once"
    return sorted(found)


def places(snapshot: Snapshot) -> dict[str, int]:
    counts: dict[str, int] = {}
    for place, rows in snapshot.places(["seq"]):
        counts[place] = counts.get(place, 0) + rows.num_rows
    return counts


def send_level(node: RunningNode, level: int) -> int:
    row = {"topic": ["orders"], "body": [b"level"], "delay_level": pa.array([level], pa.int32())}
    return node.run(node.broker.send(pa.record_batch(row))).first_seq


def test_everything_that_waits_is_there_once_wherever_it_lies(node: RunningNode, broker: Endpoint) -> None:
    assert seqs(Snapshot.take(broker)) == []
    send(node.endpoint, 10)  # 1..10
    node.run(node.broker.compact())
    send_due_now(node.endpoint, 3)
    kept = send_level(node, 18)
    with Timeball(node.endpoint) as ball:
        sent = ball.send("orders", b"tail", after="1d", tag="blue")
        gone = ball.send("orders", b"tail", after="1d")
        assert [each.verdict for each in ball.cancel(ids=[gone.id])] == ["cancelled"]
        node.run(node.broker.cancel(seqs=[4]))
    snapshot = Snapshot.take(broker)
    assert seqs(snapshot) == [1, 2, 3, 5, 6, 7, 8, 9, 10, kept, sent.seq]
    assert places(snapshot) == {"tail": 1, "table": 9, "level": 1}
    assert {4, gone.seq} <= set(snapshot.settled().tolist())
    assert len(snapshot.settled()) == 5
    # Promises due after now cannot have been released: the same with only the cancels read.
    upcoming = Snapshot.take(broker, upcoming=True)
    assert seqs(upcoming) == seqs(snapshot)
    assert upcoming.settled().tolist() == [4, gone.seq]


def test_all_columns_of_the_table_and_the_topic_that_a_level_hides(
    node: RunningNode, broker: Endpoint
) -> None:
    send(node.endpoint, 2)
    node.run(node.broker.compact())
    level = send_level(node, 18)
    with Timeball(node.endpoint) as ball:
        tail = ball.send("mail", b"x", after="1d")
    rows = pa.Table.from_batches(list(Snapshot.take(broker).batches()))
    assert rows.schema == TABLE_SCHEMA
    found = {row["seq"]: row for row in rows.to_pylist()}
    assert {seq: row["topic"] for seq, row in found.items()} == {
        1: "orders", 2: "orders", level: "orders", tail.seq: "mail",
    }  # fmt: skip
    assert found[level]["queue_id"] == -1
    assert all(row["accepted_ms"] > 0 and row["due_ms"] > row["accepted_ms"] for row in found.values())
    some = next(Snapshot.take(broker).batches(["body", "due_ms"]))
    assert some.schema.names == ["body", "due_ms"]


def test_bounds_of_the_instant(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 100)
    node.run(node.broker.compact())
    send(node.endpoint, 20)
    snapshot = Snapshot.take(broker)
    due = np.concatenate([rows.column("due_ms").to_numpy() for rows in snapshot.batches(["due_ms"])])
    low, high = int(np.sort(due)[20]), int(np.sort(due)[60])
    inside = ((due >= low) & (due < high)).sum()
    assert len(seqs(snapshot, due=(low, high))) == inside
    assert len(seqs(snapshot, due=(low, None))) == (due >= low).sum()
    assert seqs(snapshot, due=(None, 0)) == []
    # Files that cannot hold such a row are not opened at all.
    assert 0 < len(snapshot.files((low, low + HOUR_MS))) < len(snapshot.files()) or len(snapshot.files()) == 1
    assert snapshot.files((None, 0)) == []


def test_statistics_rule_files_out() -> None:
    file = TableFile("p", 1, 1, 100, 200)
    assert [file.may_hold(due) for due in ((201, None), (200, None), (None, 100), (None, 101))] == [
        False, True, False, True,
    ]  # fmt: skip
    assert TableFile("p", 1, 1, None, None).may_hold((1, 2))


def test_a_promise_written_again_waits_once_also_when_its_rows_have_gone(tmp_path: Path) -> None:
    with running_node(tmp_path / "d", segment_bytes=MIB) as node, Endpoint(node.endpoint) as broker:
        with Timeball(node.endpoint) as ball:
            ball.send_many([{"topic": "t", "body": b"x", "delay_ms": DAY_MS} for _ in range(10)])
        again = write_again(node, 1, 2, 3)
        write_again(node, again[2])
        assert seqs(Snapshot.take(broker)) == list(range(1, 11))
        fill_segment(node)
        write_again(node, 1, 3, 4, 5)
        write_again(node, 1)
        assert let_go(node) > 10
        rows = pa.Table.from_batches(list(Snapshot.take(broker).batches(["seq", "topic", "accepted_ms"])))
        # The control: those that were not written again have gone with their rows.
        assert sorted(rows.column("seq").to_pylist()) == [1, 3, 4, 5]
        assert min(rows.column("accepted_ms").to_pylist()) > 0


def test_an_older_version_is_what_waited_when_it_was_made(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 5)  # 1..5
    node.run(node.broker.compact())
    first = broker.status().table.version
    send(node.endpoint, 3)
    node.run(node.broker.compact())
    second = Snapshot.take(broker)
    node.run(node.broker.cancel(seqs=[1, 2]))
    later = node.run(
        node.broker.send(pa.record_batch({"topic": ["t"], "body": [b"x"], "delay_ms": [DAY_MS]}))
    )
    assert seqs(Snapshot.take(broker, version=first)) == [1, 2, 3, 4, 5]
    assert seqs(Snapshot.take(broker, version=0)) == []
    assert len(seqs(second)) == 8
    # The version's own moment: what came later is not in it, what has gone since still is.
    now = seqs(Snapshot.take(broker))
    assert 1 not in now and later.first_seq in now and len(now) == 7
    with pytest.raises(NotFound, match="no version 99"):
        Snapshot.take(broker, version=99)


def attach(broker: Endpoint, rows: int) -> int:
    """A bulk attach, as Spark's writer makes it; the first number."""
    status = broker.status()
    due = [status.now_ms + 30 * DAY_MS] * rows
    given = pa.table({"topic": ["bulk"] * rows, "body": ["b"] * rows, "due_ms": due})
    first = broker.reserve(rows)
    table = promise_columns.numbered(promise_columns.normalise(given, status.now_ms), first)
    files = list(Store(status.table.uri).put_rows(table, status.now_ms))
    broker.attach(Attachment(job="bulk", job_id=f"job-{first}", epoch=0, files=files, ranges=[(first, rows)]))
    return first


def test_an_older_version_has_the_tail_of_then(node: RunningNode, broker: Endpoint) -> None:
    """A bulk attach makes a version while other promises are in the log only."""
    send(node.endpoint, 2)  # 1, 2
    first = attach(broker, 3)
    send(node.endpoint, 1)
    node.run(node.broker.compact())
    assert broker.status().table.version == 2
    then = Snapshot.take(broker, version=1)
    assert (seqs(then), then.is_whole) == ([1, 2, first, first + 1, first + 2], True)
    assert places(then) == {"tail": 2, "table": 3}
    assert len(seqs(Snapshot.take(broker))) == 6


def test_a_clock_that_stands_still_releases_nothing_and_a_late_promise_waits(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "d", clock, compact_self=False) as node, Endpoint(node.endpoint) as broker:
        send(node.endpoint, 10, after_ms=HOUR_MS)
        node.run(node.broker.compact())
        assert len(seqs(Snapshot.take(broker))) == 10
        clock.advance(HOUR_MS + 5 * HOUR_MS)
        with Timeball(node.endpoint) as ball:
            eventually(lambda: visible(ball, "orders") == 6, "six hours are over")
        assert len(seqs(Snapshot.take(broker))) == 4
        assert len(seqs(Snapshot.take(broker, upcoming=True))) == 4


def test_a_named_version_means_the_same_as_long_as_it_is_the_newest_and_after(
    node: RunningNode, broker: Endpoint
) -> None:
    send(node.endpoint, 5)
    node.run(node.broker.compact())
    send(node.endpoint, 3)
    node.run(node.broker.cancel(seqs=[1]))
    assert seqs(Snapshot.take(broker, version=1)) == [1, 2, 3, 4, 5]
    node.run(node.broker.compact())
    assert seqs(Snapshot.take(broker, version=1)) == [1, 2, 3, 4, 5]
    assert len(seqs(Snapshot.take(broker))) == 7


def test_while_promises_move_none_is_hidden_or_there_twice(node: RunningNode, broker: Endpoint) -> None:
    stop, sent = threading.Event(), [0]

    def work() -> None:
        with Timeball(node.endpoint) as ball:
            while not stop.is_set():
                ball.send_many([{"topic": "t", "body": b"x", "delay_ms": DAY_MS}] * 100)
                sent[0] += 100
                ball.compact()

    mover = threading.Thread(target=work)
    mover.start()
    try:
        for _ in range(10):
            least = sent[0]
            assert least <= len(seqs(Snapshot.take(broker))) <= sent[0] + 100
    finally:
        stop.set()
        mover.join()
    # The control: the watermark of one moment and the table of another hide what was moved in between.
    status = settled_status(broker)
    torn = msgspec.structs.replace(
        status, table=msgspec.structs.replace(status.table, version=status.table.version - 1)
    )
    assert len(seqs(Snapshot(broker, torn, uri=status.table.uri, due_from_ms=0))) == sent[0] - 100


def test_a_cancel_that_retention_let_go_is_known_from_the_ledger(tmp_path: Path) -> None:
    with running_node(tmp_path / "d", segment_bytes=MIB) as node, Endpoint(node.endpoint) as broker:
        send(node.endpoint, 10)
        node.run(node.broker.compact())
        node.run(node.broker.cancel(seqs=[2, 3]))
        status = broker.status()
        events = pa.Table.from_batches(list(read_events(broker, 1, status.log.durable_seq)), EVENT_SCHEMA)
        fill_segment(node)
        node.run(node.broker.compact())
        node.run(node.node.upkeep.checkpoint())
        assert let_go(node) > 14
        # The control: the log has forgotten that they were cancelled, and their rows are still in the table.
        assert seqs(Snapshot.take(broker)) == list(range(1, 11))
        write_deltalake(sibling(status.table.uri, "ledger"), events)
        for upcoming in (False, True):
            assert seqs(Snapshot.take(broker, upcoming=upcoming)) == [1, 4, 5, 6, 7, 8, 9, 10]
        then = Snapshot.take(
            broker, version=1
        )  # was made before they were cancelled, and before the log begins
        assert (seqs(then), then.is_whole) == (list(range(1, 11)), False)


def test_a_table_out_of_reach_is_told(node: RunningNode, broker: Endpoint, tmp_path: Path) -> None:
    send(node.endpoint, 3)
    node.run(node.broker.compact())
    with pytest.raises(SetupError, match="run this where the broker's data folder is"):
        Snapshot.take(broker, table_uri=str(tmp_path / "elsewhere"))
    uri = broker.status().table.uri
    with pytest.raises(OutOfRange, match="has gone meanwhile"):
        list(read_files(uri, ["bucket=x/gone.parquet"], ["seq"]))


@pytest.mark.parametrize("module", ["snapshot", "duckdb_session"])
def test_no_spark_is_needed(module: str) -> None:
    code = f"import sys, timeball.pipeline.views.{module}; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
