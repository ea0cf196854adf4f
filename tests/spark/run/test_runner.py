"""Tests of timeball.spark.run.runner."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node
from tests.spark.traffic import attached_seqs, send
from tests.spark.two_groups import two_groups

from timeball.io.clock import SystemClock
from timeball.model.errors import (
    InvalidMessage,
    RequestError,
    SetupError,
    StorageError,
    TimeballError,
    Unavailable,
)
from timeball.spark.endpoint import Endpoint
from timeball.spark.run import runner
from timeball.spark.run.runner import (
    ALIVE_EVERY_NS,
    CHANGED_EVERY_NS,
    SILENT_MS,
    Board,
    Epoch,
    Job,
    JobStatus,
    parse_progress,
    read_statuses,
)

SECOND_NS = 1_000_000_000


@pytest.mark.parametrize("jobs", [[], ["compact", "compact"], ["compact", "audit"]])
def test_names_are_checked_before_anything_starts(jobs: list[str]) -> None:
    with pytest.raises(SetupError):
        runner.run(jobs)


def failing(error: Exception) -> Job:
    """Make a job whose start fails with this error."""

    def start() -> None:
        raise error

    return Job("compact", start)  # type: ignore[arg-type]


class FailedQuery:
    """A query that has ended with this failure."""

    isActive, lastProgress = False, None  # noqa: N815 - Spark's names

    def __init__(self, error: Exception) -> None:
        self.error = error

    def exception(self) -> Exception:
        return self.error


def failed(error: Exception) -> Job:
    """Make a job whose query has ended with this failure, and whose start fails with it, too."""
    return Job("compact", failing(error).start, query=FailedQuery(error))  # type: ignore[arg-type]


def test_transient_errors_are_retried_with_growing_pauses() -> None:
    job = failing(Unavailable("away"))
    pauses, now_ns = [], 0
    for _ in range(8):
        job.tick(now_ns, once=False)
        pauses.append((job.wake_ns - now_ns) // SECOND_NS)
        now_ns = job.wake_ns
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    failures = job.failures
    job.tick(now_ns - 1, once=False)
    assert job.failures == failures, "the pause is not over"


@pytest.mark.parametrize(
    "error",
    [StorageError("broken"), SetupError("another log"), RequestError("not here"), Unavailable("away")],
)
def test_job_is_restarted_after_every_failure(error: TimeballError) -> None:
    """Otherwise, for example, the ledger would silently stop growing."""
    job = failing(error)
    job.tick(0, once=False)
    assert (job.state, job.error, job.wake_ns) == ("waiting", str(error), SECOND_NS)


@pytest.mark.parametrize(
    "error", [StorageError("broken"), SetupError("another log"), RequestError("not here")]
)
def test_with_once_a_job_gives_up_at_an_error_that_is_not_transient(error: TimeballError) -> None:
    with pytest.raises(type(error), match=str(error)):
        failing(error).tick(0, once=True)


def test_a_job_gives_up_when_spark_is_lost() -> None:
    """Only a new process has a JVM in which a query can be started."""
    job = failing(Unavailable("Spark failed: Connection refused"))
    job.engine_is_alive = lambda: False
    with pytest.raises(Unavailable, match="Connection refused"):
        job.tick(0, once=False)


def test_a_job_is_starting_then_waiting_after_a_failure_and_done_at_its_end() -> None:
    job = failing(Unavailable("away"))
    assert job.state == "starting"
    job.tick(0, once=False)
    assert (job.state, job.status(7).failures, job.status(7).error) == ("waiting", 1, "away")
    job.done = True
    assert job.status(7).state == "done"


def test_failed_job_reports_failed_and_others_stopped(tmp_path: Path) -> None:
    jobs = [failing(Unavailable("away")), failing(StorageError("broken"))]
    jobs[0].name = "ledger"
    with pytest.raises(StorageError):
        runner._run_until_done(jobs[:], threading.Event(), True, SystemClock(), Board(str(tmp_path)))
    statuses = {each.job: (each.state, each.error) for each in read_statuses(str(tmp_path))}
    assert statuses == {"ledger": ("stopped", "away"), "compact": ("failed", "broken")}


def test_a_lost_spark_fails_every_job(tmp_path: Path) -> None:
    jobs = [failing(Unavailable("o109.lastProgress")) for _ in range(2)]
    for name, job in zip(("ledger", "compact"), jobs, strict=True):
        job.name, job.engine_is_alive = name, lambda: False
    with pytest.raises(Unavailable, match="JVM has ended or was killed"):
        runner._run_until_done(jobs, threading.Event(), False, SystemClock(), Board(str(tmp_path)))
    statuses = {each.job: (each.state, each.error) for each in read_statuses(str(tmp_path))}
    lost = ("failed", "Spark's JVM has ended or was killed: it needs a new process")
    assert statuses == {"ledger": lost, "compact": lost}


def test_with_once_a_job_gives_up_after_tries_once_failures() -> None:
    job = failing(Unavailable("away"))
    with pytest.raises(Unavailable):
        for number in range(100):
            job.tick(number * 100 * SECOND_NS, once=True)
    assert job.failures == runner.TRIES_ONCE


@pytest.mark.parametrize("once", [False, True])
def test_a_job_without_work_ends_before_it_starts_and_logs_the_reason(
    once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = failing(AssertionError("it was started"))
    job.no_work_reason = lambda: "nothing to compact"
    job.tick(0, once=once)
    assert job.done and not job.running
    assert caplog.messages == ["job ended job=compact reason=nothing to compact"]


@pytest.mark.parametrize("error", [RequestError("not here"), InvalidMessage("a row")])
def test_a_job_whose_work_the_broker_refuses_ends_if_it_has_no_work(error: RequestError) -> None:
    """The broker may have been restarted with another strategy since the query was started."""
    job = failed(error)
    job.no_work_reason = lambda: "nothing to compact"
    job.tick(0, once=False)
    assert job.done and not job.running
    with pytest.raises(type(error), match=str(error)):
        failed(error).tick(0, once=True)


def test_a_refused_job_is_restarted_if_the_broker_does_not_answer_whether_there_is_work() -> None:
    def fail() -> str | None:
        raise Unavailable("away")

    job = failed(RequestError("not here"))
    job.no_work_reason = fail
    job.tick(0, once=False)
    assert (job.state, job.error) == ("waiting", "not here")


RUN_WITHOUT_SPARK = """
import sys
from timeball.spark.run import runner
runner.run(["ledger", "archive"], endpoint=sys.argv[1], once=True, with_spark=False)
print([name for name in sys.modules if name.partition(".")[0] in ("pyspark", "py4j")])
"""


def test_without_spark_the_jobs_run_and_pyspark_is_not_imported(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 5)
    env = {**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[3]), "JAVA_HOME": "/nowhere"}
    command = [sys.executable, "-c", RUN_WITHOUT_SPARK, node.endpoint]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr
    data = Path(broker.status().table.uri).parent
    assert (data / "ledger/_delta_log").is_dir() and (data / "archive/_delta_log").is_dir()


def test_a_lost_spark_is_noticed_before_the_query_is_asked() -> None:
    job = failed(Unavailable("the query was asked"))
    job.engine_is_alive = lambda: False
    with pytest.raises(Unavailable, match="JVM has ended"):
        job.tick(0, once=False)


@pytest.mark.smoke
@pytest.mark.spark
def test_once_processes_all_present_rows(
    spark: SparkSession, node: RunningNode, broker: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    send(node.endpoint, 200)
    with caplog.at_level(logging.INFO, "timeball.spark"):
        runner.run(["compact", "ledger"], endpoint=node.endpoint, once=True, spark=spark)
    assert attached_seqs(broker) == list(range(2, 202))
    data = Path(broker.status().table.uri).parent
    assert (data / "ledger/_delta_log").is_dir()
    assert [path.name for path in (data / "pipeline").iterdir()] == ["status"], "no checkpoint"
    assert "epoch done job=ledger epoch=0" in caplog.text
    of_compact, of_ledger = read_statuses(str(data / "pipeline"))
    assert (of_compact.job, of_ledger.job) == ("compact", "ledger")
    assert {status.state for status in (of_compact, of_ledger)} == {"done"}
    assert of_ledger.epochs == 1 and of_ledger.last is not None and of_ledger.last.position >= 201


@pytest.mark.spark
def test_a_running_job_continues_after_a_restart_of_the_broker(
    spark: SparkSession, node: RunningNode
) -> None:
    stop = threading.Event()
    options = {"compact": {"min_rows_per_batch": "1", "few_rows": "1"}}
    errors: list[BaseException] = []

    def run() -> None:
        try:
            runner.run(["compact"], endpoint=node.endpoint, spark=spark, stop=stop, options=options)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with Endpoint(node.endpoint) as broker:
            send(node.endpoint, 50)
            eventually(lambda: broker.status().watermark > 50, "compacted before the restart")
            node.stop()
            node.start()
            send(node.endpoint, 50)
            before = broker.status().watermark
            eventually(lambda: broker.status().watermark > before, "compacted after the restart")
            eventually(lambda: len(attached_seqs(broker)) == 100, "all scheduled messages are in the table")
    finally:
        stop.set()
        thread.join(BOUND_S)
    assert not errors
    assert not thread.is_alive()


@pytest.mark.spark
def test_without_compaction_the_job_compact_ends_and_other_jobs_run(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_node(tmp_path / "data", strategy="timer_wheel") as node, Endpoint(node.endpoint) as broker:
        send(node.endpoint, 10)
        for once in (True, False):  # even without `once`, the runner ends when its only job has ended
            jobs = ["compact", "ledger"] if once else ["compact"]
            runner.run(jobs, endpoint=node.endpoint, once=once, spark=spark)
        assert attached_seqs(broker) == []
    ended = "job ended job=compact reason=nothing to compact: with the strategy timer_wheel messages wait in the log"
    assert caplog.messages.count(ended) == 2
    assert (tmp_path / "data/ledger/_delta_log").is_dir()
    assert not (tmp_path / "data/pipeline/compact").exists()


@pytest.mark.spark
def test_the_job_compact_ends_when_the_broker_restarts_with_another_strategy(
    spark: SparkSession, node: RunningNode, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"compact": {"min_rows_per_batch": "1", "few_rows": "1"}}
    errors: list[BaseException] = []

    def run() -> None:
        try:
            runner.run(["compact"], endpoint=node.endpoint, spark=spark, options=options)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with Endpoint(node.endpoint) as broker:
        send(node.endpoint, 50)
        eventually(lambda: broker.status().watermark > 50, "compacted before the restart")
        node.stop()
        node.settings = dataclasses.replace(node.settings, strategy="level_cascade")
        node.start()
        send(node.endpoint, 50)
        thread.join(BOUND_S)
        assert not thread.is_alive() and not errors
        assert "job ended job=compact reason=nothing to compact" in caplog.text
        assert len(attached_seqs(broker)) == 50


PROGRAM = """
import sys
from timeball.spark.run import runner
runner.run(["compact"], endpoint=sys.argv[1], options={"compact": {"min_rows_per_batch": "1"}})
print("ended well")
"""


@pytest.mark.slow
@pytest.mark.spark
def test_after_sigterm_the_runner_returns(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 50)
    source = str(Path(runner.__file__).parents[3])
    env = {**os.environ, "PYTHONPATH": source}
    command = [sys.executable, "-c", PROGRAM, node.endpoint]
    program = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: broker.status().watermark > 50 or program.poll() is not None, "it works")
        program.send_signal(signal.SIGTERM)
        out, err = program.communicate(timeout=BOUND_S)
    finally:
        program.kill()
    assert program.returncode == 0, err
    assert "ended well" in out
    assert len(attached_seqs(broker)) == 50


def test_compact_and_dispatch_have_a_query_for_each_group_and_the_ledger_has_one_for_all(
    tmp_path: Path,
) -> None:
    with two_groups(tmp_path) as groups:
        assert runner.job_endpoints("compact", groups.endpoint) == [groups.endpoint]
        groups.add()
        ports = [node.settings.port for node in (groups.one, groups.other)]
        each = [f"grpc://127.0.0.1:{port}#g{number}" for number, port in enumerate(ports, 1)]
        assert runner.job_endpoints("compact", groups.endpoint) == each
        assert runner.job_endpoints("dispatch", groups.endpoint) == each
        assert runner.job_endpoints("ledger", groups.endpoint) == [groups.endpoint], (
            "one stream of all groups"
        )


def progress(start: object, end: object, latest: object, took_ms: int = 500) -> dict[str, object]:
    """Make a progress report of a query, with these offsets."""
    source = {"startOffset": start, "endOffset": end, "latestOffset": latest}
    return {"batchId": 4, "durationMs": {"triggerExecution": took_ms}, "sources": [source]}


def line(job: str, *offsets: object) -> str | None:
    """Format the log line of an epoch with these offsets (start, end, latest)."""
    epoch = parse_progress(progress(*offsets))
    return None if epoch is None else epoch.line(job)


def test_epoch_is_logged_as_one_line() -> None:
    result = line("compact", '{"seq": 100}', {"seq": 1100}, '{"seq": 1150}')
    assert result == "epoch done job=compact epoch=4 to_seq=1100 rows=1000 ms=500 rows_per_s=2000 lag_rows=50"


def test_an_epoch_of_groups_counts_the_rows_of_all() -> None:
    result = line("ledger", '{"g1": 100}', {"g1": 150, "g2": 20}, '{"g1": 160, "g2": 25}')
    assert result == "epoch done job=ledger epoch=4 to_seq=170 rows=70 ms=500 rows_per_s=140 lag_rows=15"
    assert line("ledger", '{"seq": 100}', {"g1": 150}, None) is not None, "the broker has joined a cluster"


def test_an_epoch_of_dispatch_has_a_due_time_and_no_rows() -> None:
    result = line("dispatch", {"due_ms": 1_000}, {"due_ms": 3_000}, {"due_ms": 3_200})
    assert result == "epoch done job=dispatch epoch=4 to_due_ms=3000 ms=500 lag_ms=200"


def test_an_epoch_without_a_start_offset_has_no_rows() -> None:
    result = line("ledger", None, '{"seq": 7}', None)
    assert result == "epoch done job=ledger epoch=4 to_seq=7 ms=500 lag_rows=0"


def test_a_report_without_an_end_or_new_rows_is_no_epoch() -> None:
    assert line("ledger", '{"seq": 7}', '{"seq": 7}', '{"seq": 7}') is None
    assert line("ledger", None, None, None) is None


def test_a_report_with_offsets_of_queues_is_no_epoch() -> None:
    """No job has such offsets."""
    assert line("other", {"g1": {"0": 7}}, {"g1": {"0": 9}}, None) is None
    assert line("other", {"0": 7}, {"0": 9}, None) is None


def status(**changes: object) -> JobStatus:
    """Make the status of a running job, with these changes."""
    last = Epoch(4, "seq", 1100, 500, 50, 1000)
    base = JobStatus(job="compact", state="running", updated_ms=1_000, started_ms=0, last=last, epochs=1)
    return msgspec.structs.replace(base, **changes)


def test_written_status_files_are_read_back(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    board = Board(folder)
    assert list(read_statuses(folder)) == []
    board.write_status(status(), 0)
    board.write_status(status(job="ledger", state="waiting", failures=2, error="away"), 0)
    first, second = read_statuses(folder)
    assert first == status()
    assert (second.job, second.state, second.failures, second.error) == ("ledger", "waiting", 2, "away")
    assert [path.name for path in (tmp_path / "checkpoints/status").iterdir()].count("compact.json.new") == 0


def test_the_folder_may_be_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Board("checkpoints").write_status(status(), 0)
    assert (
        list(read_statuses("checkpoints"))
        == list(read_statuses(f"file://{tmp_path}/checkpoints"))
        == [status()]
    )


def test_status_file_is_written_on_changes_and_at_intervals(tmp_path: Path) -> None:
    board = Board(str(tmp_path))

    def written(now_ns: int, **changes: object) -> bool:
        """Pass a status to the board, and check whether the file contains it afterwards."""
        new_status = status(updated_ms=now_ns, **changes)
        board.write_status(new_status, now_ns)
        return list(read_statuses(str(tmp_path))) == [new_status]

    assert written(0)
    assert not written(ALIVE_EVERY_NS - 1)
    assert written(ALIVE_EVERY_NS)
    assert not written(ALIVE_EVERY_NS + CHANGED_EVERY_NS - 1, epochs=2)
    assert written(ALIVE_EVERY_NS + CHANGED_EVERY_NS, epochs=2)
    assert written(ALIVE_EVERY_NS + CHANGED_EVERY_NS + 1, epochs=2, state="stopped")


def test_running_job_without_report_is_shown_as_silent() -> None:
    assert status().shown(1_000 + SILENT_MS) == "running"
    assert status().shown(1_001 + SILENT_MS) == "silent for 20 s"
    assert status(state="stopped").shown(10**9) == "stopped"


@pytest.mark.parametrize("folder", ["nowhere://x", "file"])
def test_unwritable_folder_is_logged_once(
    tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    board = Board(folder if "://" in folder else str(tmp_path / folder))
    for now_ns in range(3):
        board.write_status(status(epochs=now_ns), now_ns * ALIVE_EVERY_NS)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "status files not written" in caplog.text


def test_invalid_status_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "status").mkdir()
    (tmp_path / "status/compact.json").write_text("{}")
    with pytest.raises(SetupError, match=r"--checkpoint .*: "):
        list(read_statuses(str(tmp_path)))


def test_an_audit_report_is_replaced_and_not_read_as_a_status(tmp_path: Path) -> None:
    board = Board(str(tmp_path))
    board.write_audit(b'{"ok": false}')
    board.write_audit(b'{"ok": true}')
    assert (tmp_path / "audit.json").read_text() == '{"ok": true}'
    assert list(read_statuses(str(tmp_path))) == []
