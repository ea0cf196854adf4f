"""Tests of timeball.pipeline.jobs.marked. What a real sink makes of it: test_ledger.py, test_archive.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.two_groups import two_groups

from timeball.errors import OutOfRange, SetupError
from timeball.pipeline.jobs.marked import Places, check_mark, epoch_writer, places
from timeball.wire import LogStatus


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
def test_a_table_that_does_not_fit_the_log_is_refused(mark: int, error: type[Exception], text: str) -> None:
    """Rows would be missing from it: of the second kind all of a new log, until it is as long as the old one."""
    with pytest.raises(error, match=text):
        check_mark("ledger", "file:///ledger", mark, LogStatus(10, 100, 100), 50)
    for fits in (10, 50, 100):
        check_mark("ledger", "file:///ledger", fits, LogStatus(10, 100, 100), 50)


@pytest.mark.spark
def test_only_the_end_of_an_epoch_counts(spark: SparkSession) -> None:
    asked: list[tuple[str, str, int]] = []

    def extend(_: SparkSession, endpoint: str, uri: str, to_seq: int) -> int:
        asked.append((endpoint, uri, to_seq))
        return 0

    where: Places = {
        None: ("grpc://x:1", "table"),
        "g1": ("grpc://x:1#g1", "t1"),
        "g2": ("grpc://y:1#g2", "t2"),
    }
    write = epoch_writer("job", extend, lambda: where)
    rows = [(5, 9, None), (1, 5, None), (1, 3, "g2"), (3, 8, "g1"), (3, 5, "g2")]
    ranges = spark.createDataFrame(rows, "from_seq bigint, to_seq bigint, group string")
    write(ranges.where("group is null"), 0)
    write(ranges.where("from_seq > 9"), 1)
    assert asked == [("grpc://x:1", "table", 9)]
    write(ranges.where("group is not null"), 2)
    assert asked[1:] == [("grpc://x:1#g1", "t1", 8), ("grpc://y:1#g2", "t2", 5)]


@pytest.mark.spark
def test_a_refusal_is_the_sentence_alone(spark: SparkSession) -> None:
    def extend(*_: object) -> int:
        raise OutOfRange("events are lost") from ValueError("below")

    ranges = spark.createDataFrame([(1, 2, None)], "from_seq bigint, to_seq bigint, group string")
    with pytest.raises(OutOfRange, match="events are lost") as caught:
        epoch_writer("job", extend, lambda: {None: ("grpc://x:1", "table")})(ranges, 0)
    assert caught.value.__cause__ is None


def test_each_group_has_a_table_beside_its_pending_table(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        assert places("ledger", groups.endpoint, "/x/ledger") == {"g1": (groups.endpoint, "/x/ledger")}
        groups.add()
        found = places("ledger", groups.endpoint, None)
        assert list(found) == ["g1", "g2"]
        assert [uri.removeprefix("file://") for _, uri in found.values()] == [
            str(tmp_path / "g1" / "ledger"),
            str(tmp_path / "g2" / "ledger"),
        ]
        assert places("ledger", groups.endpoint, "/x/{group}/ledger")["g2"][1] == "/x/g2/ledger"
        with pytest.raises(SetupError, match="--ledger=/x/ledger: each of the 2 groups"):
            places("ledger", groups.endpoint, "/x/ledger")
        groups.leave()
        assert list(places("ledger", groups.endpoint, None)) == [None]
