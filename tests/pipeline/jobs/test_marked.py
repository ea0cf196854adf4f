"""Tests of timeball.pipeline.jobs.marked. What a real sink makes of it: test_ledger.py, test_archive.py."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from timeball.errors import OutOfRange, SetupError
from timeball.pipeline.jobs.marked import check_mark, epoch_writer
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

    write = epoch_writer("job", extend, "grpc://x:1", "table")
    ranges = spark.createDataFrame([(5, 9), (1, 5)], "from_seq bigint, to_seq bigint")
    write(ranges, 0)
    write(ranges.where("from_seq > 9"), 1)
    assert asked == [("grpc://x:1", "table", 9)]


@pytest.mark.spark
def test_a_refusal_is_the_sentence_alone(spark: SparkSession) -> None:
    def extend(*_: object) -> int:
        raise OutOfRange("events are lost") from ValueError("below")

    ranges = spark.createDataFrame([(1, 2)], "from_seq bigint, to_seq bigint")
    with pytest.raises(OutOfRange, match="events are lost") as caught:
        epoch_writer("job", extend, "grpc://x:1", "table")(ranges, 0)
    assert caught.value.__cause__ is None
