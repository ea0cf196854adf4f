"""Tests of timeball.spark.jobs.marked. With real sinks: test_ledger.py, test_archive.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.node_fixture import RunningNode, eventually
from tests.spark.traffic import send
from tests.spark.two_groups import two_groups

from timeball.model.answers import LogStatus
from timeball.model.errors import OutOfRange, SetupError, Unavailable
from timeball.spark.endpoint import Endpoint, group_statuses
from timeball.spark.jobs import ledger
from timeball.spark.jobs.marked import InProcessEngine, Sink, check_mark
from timeball.spark.run.runner import parse_progress


@pytest.mark.parametrize(
    ("mark", "error", "text"),
    [
        (9, OutOfRange, "the ledger ends at row 9 but retention has removed the log up to 10"),
        (
            101,
            SetupError,
            r"come to row 101 but the broker's log ends at 100: it belongs to another log; .*--ledger",
        ),
    ],
)
def test_table_whose_mark_is_outside_the_log_is_refused(mark: int, error: type[Exception], text: str) -> None:
    """The table would silently lack rows: those that retention has removed, or all rows of another log."""
    kept_rows = LogStatus(first_seq=10, durable_seq=100, next_seq=100)
    with pytest.raises(error, match=text):
        check_mark("ledger", "file:///ledger", mark, kept_rows, to_seq=50)
    for mark_within_log in (10, 50, 100):
        check_mark("ledger", "file:///ledger", mark_within_log, kept_rows, to_seq=50)


def test_a_table_of_another_log_ends_the_loop(node: RunningNode, tmp_path: Path) -> None:
    """The loop would skip all rows of this log up to the mark."""
    ledger.open_ledger(str(tmp_path / "ledger"), 1_000)
    loop = ledger.JOB.start(InProcessEngine(), node.endpoint, uri=str(tmp_path / "ledger"))
    with pytest.raises(SetupError, match="has come to row 1000 but the broker's log ends at"):
        loop.awaitTermination()


class FailingEngine(InProcessEngine):
    """An engine that fails with an error of a library."""

    def run(self, *_: object) -> list[Any]:
        raise KeyError("of a library")


def test_an_exception_of_a_library_ends_the_loop_as_unavailable(node: RunningNode) -> None:
    send(node.endpoint, 1)
    loop = ledger.JOB.start(FailingEngine(), node.endpoint)
    with pytest.raises(Unavailable, match="ledger failed: KeyError: 'of a library'"):
        loop.awaitTermination()
    assert not loop.isActive


def test_loop_follows_the_log_and_reports_progress(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 25)
    job = dataclasses.replace(ledger.JOB, trigger_s=0.01)
    loop = job.start(InProcessEngine(), node.endpoint, options={"max_rows_per_batch": "10"})
    try:
        eventually(lambda: len(loop.recentProgress) == 3, "three epochs")
        old_reports = iter(loop.recentProgress)
        send(node.endpoint, 5)
        eventually(lambda: len(loop.recentProgress) == 4, "one more")
        assert len(list(old_reports)) == 3, "`recentProgress` returns a copy"
    finally:
        loop.stop()
    assert not loop.isActive and loop.exception() is None
    epochs = [parse_progress(progress) for progress in loop.recentProgress]
    assert [(each.epoch, each.rows, each.unit) for each in epochs if each] == [
        (0, 10, "seq"),
        (1, 10, "seq"),
        (2, 6, "seq"),
        (3, 5, "seq"),
    ]
    assert epochs[3] and epochs[3].position == broker.status().log.durable_seq and epochs[0]
    assert epochs[0].lag == 16, "the lag when the epoch was planned"


def test_each_group_is_extended_to_its_own_end(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        groups.add()
        for number, node in enumerate((groups.one, groups.other), 1):
            send(node.endpoint, 10 * number)
        ledger.JOB.start(InProcessEngine(), groups.endpoint, once=True).awaitTermination()
        result = ledger.JOB.sinks_by_group(group_statuses(groups.endpoint), None)
        rows = {name: DeltaTable(sink.uri).to_pyarrow_table().num_rows for name, sink in result.items()}
    assert rows == {"g1": 10, "g2": 20}


def sinks(endpoint: str, uri: str | None) -> dict[str | None, Sink]:
    return ledger.JOB.sinks_by_group(group_statuses(endpoint), uri)


def test_each_group_has_a_table_beside_its_pending_table(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        assert sinks(groups.endpoint, "/x/ledger") == {"g1": Sink(groups.endpoint, "/x/ledger")}
        groups.add()
        result = sinks(groups.endpoint, None)
        assert list(result) == ["g1", "g2"]
        assert [sink.uri.removeprefix("file://") for sink in result.values()] == [
            str(tmp_path / "g1" / "ledger"),
            str(tmp_path / "g2" / "ledger"),
        ]
        assert sinks(groups.endpoint, "/x/{group}/ledger")["g2"].uri == "/x/g2/ledger"
        with pytest.raises(SetupError, match="--ledger=/x/ledger: each of the 2 groups"):
            sinks(groups.endpoint, "/x/ledger")
        groups.leave()
        assert list(sinks(groups.endpoint, None)) == [None]
