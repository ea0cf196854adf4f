"""Spark's own cluster, a master and two workers, each as isolated as this machine allows.

With root each has a network namespace, and each worker a mount namespace in which the broker's data folder is empty but
for the folders that are shared, as a mount of NFS would have it: so nothing but Flight and these folders is common.
Without root all of it runs on the loopback, with everything shared. The broker and the driver run outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pyspark
from tests.cli.processes import environment
from tests.cluster.namespaces import HERE, Network, network
from tests.node_fixture import eventually
from tests.spark.test_kill_spark import kill_tree

from timeball.spark.run.session import java_home

SPARK_HOME = Path(pyspark.__file__).parent
MASTER, WORKERS = "m", "xy"
SHARED = ("pending", "ledger", "archive", "rejects")
DEPLOY = "org.apache.spark.deploy"
EXECUTOR = "CoarseGrainedExecutorBackend"
# In a mount namespace: hide the data folder, and put back what is shared.
HIDE = """
set -e
for name in $SHARED; do mkdir -p "$KEPT/$name" "$DATA/$name"; mount --bind "$DATA/$name" "$KEPT/$name"; done
mount -t tmpfs none "$DATA"
for name in $SHARED; do mkdir "$DATA/$name"; mount --bind "$KEPT/$name" "$DATA/$name"; done
exec "$@"
"""


class Standalone:
    """A running cluster. `shared`: the part of the broker's data folder `data` that workers see."""

    def __init__(self, folder: Path, data: Path, net: Network | None, shared: Sequence[str]) -> None:
        self._folder, self._data, self._net, self._shared = folder, data, net, shared
        self.here = self._address(HERE)
        self.master = f"spark://{self._address(MASTER)}:{7077 if net else 17077}"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._port = 18080
        self._log = open(folder / "daemons.log", "ab")  # noqa: SIM115 - closed with the cluster

    def conf(self) -> dict[str, str]:
        """Build the settings of a driver: small executors, and an address that they reach."""
        return {
            "spark.driver.host": self.here,
            "spark.driver.bindAddress": self.here,
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.ui.enabled": "false",
        }

    def start(self) -> None:
        """Start the cluster. Returns when the master knows both workers."""
        self._master = self._daemon(
            MASTER,
            f"{DEPLOY}.master.Master",
            ["--host", self._address(MASTER), "--port", self.master.rpartition(":")[2]],
            self._port,
        )
        for number, name in enumerate(WORKERS, 1):
            hidden = [] if self._net is None else ["unshare", "-m", "sh", "-c", HIDE, "sh"]
            words = ["--host", self._address(name), "--cores", "1", "--memory", "1g"]
            words += ["--work-dir", str(self._folder / name), self.master]
            self.workers[name] = self._daemon(
                name, f"{DEPLOY}.worker.Worker", words, self._port + number, hidden
            )
        eventually(lambda: self._alive() == len(WORKERS), "the master knows both workers")

    def stop(self) -> None:
        """Stop all processes of the cluster."""
        for process in (*self.workers.values(), self._master):
            kill_tree(process.pid)
            process.wait()
        self._log.close()

    def executors(self) -> list[psutil.Process]:
        """List the running executors of all applications."""
        result = []
        for worker in self.workers.values():
            for process in descendants(worker.pid):
                try:
                    if EXECUTOR in " ".join(process.cmdline()):
                        result.append(process)
                except psutil.NoSuchProcess:
                    continue  # it ended while we looked
        return result

    def environment(self) -> dict[str, str]:
        """Build the environment of a daemon or a driver."""
        return environment(
            JAVA_HOME=str(java_home()),
            SPARK_HOME=str(SPARK_HOME),
            PYSPARK_PYTHON=sys.executable,
            SPARK_DAEMON_MEMORY="256m",
            SPARK_DAEMON_JAVA_OPTS="-XX:+UseSerialGC",
            SHARED=" ".join(self._shared),
            DATA=str(self._data),
        )

    def _address(self, name: str) -> str:
        return "127.0.0.1" if self._net is None else self._net.addresses[name]

    def _daemon(
        self, name: str, main: str, words: Sequence[str], port: int, hidden: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        inside = [] if self._net is None else self._net.within(name)
        command = [*inside, *hidden, str(SPARK_HOME / "bin/spark-class"), main, "--webui-port", str(port)]
        env = {**self.environment(), "KEPT": str(self._folder / f"kept-{name}")}
        return subprocess.Popen([*command, *words], env=env, stdout=self._log, stderr=self._log)

    def _alive(self) -> int:
        try:
            page = f"http://{self._address(MASTER)}:{self._port}/json/"
            with urllib.request.urlopen(page, timeout=5) as answer:
                return int(json.load(answer)["aliveworkers"])
        except (urllib.error.URLError, OSError):
            return 0  # it is starting


def descendants(pid: int) -> list[psutil.Process]:
    """List the processes below a process. Empty if the process has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@contextmanager
def standalone(
    folder: Path, data: Path, net: Network | None, shared: Sequence[str] = SHARED
) -> Iterator[Standalone]:
    """Run a cluster within the block."""
    folder.mkdir(exist_ok=True)
    cluster = Standalone(folder, data, net, shared)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@contextmanager
def machines() -> Iterator[Network | None]:
    """Make a network of a master and two workers. Returns None where that is not allowed."""
    with ExitStack() as made:
        yield made.enter_context(network(MASTER + WORKERS)) if os.geteuid() == 0 else None
