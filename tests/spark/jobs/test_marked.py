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
from timeball.spark.jobs.marked import InProcessEngine, Sinks, check_mark
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
    """Rows would be missing from it: of the second kind all of a new log, until it is as long as the old one."""
    with pytest.raises(error, match=text):
        check_mark("ledger", "file:///ledger", mark, LogStatus(10, 100, 100), 50)
    for fits in (10, 50, 100):
        check_mark("ledger", "file:///ledger", fits, LogStatus(10, 100, 100), 50)


def test_a_table_of_another_log_ends_the_loop(node: RunningNode, tmp_path: Path) -> None:
    """It would take none of this log's rows, in silence, until the log is as long as the other was."""
    ledger.open_ledger(str(tmp_path / "ledger"), 1_000)
    loop = ledger.JOB.start(InProcessEngine(), node.endpoint, uri=str(tmp_path / "ledger"))
    with pytest.raises(SetupError, match="has come to row 1000 but the broker's log ends at"):
        loop.awaitTermination()


class Failing(InProcessEngine):
    """An engine that fails with an error of a library."""

    def run(self, *_: object) -> list[Any]:
        raise KeyError("of a library")


def test_exception_of_a_library_becomes_unavailable(node: RunningNode) -> None:
    send(node.endpoint, 1)
    loop = ledger.JOB.start(Failing(), node.endpoint)
    with pytest.raises(Unavailable, match="ledger failed: KeyError: 'of a library'"):
        loop.awaitTermination()
    assert not loop.isActive


def test_loop_follows_the_log_and_reports_progress(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 25)
    job = dataclasses.replace(ledger.JOB, trigger_s=0.01)
    loop = job.start(InProcessEngine(), node.endpoint, options={"max_rows_per_batch": "10"})
    try:
        eventually(lambda: len(loop.recentProgress) == 3, "three epochs")
        seen = iter(loop.recentProgress)
        send(node.endpoint, 5)
        eventually(lambda: len(loop.recentProgress) == 4, "one more")
        assert len(list(seen)) == 3, "what a reader has begun to read stays as it was"
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
    assert epochs[0].lag == 16, "as it was when the epoch was planned"


def test_each_group_is_extended_to_its_own_end(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        groups.add()
        for number, node in enumerate((groups.one, groups.other), 1):
            send(node.endpoint, 10 * number)
        ledger.JOB.start(InProcessEngine(), groups.endpoint, once=True).awaitTermination()
        result = ledger.JOB.sinks_by_group(group_statuses(groups.endpoint), None)
        rows = {name: DeltaTable(uri).to_pyarrow_table().num_rows for name, (_, uri) in result.items()}
    assert rows == {"g1": 10, "g2": 20}


def sinks(endpoint: str, uri: str | None) -> Sinks:
    return ledger.JOB.sinks_by_group(group_statuses(endpoint), uri)


def test_each_group_has_a_table_beside_its_pending_table(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        assert sinks(groups.endpoint, "/x/ledger") == {"g1": (groups.endpoint, "/x/ledger")}
        groups.add()
        result = sinks(groups.endpoint, None)
        assert list(result) == ["g1", "g2"]
        assert [uri.removeprefix("file://") for _, uri in result.values()] == [
            str(tmp_path / "g1" / "ledger"),
            str(tmp_path / "g2" / "ledger"),
        ]
        assert sinks(groups.endpoint, "/x/{group}/ledger")["g2"][1] == "/x/g2/ledger"
        with pytest.raises(SetupError, match="--ledger=/x/ledger: each of the 2 groups"):
            sinks(groups.endpoint, "/x/ledger")
        groups.leave()
        assert list(sinks(groups.endpoint, None)) == [None]
