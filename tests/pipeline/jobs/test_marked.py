"""Tests of timeball.pipeline.jobs.marked. What a real sink makes of it: test_ledger.py, test_archive.py."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from timeball.errors import OutOfRange
from timeball.pipeline.jobs.marked import epoch_writer

pytestmark = pytest.mark.spark


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


def test_a_refusal_is_the_sentence_alone(spark: SparkSession) -> None:
    def extend(*_: object) -> int:
        raise OutOfRange("events are lost") from ValueError("below")

    ranges = spark.createDataFrame([(1, 2)], "from_seq bigint, to_seq bigint")
    with pytest.raises(OutOfRange, match="events are lost") as caught:
        epoch_writer("job", extend, "grpc://x:1", "table")(ranges, 0)
    assert caught.value.__cause__ is None
