"""Tests of timeball.pipeline.views.spark_forecast: Spark counts what this process counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from pyspark.sql import SparkSession
from tests.node_fixture import RunningNode
from tests.pipeline.traffic import send
from tests.written_again import write_again

from timeball.limits import DAY_MS, HOUR_MS
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.views import due_histogram, forecast
from timeball.pipeline.views import spark_forecast as job
from timeball.pipeline.views.due_histogram import Load, Unit, unlike
from timeball.pipeline.views.snapshot import Due, Snapshot

pytestmark = pytest.mark.spark


def cells(load: Load) -> Counter[tuple[str, int]]:
    names = [load.topics[code] for code in load.topic.tolist()]
    return Counter(dict(zip(zip(names, load.second.tolist()), load.rows.tolist(), strict=True)))


@pytest.mark.parametrize("by_topic", [False, True])
def test_spark_counts_what_is_counted_here(
    spark: SparkSession, node: RunningNode, broker: Endpoint, by_topic: bool
) -> None:
    """In the table, in the tail, cancelled in either, written again, and within bounds."""
    send(node.endpoint, 400)
    write_again(node, 7, 8)
    node.run(node.broker.compact())
    send(node.endpoint, 50, topic="mail")
    node.run(node.broker.cancel(seqs=[1, 2, 3, broker.status().log.durable_seq - 1]))
    write_again(node, 9)
    snapshot = Snapshot.take(broker, upcoming=True)
    begin_ms = snapshot.now_ms + 30 * DAY_MS
    for due in ((None, None), (begin_ms + 10 * HOUR_MS, begin_ms + 20 * HOUR_MS)):
        bounds: Due = due
        here = forecast.gather(snapshot, by_topic=by_topic, due=bounds)
        there = job.gather(spark, node.endpoint, snapshot, by_topic=by_topic, due=bounds)
        assert cells(there) == cells(here)
        assert unlike(there, here, Unit.SECOND) == 0
    whole = job.gather(spark, node.endpoint, snapshot)
    assert whole.total == 446
    # The control: with one more gone, the two differ.
    node.run(node.broker.cancel(seqs=[100]))
    after = job.gather(spark, node.endpoint, Snapshot.take(broker, upcoming=True))
    assert unlike(whole, after, Unit.SECOND) > 0


@pytest.mark.smoke
def test_too_many_seconds_are_counted_by_the_minute(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_histogram, "CELLS_MAX", 20)
    load = job.count(spark.range(600).selectExpr("id * 1000 + 5 as due_ms"))
    assert (load.width_s, load.second.tolist(), load.rows.tolist()) == (
        60,
        list(range(0, 600, 60)),
        [60] * 10,
    )
    fine = job.count(spark.range(15).selectExpr("id * 1000 as due_ms", "'t' as topic"))
    assert (fine.width_s, fine.topics, fine.total) == (1, ("t",), 15)
    assert np.array_equal(fine.second, np.arange(15))
