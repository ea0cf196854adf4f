"""Executors in processes of their own: they share nothing with the driver but Flight and the table's URI.

One of them is killed while it writes: Spark repeats its tasks somewhere else, and what it left behind is nobody's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.cli.processes import environment
from tests.node_fixture import running_node
from tests.pipeline import cluster_jobs
from tests.pipeline.test_kill_spark import bodies, data_files, eventually, is_dead, kill_tree
from tests.pipeline.traffic import send, send_due_now

from timeball import Timeball
from timeball.limits import HOUR_MS

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = 120_000
BOUND_S = 300
TOPIC = "cluster"


def executors(pid: int) -> list[psutil.Process]:
    """The JVMs that run tasks, below the driver."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue  # it ended while we looked
    return found


def test_an_executor_that_is_killed_costs_nothing_but_time(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", compact_self=False) as node, Timeball(node.endpoint) as ball:
        send(node.endpoint, 500)
        send_due_now(node.endpoint, 20)
        table, due_ms = tmp_path / "data" / "pending", ball.status()["now_ms"] + 2 * HOUR_MS
        command = [sys.executable, cluster_jobs.__file__, node.endpoint, str(ROWS), str(due_ms), TOPIC]
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            eventually(lambda: data_files(table) or process.poll() is not None, "a task has written a file")
            before = executors(process.pid)
            assert len(before) == 2 and ball.status()["table"]["version"] == 0, "too late to kill anybody"
            before[0].kill()
            eventually(lambda: is_dead(before[0]), "it is dead")
            said, _ = process.communicate(timeout=BOUND_S)
        finally:
            kill_tree(process.pid)
        assert process.returncode == 0, said
        report = msgspec.json.decode(said.splitlines()[-1])
        assert report["audit"]["ok"], report
        counts = [report["audit"][name] for name in ("accepted", "released", "pending", "lost", "duplicate")]
        assert counts == [ROWS + 520, 20, ROWS + 500, 0, 0]
        assert report["known"] == ROWS and report["watermark"] > 520
        keys = [key for key in bodies(table) if key.startswith("key ")]
        assert keys == sorted(f"key {i}" for i in range(ROWS))
