"""Ledger, archive and pending table in an object store that answers late, not at all, or wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from deltalake.exceptions import DeltaError
from tests.node_fixture import RunningNode, eventually, running_node
from tests.rounds import only_in_a_siege
from tests.s3_fixtures import proxy as proxy
from tests.s3_fixtures import server as server
from tests.s3_server import BUCKET, Fault, FaultyStore
from tests.spark.traffic import send, send_due_now, visible

from timeball.io.clock import ManualClock
from timeball.model.errors import NotFound, OutOfRange, StorageError
from timeball.model.limits import HOUR_MS
from timeball.model.message import Kind
from timeball.spark.jobs import archive
from timeball.spark.jobs.archive import FILE_SCHEMA
from timeball.spark.log_events import ARCHIVE_SCHEMA, LEDGER_APP_ID
from timeball.spark.run.runner import Board, JobStatus, read_statuses, run
from timeball.spark.table_store import (
    Store,
    app_version,
    append_once,
    as_dataset,
    create_table,
    open_table,
    write_file,
)
from timeball.spark.views.duckdb_session import SqlSession

RUN_S = 120
SCHEMA = pa.schema([("a", pa.int64())])


@pytest.fixture
def store(proxy: FaultyStore) -> FaultyStore:
    return proxy


@dataclass
class Rows:
    """A Delta table of numbers. Each write appends one, with the number as the application's version."""

    uri: str

    def write(self, number: int) -> None:
        written = write_file(self.uri, SCHEMA, [pa.record_batch({"a": [number]})])
        append_once(self.uri, "app", number - 1, number, [written])

    def read(self) -> list[int]:
        return sorted(as_dataset(open_table(self.uri), SCHEMA).to_table()["a"].to_pylist())


@pytest.fixture
def rows(store: FaultyStore) -> Rows:
    """A new table in the object store, with its first row."""
    result = Rows(f"s3a://{BUCKET}/{uuid.uuid4().hex}/rows")
    with pytest.raises(NotFound, match="no Delta table"):
        open_table(result.uri)
    create_table(result.uri, SCHEMA)
    result.write(1)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "method", "part"),
    [
        ("slow", "PUT", "_delta_log"),
        ("slow", "GET", "_delta_log"),
        ("unavailable", "PUT", "_delta_log"),
        ("unavailable", "PUT", ".parquet"),
        ("unavailable", "GET", "_delta_log"),
        ("lost_answer", "PUT", "_delta_log"),
        ("lost_answer", "PUT", ".parquet"),
    ],
)
def test_each_row_is_stored_once_with_a_faulty_store(
    rows: Rows, store: FaultyStore, fault: Fault, method: str, part: str
) -> None:
    made = store.break_next(fault, method, part)
    try:
        rows.write(2)
    except OutOfRange:  # a job then reads the table's mark and continues there
        assert app_version(open_table(rows.uri), "app") == 2
    assert made.seen == 1
    rows.write(3)
    assert rows.read() == [1, 2, 3]


@pytest.mark.slow
def test_stale_listing_hides_and_repeats_no_row(rows: Rows, store: FaultyStore) -> None:
    rows.write(2)
    made = store.break_next("stale_list", "GET", "00000000000000000002", times=100)
    with pytest.raises(OutOfRange, match="planned again"):
        rows.write(2)  # as a job does that has read version 1
    assert made.seen > 0
    store.heal()
    rows.write(3)
    assert rows.read() == [1, 2, 3]


@pytest.mark.slow
def test_a_commit_with_a_stale_listing_does_not_overwrite_another(rows: Rows, store: FaultyStore) -> None:
    assert _race(rows, store) == [1, 2]


@pytest.mark.slow
def test_store_without_conditional_puts_is_detected(rows: Rows, store: FaultyStore) -> None:
    """The control of the tests above: a put that overwrites a commit loses a row."""
    made = store.break_next("unconditional", "PUT", "_delta_log", times=100)
    assert _race(rows, store) != [1, 2]
    assert made.seen > 0


def _race(rows: Rows, store: FaultyStore) -> list[int]:
    """Commit for two applications at once. The second does not know the commit of the first.

    Returns the rows of the first application, which are [1, 2] unless the second overwrote its commit.
    """
    rows.write(2)
    written = write_file(rows.uri, SCHEMA, [pa.record_batch({"a": [7]})])
    stale = store.break_next("stale_list", "GET", "00000000000000000002", times=100)
    with suppress(OutOfRange, DeltaError):  # it may be refused, but the row of the first commit must stay
        append_once(rows.uri, "other", None, 1, [written])
    assert stale.seen
    store.heal()
    return [number for number in rows.read() if number < 7]


@pytest.mark.slow
def test_silent_store_does_not_count_as_a_missing_table(rows: Rows, store: FaultyStore) -> None:
    store.break_next("unavailable", "GET", "", times=10**6)
    with pytest.raises(StorageError, match=f"cannot read the Delta table at {rows.uri}"):
        open_table(rows.uri)
    store.heal()
    assert rows.read() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost_answer", "slow"])
def test_the_archive_keeps_the_files_of_a_commit_whose_answer_was_lost(
    store: FaultyStore, fault: Fault
) -> None:
    uri = f"s3://{BUCKET}/{uuid.uuid4().hex}/archive"
    create_table(uri, ARCHIVE_SCHEMA, partition_by=["day"])
    message = {"seq": 5, "kind": int(Kind.MESSAGE), "topic": "orders", "body": b"x", "store_ms": 1}
    part = pa.Table.from_pylist([message], FILE_SCHEMA)
    files = list(archive.write_archive_files(Store(uri), part))
    made = store.break_next(fault, "PUT", "_delta_log")
    archive.commit_epoch(uri, 0, 10, files)
    assert made.seen == 1
    result = as_dataset(open_table(uri), ARCHIVE_SCHEMA).to_table()
    assert result["seq"].to_pylist() == [5]
    assert app_version(open_table(uri), archive.APP_ID) == 10


@pytest.mark.slow
def test_jobs_leave_their_status_beside_a_checkpoint_there(store: FaultyStore) -> None:
    folder = f"s3a://{BUCKET}/checkpoints"
    Board(folder).write_status(JobStatus(job="ledger", state="running", updated_ms=1, started_ms=1), 0)
    assert [each.job for each in read_statuses(folder)] == ["ledger"]


@pytest.fixture
def node(store: FaultyStore, tmp_path: Path) -> Iterator[RunningNode]:
    """A broker whose pending table is in the object store, too."""
    uri = f"s3a://{BUCKET}/{uuid.uuid4().hex}/pending"
    with running_node(tmp_path / "data", table=uri, compact_rows=0) as running:
        yield running


@pytest.fixture
def on_s3(node: RunningNode, store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put the node's ledger and archive into the store, and make events for them. Returns the folder of both."""
    folder = f"s3a://{BUCKET}/{uuid.uuid4().hex}"
    monkeypatch.setenv("TIMEBALL_LEDGER", f"{folder}/{{group}}ledger")
    monkeypatch.setenv("TIMEBALL_ARCHIVE", f"{folder}/{{group}}archive")
    send(node.endpoint, 20)
    send_due_now(node.endpoint, 5)
    with node.client() as ball:
        ball.cancel(ball.send("orders", b"x", after="1d").id)
    return folder


@pytest.mark.slow
def test_without_spark_the_jobs_write_there_and_sql_reads_it(
    node: RunningNode, on_s3: str, tmp_path: Path
) -> None:
    run(["ledger", "archive"], with_spark=False, endpoint=node.endpoint, once=True)
    assert not (tmp_path / "data/ledger").exists()
    passed = as_dataset(open_table(f"{on_s3}/archive"), ARCHIVE_SCHEMA).to_table()
    assert sorted(passed["body"].to_pylist()) == [f"now {i}".encode() for i in range(5)]
    with SqlSession(node.endpoint) as session:
        counted = session.run("select (select count(*) from ledger) l, (select count(*) from archive) a")
        assert counted.rows.read_all().to_pylist() == [{"l": 32, "a": 5}]
        assert session.run("select count(*) n from pending").rows.read_all()["n"].to_pylist() == [20]


def command(*words: str) -> str:
    """Run a command in a separate process: Spark's workers have the environment in which the JVM was started."""
    ended = subprocess.run(
        [sys.executable, "-m", "timeball", *words],
        capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def answer(*words: str) -> dict[str, Any]:
    return dict(json.loads(command(*words, "--json").strip().splitlines()[-1]))


@pytest.mark.spark
def test_commands_with_spark_read_what_lies_there(node: RunningNode, on_s3: str, tmp_path: Path) -> None:
    at = ("--endpoint", node.endpoint)
    jobs = ("compact", "ledger", "archive")
    command("pipeline", "run", *jobs, "--once", "--checkpoint", str(tmp_path / "c"), *at)
    with node.client() as ball:
        table = ball.status()["table"]
    # The one that was cancelled may go along: the log settles it.
    compacted = open_table(table["uri"], table["version"]).to_pyarrow_table().num_rows
    assert compacted in (20, 21)
    assert app_version(open_table(f"{on_s3}/ledger"), LEDGER_APP_ID) > 1
    report = answer("audit", *at)
    assert report["ok"] and (report["accepted"], report["released"], report["cancelled"]) == (26, 5, 1)
    now = datetime.now(UTC)
    window = ("--from", (now - timedelta(days=1)).isoformat(), "--until", now.isoformat(), "--shift", "30d")
    assert answer("replay", *window, "--yes", *at)["rows"] == 5
    assert open_table(table["uri"]).to_pyarrow_table().num_rows == compacted + 5


# One process for several commands: a JVM is most of what each of them takes.
COMMANDS = """
import sys
from timeball.cli.main import main
for line in sys.stdin:
    try:
        main(line.split())
    except SystemExit as end:
        print(f"ended {end.code}", flush=True)
"""


class Commands:
    """A process that runs one command after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def answer(self, *words: str) -> dict[str, Any]:
        """Run a command. Returns its JSON output."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(*words, "--json", file=self._process.stdin, flush=True)
        said = list(iter(self._process.stdout.readline, "ended 0\n"))
        return dict(json.loads(said[-1]))


@pytest.fixture
def commands(store: FaultyStore) -> Iterator[Commands]:
    """A process that runs COMMANDS, killed after the test."""
    command = [sys.executable, "-c", COMMANDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Commands(process)
        finally:
            process.kill()


@pytest.mark.siege
@only_in_a_siege
@pytest.mark.slow
@pytest.mark.spark
def test_a_bulk_job_writes_there_and_what_it_wrote_is_released_and_cancelled(
    store: FaultyStore, commands: Commands, tmp_path: Path
) -> None:
    now = datetime.now(UTC)
    due = [now + (timedelta(minutes=30) if number < 100 else timedelta(days=40)) for number in range(400)]
    names = [f"c{number}" for number in range(400)]
    parquet.write_table(pa.table({"due": due, "body": names, "customer": names}), tmp_path / "in.parquet")
    uri, clock = f"s3a://{BUCKET}/{uuid.uuid4().hex}/pending", ManualClock(int(now.timestamp() * 1_000))
    with running_node(tmp_path / "data", clock, table=uri, compact_rows=0) as node:
        at = ("--endpoint", node.endpoint)
        lost = store.break_next("lost_answer", "PUT", ".parquet")
        words = ("bulk", str(tmp_path / "in.parquet"), "--topic", "reminders", "--key-column", "customer")
        done = commands.answer(*words, *at)
        assert (done["rows"], done["rejected"], lost.seen) == (400, 0, 1)
        with node.client() as ball:
            ends = [ball.cancel(key=key)[0].verdict for key in ("c399", "c399", "c7", "none")]
            assert ends == ["cancelled", "already_cancelled", "cancelled", "not_found"]
            clock.advance(HOUR_MS)
            eventually(lambda: visible(ball, "reminders") == 99, "what was due is released")
        report = commands.answer("audit", *at)
        assert report["ok"]
        ends = [
            report[name] for name in ("accepted", "released", "cancelled", "pending", "lost", "duplicate")
        ]
        assert ends == [400, 99, 2, 299, 0, 0]
