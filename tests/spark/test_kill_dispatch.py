"""kill -9 of a dispatching Spark, again and again: each scheduled message is released once, and not before its instant.

Spark is the command `timeball pipeline run dispatch`, killed with all its processes while it brings rows. KILL_SEED
makes other moments.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.cli.processes import environment
from tests.node_fixture import RunningNode, running_node
from tests.rounds import only_in_a_siege
from tests.spark.due_rows import attach, fetched, left, released
from tests.spark.test_kill_spark import eventually, kill_tree

from timeball.model.limits import HOUR_MS
from timeball.model.message import Kind, int64
from timeball.schedule.loaded import LoadBounds
from timeball.spark.endpoint import Endpoint

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

SEED = int(os.environ.get("KILL_SEED", "1"))
ROWS = 20_000  # of a wave
WAVES_MAX = 10  # until Spark is warm
SPREAD_MS = 10_000
AHEAD_MS = 4_000
LIVES = 2


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    bounds = LoadBounds(ahead_ms=AHEAD_MS, grace_ms=1_000)
    with running_node(tmp_path / "data", load_bounds=bounds) as running:
        yield running


@contextmanager
def spark_at_work(node: RunningNode, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable,
        "-m",
        "timeball",
        "pipeline",
        "run",
        "dispatch",
        "--log-level=warning",
        "--endpoint",
        node.endpoint,
    ]
    process = subprocess.Popen(
        [*command, "--checkpoint", str(folder), "--option", f"dispatch.behind_ms={HOUR_MS}"],
        env=environment(),
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        kill_tree(process.pid)
        process.wait()


def releases(node: RunningNode) -> dict[int, tuple[int, int]]:
    """Read {scheduled message: (due, released)}. Asserts that each is released once."""
    reader = node.broker.log.reader
    result: dict[int, tuple[int, int]] = {}
    for rows in reader.rows(reader.first_seq, reader.next_seq, [Kind.RELEASE]):
        columns = (int64(rows.column(name)).tolist() for name in ("source_seq", "due_ms", "store_ms"))
        for seq, due_ms, at_ms in zip(*columns, strict=True):
            assert seq not in result, f"scheduled message {seq} is released twice"
            result[seq] = due_ms, at_ms
    return result


@pytest.mark.siege
@only_in_a_siege
def test_killed_dispatcher_loses_and_repeats_no_message(node: RunningNode, tmp_path: Path) -> None:
    chance = np.random.default_rng(SEED)
    promised: list[int] = []
    with Endpoint(node.endpoint) as broker:
        for _ in range(LIVES):
            with spark_at_work(node, tmp_path / "checkpoint") as spark:
                live(node, broker, chance, promised)
                assert spark.poll() is None, "Spark has ended by itself"
        eventually(lambda: done(node, len(promised)), "every scheduled message is released")
    result = releases(node)
    assert sorted(result) == sorted(promised)
    assert all(at_ms >= due_ms for due_ms, at_ms in result.values()), "never early"
    assert brought(node) > 0, "Spark has brought some"
    assert fetched(node) > 0, "and the broker what was left of them"
    assert left(node) == 0


def live(node: RunningNode, broker: Endpoint, chance: np.random.Generator, promised: list[int]) -> None:
    """Make messages for a running Spark until it is sending some of them."""
    dispatched = node.broker.scheduling.scheduler.external
    eventually(lambda: dispatched.is_leased(broker.status().now_ms), "Spark is at work")
    eventually(lambda: done(node, len(promised)), "all that was left by the one before is out")
    before = brought(node)
    for _ in range(WAVES_MAX):
        dues = broker.status().now_ms + 2 * AHEAD_MS + chance.integers(0, SPREAD_MS, ROWS)
        promised.extend(attach(broker, dues.tolist(), job_id=f"wave {len(promised)}"))
        eventually(
            lambda: brought(node) > before or done(node, len(promised)), "some are brought, or all are out"
        )
        if brought(node) > before:
            break
    threading.Event().wait(float(chance.uniform(0, SPREAD_MS / 2_000)))


def brought(node: RunningNode) -> int:
    """Count the rows that Spark has sent, as a lower bound: rows that a bulk attach loads are in neither count."""
    return released(node) - fetched(node)


def done(node: RunningNode, rows: int) -> bool:
    return released(node) >= rows
