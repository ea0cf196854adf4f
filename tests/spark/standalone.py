"""Spark's own cluster, a master and two workers, each as isolated as this machine allows.

With root each has a network namespace, and each worker a mount namespace in which the broker's data folder is empty but
for the folders that are shared, as a mount of NFS would have it: so nothing but Flight and these folders is common.
Without root all of it runs on addresses of the loopback, with everything shared. The broker and the driver run outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pyspark
from tests.cli.processes import environment
from tests.cluster.namespaces import HERE, Network, network
from tests.java_options import java_options
from tests.spark.test_kill_spark import eventually, kill_tree

from timeball.spark.run.session import java_home

SPARK_HOME = Path(pyspark.__file__).parent
MASTER, WORKERS = "m", "xy"
SHARED = ("pending", "ledger", "archive", "rejects")
DEPLOY = "org.apache.spark.deploy"
EXECUTOR, DRIVER = "CoarseGrainedExecutorBackend", "DriverWrapper"
LOOPBACK = {HERE: "127.0.0.1", MASTER: "127.0.0.1", "x": "127.0.0.2", "y": "127.0.0.3"}
# In a mount namespace: hide the data folder, and put back what is shared.
HIDE = """
set -e
for name in $SHARED; do mkdir -p "$KEPT/$name" "$DATA/$name"; mount --bind "$DATA/$name" "$KEPT/$name"; done
mount -t tmpfs none "$DATA"
for name in $SHARED; do mkdir "$DATA/$name"; mount --bind "$KEPT/$name" "$DATA/$name"; done
exec "$@"
"""


EXECUTORS = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.executor.extraJavaOptions": f"{java_options()} -XX:+UseSerialGC",
    "spark.ui.enabled": "false",
}


class Standalone:
    """A running cluster. `shared`: the part of the broker's data folder `data` that workers see."""

    def __init__(self, folder: Path, data: Path, net: Network | None, shared: Sequence[str]) -> None:
        self._folder, self._data, self._net, self._shared = folder, data, net, shared
        self.here = self._address(HERE)
        self.master = f"spark://{self._address(MASTER)}:{7077 if net else 17077}"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._port, self._rest_port = 18080, 16066
        self._log = open(folder / "daemons.log", "ab")  # noqa: SIM115 - closed with the cluster

    def conf(self) -> dict[str, str]:
        """Build the settings of a driver outside: a small executor on each worker, and an address that they reach."""
        return {**EXECUTORS, "spark.driver.host": self.here, "spark.driver.bindAddress": self.here}

    def start(self) -> None:
        """Start the cluster. Returns when the master knows both workers."""
        self._master = self._daemon(
            MASTER,
            f"{DEPLOY}.master.Master",
            ["--host", self._address(MASTER), "--port", self.master.rpartition(":")[2]],
            self._port,
        )
        for name in WORKERS:
            self.start_worker(name)
        self.wait_for_workers()

    def start_worker(self, name: str) -> None:
        """Start a worker. It has room for a driver and three executors, as the other worker may be lost."""
        hidden = [] if self._net is None else ["unshare", "-m", "sh", "-c", HIDE, "sh"]
        words = ["--host", self._address(name), "--cores", "4", "--memory", "3g"]
        words += ["--work-dir", str(self._folder / name), self.master]
        port = self._port + 1 + WORKERS.index(name)
        self.workers[name] = self._daemon(name, f"{DEPLOY}.worker.Worker", words, port, hidden)

    def wait_for_workers(self) -> None:
        """Wait until the master knows both workers."""
        eventually(lambda: self._alive() == len(WORKERS), "the master knows both workers")

    def stop(self) -> None:
        """Stop all processes of the cluster."""
        for process in (*self.workers.values(), self._master):
            kill_tree(process.pid)
            process.wait()
        self._log.close()

    def executors(self, app: str = "") -> list[psutil.Process]:
        """List the running executors of an application, by default of all."""
        return [
            process
            for name in self.workers
            for process, command in self._processes(name)
            if EXECUTOR in command and app in command
        ]

    def drivers(self) -> dict[str, psutil.Process]:
        """List the running drivers that were submitted to the master, by the worker on which they run."""
        return {
            name: process
            for name in self.workers
            for process, command in self._processes(name)
            if DRIVER in command
        }

    def submit(self, script: Path, *words: str, conf: Mapping[str, str]) -> None:
        """Let the master run a Python driver on a worker, and run it again there or on another one if it is lost.

        spark-submit cannot: it refuses `--deploy-mode cluster` for Python. The master's REST server runs spark-submit
        itself on a worker.
        """
        properties = {
            "spark.app.name": script.stem,
            "spark.driver.memory": "512m",
            "spark.driver.cores": "1",
            "spark.driver.extraJavaOptions": f"{java_options()} -XX:+UseSerialGC",
            "spark.driver.supervise": "true",
        }
        settings = {**EXECUTORS, **conf}
        options = [word for pair in settings.items() for word in ("--conf", "=".join(pair))]
        request = {
            "action": "CreateSubmissionRequest",
            "appResource": "",
            "mainClass": f"{DEPLOY}.SparkSubmit",
            "appArgs": ["--master", self.master, *options, str(script), *words],
            "clientSparkVersion": pyspark.__version__,
            "environmentVariables": {},
            "sparkProperties": properties,
        }
        address = f"http://{self._address(MASTER)}:{self._rest_port}/v1/submissions/create"
        headers = {"Content-Type": "application/json;charset=UTF-8"}
        call = urllib.request.Request(address, json.dumps(request).encode(), headers)
        with urllib.request.urlopen(call, timeout=60) as answer:
            document = json.load(answer)
        assert document["success"], document

    def _processes(self, name: str) -> Iterator[tuple[psutil.Process, str]]:
        """Yield the processes of a worker with their command lines."""
        for process in descendants(self.workers[name].pid):
            try:
                yield process, " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue  # it ended while we looked

    def environment(self) -> dict[str, str]:
        """Build the environment of a daemon or a driver."""
        return environment(
            JAVA_HOME=str(java_home()),
            SPARK_HOME=str(SPARK_HOME),
            PYSPARK_PYTHON=sys.executable,
            SPARK_DAEMON_MEMORY="256m",
            SPARK_DAEMON_JAVA_OPTS=f"{java_options()} -XX:+UseSerialGC",
            SPARK_MASTER_OPTS=f"-Dspark.master.rest.enabled=true -Dspark.master.rest.port={self._rest_port}",
            SHARED=" ".join(self._shared),
            DATA=str(self._data),
        )

    def _address(self, name: str) -> str:
        return LOOPBACK[name] if self._net is None else self._net.addresses[name]

    def _daemon(
        self, name: str, main: str, words: Sequence[str], port: int, hidden: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a daemon of Spark, the class `main`, on the machine `name`. `hidden`: a command to run it with."""
        inside = [] if self._net is None else self._net.within(name)
        command = [*inside, *hidden, str(SPARK_HOME / "bin/spark-class"), main, "--webui-port", str(port)]
        env = {
            **self.environment(),
            "KEPT": str(self._folder / f"kept-{name}"),
            "SPARK_LOCAL_IP": self._address(name),
        }
        return subprocess.Popen([*command, *words], env=env, stdout=self._log, stderr=self._log)

    def _alive(self) -> int:
        """Ask the master for the number of live workers. 0 if it does not answer."""
        try:
            page = f"http://{self._address(MASTER)}:{self._port}/json/"
            with urllib.request.urlopen(page, timeout=5) as answer:
                return int(json.load(answer)["aliveworkers"])
        except (OSError, ValueError):
            return 0  # it is starting, and may answer with a page that is no JSON


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
