"""`timeball pipeline status`: what the jobs left behind, and how far the broker's log is by now."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from tests.cli.in_process import run_here
from tests.cli.unreachable import NOWHERE
from tests.node_fixture import running_node
from tests.pipeline.traffic import send

from timeball.clock import SystemClock
from timeball.pipeline.run.job_status import Board, Epoch, JobStatus


def leave(folder: Path, **changes: object) -> None:
    """A job's status, as its runner writes it."""
    now_ms = SystemClock().wall_ms()
    last = Epoch(3, "seq", 41, 250, 5, 40)
    status = JobStatus(
        job="ledger",
        state="running",
        updated_ms=now_ms,
        started_ms=now_ms,
        last=last,
        epochs=4,
    )
    Board(str(folder)).write_status(msgspec.structs.replace(status, **changes), 0)


def test_where_jobs_stand_against_the_log_of_now(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node:
        none = run_here("pipeline", "status", "--endpoint", node.endpoint)
        assert (none.returncode, none.stdout.split(" in ")[0]) == (0, "no job has run with its checkpoints")
        send(node.endpoint, 100)
        leave(tmp_path / "data/pipeline")
        leave(tmp_path / "data/pipeline", job="compact", state="failed", last=None, error="the disk is full")
        shown = run_here("pipeline", "status", "--endpoint", node.endpoint)
        asked = run_here("pipeline", "status", "--endpoint", node.endpoint, "--json")
    assert shown.returncode == asked.returncode == 0, shown.stderr
    compact, ledger = (line.split() for line in shown.stdout.splitlines()[1:3])
    assert compact == ["compact", "failed", "1", "101", "rows", "0"]
    assert "compact: the disk is full" in shown.stdout.splitlines()
    assert ledger == ["ledger", "running", "41", "61", "rows", "160", "3", "250", "ms", "0"]
    assert "the log ends at row 102" in shown.stdout
    documents = [json.loads(line) for line in asked.stdout.splitlines()]
    assert [(each["job"], each["behind_rows"]) for each in documents] == [("compact", 101), ("ledger", 61)]
    assert documents[1]["position"] == {"seq": 41} and documents[1]["watermark"] == 1


def test_compact_stands_where_the_watermark_does(tmp_path: Path) -> None:
    """The broker moves the tail too; it was said to be millions of rows behind while thirty were."""
    with running_node(tmp_path / "data") as node:
        leave(tmp_path / "data/pipeline", job="compact")
        send(node.endpoint, 100)
        node.run(node.broker.compact())
        asked = run_here("pipeline", "status", "--endpoint", node.endpoint, "--json")
    document = json.loads(asked.stdout)
    assert document["position"] == {"seq": document["watermark"]} == {"seq": 102}
    assert document["behind_rows"] == 1


def test_without_the_broker_the_folder_must_be_named(tmp_path: Path) -> None:
    leave(tmp_path, updated_ms=0)
    away = run_here("pipeline", "status", "--endpoint", NOWHERE)
    assert (away.returncode, away.stdout) == (3, "")
    named = run_here("pipeline", "status", "--endpoint", NOWHERE, "--checkpoint", str(tmp_path), "--json")
    assert named.returncode == 0
    document = json.loads(named.stdout)
    assert document["state"].startswith("silent for ")
    assert document["behind_rows"] == 5  # as the job saw it last


def test_a_clock_has_milliseconds_behind(tmp_path: Path) -> None:
    leave(tmp_path, job="dispatch", last=Epoch(3, "due_ms", 1_000, 90, 140))
    shown = run_here("pipeline", "status", "--endpoint", NOWHERE, "--checkpoint", str(tmp_path))
    assert shown.stdout.splitlines()[1].split() == [
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
