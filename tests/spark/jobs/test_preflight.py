"""Tests of the preflight of timeball.spark.jobs.bulk."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.node_fixture import RunningNode

from timeball.model.errors import SetupError
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs.bulk import check_table, find_table_problem


def test_a_table_is_usable_only_if_the_folder_has_the_version_of_the_broker(
    node: RunningNode, broker: Endpoint, tmp_path: Path
) -> None:
    table = broker.status().table
    before = sorted(Path(table.uri.removeprefix("file://")).iterdir())
    assert find_table_problem(table.uri, table.version) is None
    assert sorted(Path(table.uri.removeprefix("file://")).iterdir()) == before, "the check leaves no file"
    # A folder of the same name on another machine, with a table of its own or none.
    assert "of version 0 there, and of version 5" in str(find_table_problem(table.uri, 5))
    assert "no Delta table" in str(find_table_problem(str(tmp_path / "elsewhere"), 0))


@pytest.mark.spark
def test_unshared_folder_is_reported_before_the_job_starts(
    spark: SparkSession, broker: Endpoint, tmp_path: Path
) -> None:
    table = broker.status().table
    check_table(spark, table.uri, table.version, "--table-uri")
    with pytest.raises(SetupError, match=r"Share this folder .* or say with --table-uri where they reach it"):
        check_table(spark, str(tmp_path / "elsewhere"), table.version, "--table-uri")
