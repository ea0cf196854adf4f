"""Jobs on a cluster of a master and two workers, which share nothing with the driver but Flight and some folders.

An executor is killed while it writes: Spark repeats its tasks somewhere else, and what it left behind is nobody's.
A siege kills a worker and the driver in the middle of a write as well, in clusters of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.processes import environment
from tests.cluster.namespaces import Network
from tests.node_fixture import RunningNode, running_node
from tests.rounds import only_in_a_siege
from tests.spark import cluster_jobs
from tests.spark.standalone import Standalone, machines, standalone
from tests.spark.test_kill_spark import bodies, data_files, eventually, is_dead, kill_tree
from tests.spark.traffic import send, send_due_now

from timeball.model.limits import HOUR_MS

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = 60_000
BOUND_S = 500  # only for what hangs: five jobs of Spark share two cores with other tests
VICTIMS = ("executor", "worker", "driver")


@pytest.fixture
def net() -> Iterator[Network | None]:
    with machines() as made:
        yield made


@contextmanager
def broker_for(tmp_path: Path, net: Network | None) -> Iterator[RunningNode]:
    """Run a broker that executors on other machines can reach."""
    if net is None:
        where: dict[str, Any] = {}
    else:
        where = {"host": "0.0.0.0", "advertise": net.addresses["here"], "allow_plaintext": True}
    with running_node(tmp_path / "data", compact_rows=0, **where) as node:
        yield node


@contextmanager
def driver(cluster: Standalone, endpoint: str, folder: Path, due_ms: int) -> Iterator[subprocess.Popen[str]]:
    """Run cluster_jobs.py as a driver of the cluster, in a process that is killed when the block ends."""
    words = [endpoint, str(folder), str(ROWS), str(due_ms)]
    process = subprocess.Popen(
        [sys.executable, cluster_jobs.__file__, *words],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"spark.master": cluster.master, **cluster.conf()}))
        process.stdin.close()
        process.stdin = None
        yield process
    finally:
        kill_tree(process.pid)


def kill(victim: str, cluster: Standalone, process: subprocess.Popen[str]) -> None:
    """Kill one of these processes while a task is writing."""
    executors = cluster.executors()
    assert len(executors) == 2, "too late to kill anybody"
    if victim == "executor":
        executors[0].kill()
        eventually(lambda: is_dead(executors[0]), "it is dead")
    elif victim == "worker":
        kill_tree(cluster.workers.pop("x").pid)
    else:
        kill_tree(process.pid)


@pytest.mark.siege
@only_in_a_siege
@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_executor_loses_and_repeats_no_row(victim: str, tmp_path: Path, net: Network | None) -> None:
    table = tmp_path / "data" / "pending"
    with (
        broker_for(tmp_path, net) as node,
        node.client() as ball,
        standalone(tmp_path / "spark", tmp_path / "data", net) as cluster,
    ):
        endpoint = f"grpc://{cluster.here}:{node.settings.port}"
        send(node.endpoint, 500)
        send_due_now(node.endpoint, 20)
        due_ms, empty = ball.status()["now_ms"] + 2 * HOUR_MS, data_files(table)
        with driver(cluster, endpoint, tmp_path / "checkpoints", due_ms) as process:
            eventually(lambda: data_files(table) - empty or process.poll() is not None, "a task has written")
            assert ball.status()["table"]["version"] == 0, "too late to kill anybody"
            kill(victim, cluster, process)
            said, _ = process.communicate(timeout=BOUND_S)
        if victim == "driver":
            with driver(cluster, endpoint, tmp_path / "checkpoints", due_ms) as process:
                said, _ = process.communicate(timeout=BOUND_S)
        assert process.returncode == 0, said
        result = msgspec.json.decode(said.splitlines()[-1])
        assert result["audit"]["ok"], result
        counts = [result["audit"][name] for name in ("accepted", "released", "pending", "lost", "duplicate")]
        assert counts == [ROWS + 540, 20, ROWS + 520, 0, 0]
        assert [result[name] for name in ("known", "replayed", "waiting")] == [ROWS, 20, ROWS + 520]
        keys = [key for key in bodies(table) if key.startswith("key ")]
        assert keys == sorted(f"key {i}" for i in range(ROWS))
