"""The jobs over two groups of a cluster, on Spark: what one broker shows, two show together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.traffic import send, send_due_now
from tests.pipeline.two_groups import TwoGroups, two_groups

from timeball import Timeball
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs import archive, audit, ledger
from timeball.pipeline.run import runner

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[TwoGroups]:
    with two_groups(tmp_path) as found:
        yield found


def run(spark: SparkSession, groups: TwoGroups, folder: Path, *jobs: str) -> None:
    runner.run(jobs, endpoint=groups.endpoint, once=True, checkpoint=str(folder / "checkpoints"), spark=spark)


def test_ledger_archive_compact_and_audit(spark: SparkSession, groups: TwoGroups, tmp_path: Path) -> None:
    send(groups.one.endpoint, 50)
    send_due_now(groups.one.endpoint, 10)
    run(spark, groups, tmp_path, "compact", "ledger", "archive")
    assert "group" not in ledger.promises(spark, groups.endpoint).columns, "with one group nothing changes"
    assert "group" not in archive.messages(spark, groups.endpoint).columns

    # The second group comes while the jobs' checkpoints know of the first one alone.
    groups.add()
    send(groups.other.endpoint, 30)
    send_due_now(groups.other.endpoint, 7)
    with Timeball(groups.other.endpoint) as ball:
        ball.send("orders", "unwanted", after="1h", keys="k")
        ball.cancel(key="k")
    send(groups.one.endpoint, 5)
    run(spark, groups, tmp_path, "compact", "ledger", "archive")

    told = ledger.promises(spark, groups.endpoint).groupBy("group").count().collect()
    assert {row["group"]: row["count"] for row in told} == {"g1": 65, "g2": 38}
    passed = archive.messages(spark, groups.endpoint).groupBy("group").count().collect()
    assert {row["group"]: row["count"] for row in passed} == {"g1": 10, "g2": 7}
    for node in (groups.one, groups.other):
        with Endpoint(node.endpoint) as broker:
            status = broker.status()
            assert status.table.version > 0 and status.watermark > 30, "each group was compacted"

    report = audit.run(spark, groups.endpoint)
    assert report.ok and report.scope is None
    counts = {
        name: (each.accepted, each.released, each.cancelled, each.pending)
        for name, each in report.groups.items()
    }
    assert counts == {"g1": (65, 10, 0, 55), "g2": (38, 7, 1, 30)}
    assert (report.accepted, report.released, report.cancelled, report.pending) == (103, 17, 1, 85)
    one = audit.run(spark, f"{groups.endpoint}#g2")
    assert (one.accepted, one.groups) == (38, {}) and one.scope is not None

    # A second run finds nothing to do, whatever address is named.
    before = [ledger.open_table(uri).version() for _, uri in places(groups)]
    runner.run(
        ["ledger"],
        endpoint=groups.other.endpoint,
        once=True,
        checkpoint=str(tmp_path / "others"),
        spark=spark,
    )
    assert [ledger.open_table(uri).version() for _, uri in places(groups)] == before


def places(groups: TwoGroups) -> list[tuple[str, str]]:
    from timeball.pipeline.jobs import marked

    return list(marked.places(ledger.NAME, groups.endpoint, None).values())
