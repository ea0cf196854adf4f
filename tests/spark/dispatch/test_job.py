"""Tests of timeball.spark.dispatch: scheduled messages released by Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.docs_pages import page
from tests.node_fixture import RunningNode, eventually, running_node
from tests.spark.due_rows import all_out, attach, fetched, left, released, status
from tests.test_docs_shown import python_examples

from timeball.model.limits import HOUR_MS
from timeball.schedule.loaded import LoadBounds
from timeball.spark import dispatch
from timeball.spark.endpoint import Endpoint
from timeball.spark.run import runner
from timeball.spark.run.session import make_active

AHEAD_MS = 2_000
BEHIND = {"behind_ms": str(HOUR_MS)}  # however slow the machine is


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    """A broker that leaves dispatched rows to Spark for ever, so each release proves that Spark sent the row."""
    bounds = LoadBounds(ahead_ms=AHEAD_MS, grace_ms=HOUR_MS)
    with running_node(tmp_path / "data", load_bounds=bounds, compact_rows=0) as running:
        yield running


def example() -> Callable[[SparkSession, str, str, threading.Event], None]:
    """The example in the docs, with longer time limits for a slow machine."""
    (code,) = python_examples(page("docs/pipeline/dispatch.md"))
    scope: dict[str, Any] = {}
    options = '{"lead_ms": "500"}'
    assert options in code
    exec(compile(code.replace(options, repr(BEHIND)), "dispatch.md", "exec"), scope)
    run: Callable[[SparkSession, str, str, threading.Event], None] = scope["release_by_spark"]
    return run


@pytest.mark.spark
def test_spark_releases_due_rows_in_files(
    spark: SparkSession, node: RunningNode, broker: Endpoint, tmp_path: Path
) -> None:
    stop = threading.Event()
    dispatched = node.broker.scheduling.scheduler.external

    def is_leased() -> bool:
        return dispatched.is_leased(status(node)["now_ms"])

    with ThreadPoolExecutor(1) as pool:
        pool.submit(make_active, spark).result()
        running = pool.submit(example(), spark, node.endpoint, str(tmp_path / "c"), stop)
        try:
            eventually(lambda: is_leased() or running.done(), "Spark is at work")
            now_ms = broker.status().now_ms
            attach(broker, [now_ms + 2 * AHEAD_MS + i for i in range(2_000)], job_id="one")
            attach(broker, [now_ms + 2 * AHEAD_MS + 500] * 1_000, job_id="two")
            all_out(node, 3_000)
        finally:
            stop.set()
        running.result()
    assert (left(node), fetched(node)) == (0, 0)
    assert released(node) == 3_000
    eventually(lambda: not is_leased(), "the lease is given back")


@pytest.mark.smoke
@pytest.mark.spark
def test_once_releases_rows_due_now_and_ends(
    spark: SparkSession, node: RunningNode, broker: Endpoint, tmp_path: Path
) -> None:
    broker.lease_dispatcher(HOUR_MS)
    now_ms = broker.status().now_ms
    attach(broker, [now_ms + 2 * AHEAD_MS] * 10 + [now_ms + HOUR_MS] * 5)
    eventually(lambda: left(node) == 10, "they are left to the dispatcher")
    eventually(lambda: broker.status().now_ms > now_ms + 2 * AHEAD_MS, "they are due")
    runner.run(
        ["dispatch"],
        endpoint=node.endpoint,
        checkpoint=str(tmp_path / "c"),
        spark=spark,
        once=True,
        options={"dispatch": BEHIND},
    )
    all_out(node, 10)


def test_the_lease_is_held_while_it_is_needed(node: RunningNode) -> None:
    needed = threading.Event()
    dispatched = node.broker.scheduling.scheduler.external

    def is_leased() -> bool:
        return dispatched.is_leased(status(node)["now_ms"])

    with dispatch.lease(node.endpoint, needed.is_set):
        assert not is_leased()
        needed.set()
        eventually(is_leased, "the lease is taken")
    eventually(lambda: not is_leased(), "the lease is given back")


def test_an_unreachable_broker_does_not_end_the_lease(
    node: RunningNode, caplog: pytest.LogCaptureFixture
) -> None:
    node.stop()
    try:
        with dispatch.lease(node.endpoint, lambda: True):
            eventually(lambda: "lease not renewed" in caplog.text, "the failure is told")
    finally:
        node.start()
