"""Tests of timeball.spark.run.job_status: a log line for each epoch, and a file that shows whether a job runs."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from timeball.model.errors import SetupError
from timeball.spark.run.job_status import (
    ALIVE_EVERY_NS,
    CHANGED_EVERY_NS,
    SILENT_MS,
    Board,
    Epoch,
    JobStatus,
    parse_progress,
    read_statuses,
)


def progress(start: object, end: object, latest: object, took_ms: int = 500) -> dict[str, object]:
    source = {"startOffset": start, "endOffset": end, "latestOffset": latest}
    return {"batchId": 4, "durationMs": {"triggerExecution": took_ms}, "sources": [source]}


def line(job: str, *offsets: object) -> str | None:
    epoch = parse_progress(progress(*offsets))
    return None if epoch is None else epoch.line(job)


def test_epoch_is_logged_as_one_line() -> None:
    result = line("compact", '{"seq": 100}', {"seq": 1100}, '{"seq": 1150}')
    assert result == "epoch done job=compact epoch=4 to_seq=1100 rows=1000 ms=500 rows_per_s=2000 lag_rows=50"


def test_an_epoch_of_groups_counts_the_rows_of_all() -> None:
    result = line("ledger", '{"g1": 100}', {"g1": 150, "g2": 20}, '{"g1": 160, "g2": 25}')
    assert result == "epoch done job=ledger epoch=4 to_seq=170 rows=70 ms=500 rows_per_s=140 lag_rows=15"
    assert line("ledger", '{"seq": 100}', {"g1": 150}, None) is not None, "the first one of a cluster"


def test_an_epoch_of_the_clock_counts_no_rows() -> None:
    result = line("dispatch", {"due_ms": 1_000}, {"due_ms": 3_000}, {"due_ms": 3_200})
    assert result == "epoch done job=dispatch epoch=4 to_due_ms=3000 ms=500 lag_ms=200"


def test_an_epoch_without_a_start_or_without_rows() -> None:
    assert (
        line("ledger", None, '{"seq": 7}', None) == "epoch done job=ledger epoch=4 to_seq=7 ms=500 lag_rows=0"
    )
    assert line("ledger", '{"seq": 7}', '{"seq": 7}', '{"seq": 7}') is None
    assert line("ledger", None, None, None) is None
    assert line("other", {"g1": {"0": 7}}, {"g1": {"0": 9}}, None) is None
    assert line("other", {"0": 7}, {"0": 9}, None) is None  # offsets of queues: no job has them


def status(**changes: object) -> JobStatus:
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


def test_a_folder_may_be_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        """Write a status, and check whether the file contains it afterwards."""
        given = status(updated_ms=now_ns, **changes)
        board.write_status(given, now_ns)
        return list(read_statuses(str(tmp_path))) == [given]

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


@pytest.mark.parametrize("place", ["nowhere://x", "file"])
def test_unwritable_folder_is_logged_once(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    board = Board(place if "://" in place else str(tmp_path / place))
    for now_ns in range(3):
        board.write_status(status(epochs=now_ns), now_ns * ALIVE_EVERY_NS)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "status files not written" in caplog.text


def test_invalid_status_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "status").mkdir()
    (tmp_path / "status/compact.json").write_text("{}")
    with pytest.raises(SetupError, match=r"--checkpoint .*: "):
        list(read_statuses(str(tmp_path)))


def test_audit_report_is_not_read_as_a_status(tmp_path: Path) -> None:
    board = Board(str(tmp_path))
    board.write_audit(b'{"ok": false}')
    board.write_audit(b'{"ok": true}')
    assert (tmp_path / "audit.json").read_text() == '{"ok": true}'
    assert list(read_statuses(str(tmp_path))) == []
