"""The cases of docs/pipeline.md: whatever a cluster does, the rows of a write are there once, or not at all.

All cases share a master, two workers and a broker process. Two readers that share no code with the writers look for the
rows: DuckDB in the Delta log and the Parquet files, and the broker over HTTP.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import numpy as np
import pytest
from tests.cli.processes import environment, timeball
from tests.crash.siege import BrokerProcess
from tests.ports import free_ports
from tests.rounds import rounds
from tests.spark import cluster_writes
from tests.spark.cluster_writes import ENDED, SAID, Write, mark
from tests.spark.standalone import SPARK_HOME, Standalone, machines, standalone
from tests.spark.test_kill_spark import SEED, eventually, is_dead, kill_tree
from tests.spark.traffic import visible

from timeball.model.limits import HOUR_MS

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("spark cluster"),  # one process makes the cluster, once
]

ROWS = 2_000
TINY_PARTITIONS = rounds(200, 2_000)  # a task of two rows takes 50 ms of CPU
SHUFFLE_PARTITIONS = 200
JOB = Path(__file__).parents[2] / "deploy/timeball-job.py"
CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"
# The broker does not compact, as executors could not tell its files from theirs.
BROKER = {"segment-bytes": "16MiB", "compact-rows": "100000000"}
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.5",
    "spark.speculation.efficiency.enabled": "false",
}
# Executors leave after a second without work, also those that have written shuffle files.
DYNAMIC_ALLOCATION = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.timeout": "1s",
    "spark.dynamicAllocation.executorIdleTimeout": "1s",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "2",
}
# Of each file of the table that is live: its rows of one topic.
LIVE_FILES = """
select path from (
    select coalesce("add".path, "remove".path) as path, arg_max("add".path is not null, filename) as live
    from read_json(?, format = 'newline_delimited', filename = true,
        columns = {'add': 'struct(path varchar)', 'remove': 'struct(path varchar)'})
    where "add".path is not null or "remove".path is not null
    group by 1
) where live
"""
ROWS_OF = (
    "select unique_key, due_ms, decode(body), filename from read_parquet(?, filename = true) where topic = ?"
)


# ---- the rows of a write, as two readers find them ---------------------------------------------------------------


def in_files(table: Path, topic: str) -> list[tuple[str, int, str, str]]:
    """Read the rows of a topic with DuckDB: (unique key, due time, body, file)."""
    log = table / "_delta_log"
    assert (log / f"{0:020}.json").exists(), "the log has been cut"
    with duckdb.connect() as reader:
        paths = reader.execute(LIVE_FILES, [f"{log}/*.json"]).fetchall()
        files = [f"{table}/{urllib.parse.unquote(path)}" for (path,) in paths]
        return reader.execute(ROWS_OF, [files, topic]).fetchall() if files else []


def over_http(port: int, topic: str) -> list[tuple[str, int]]:
    """Read the pending messages of a topic from the broker: (id, due time). There is no topic before its first one."""
    found: list[tuple[str, int]] = []
    query = {"topic": topic, "max": "1000"}
    while True:
        address = f"http://127.0.0.1:{port}/v1/messages?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                page = json.load(answer)
        except urllib.error.HTTPError as error:
            assert error.code == 404, error.read()
            return []
        found += [(message["id"], message["due_ms"]) for message in page["messages"]]
        if page.get("next_page") is None:
            return found
        query["page"] = page["next_page"]


def compare(expected: Iterable[object], found: Iterable[object]) -> None:
    wanted, got = Counter(expected), Counter(found)
    lost, foreign = list((wanted - got).elements()), list((got - wanted).elements())
    assert not lost, f"{len(lost)} lost, as {lost[:3]}"
    assert not foreign, f"{len(foreign)} doubled or wrong, as {foreign[:3]}"


@dataclass
class Room:
    """The cluster, the broker process, and the rows that the cases have scheduled. `table` is the pending table."""

    cluster: Standalone
    broker: BrokerProcess
    folder: Path
    endpoint: str
    first_due_ms: int
    scheduled: Counter[str] = field(default_factory=Counter)

    @property
    def table(self) -> Path:
        return self.broker.data / "pending"

    def write(self, case: str, rows: int = ROWS, **options: Any) -> Write:
        marks = self.folder / "marks" / case
        marks.mkdir(parents=True)
        return Write(
            case=case,
            rows=rows,
            first_due_ms=self.first_due_ms,
            endpoint=self.endpoint,
            marks=str(marks),
            **options,
        )

    def check(self, write: Write) -> Counter[str]:
        """Check that all rows of a write are there once. Returns the rows of each file."""
        rows = in_files(self.table, write.case)
        numbers = range(write.rows)
        compare(
            ((f"{write.case} {i}", write.due_ms(i), f"body {i}") for i in numbers), (row[:3] for row in rows)
        )
        pending = over_http(self.broker.http_port, write.case)
        compare(((f"{write.case} {i}", write.due_ms(i)) for i in numbers), pending)
        self.scheduled[write.case] = write.rows
        return Counter(row[3] for row in rows)

    def check_absent(self, write: Write) -> None:
        """Check that no row of a write is there."""
        assert in_files(self.table, write.case) == []
        assert over_http(self.broker.http_port, write.case) == []

    def commits(self) -> int:
        return len(list((self.table / "_delta_log").glob("*.json")))


def marked(write: Write, name: str) -> bool:
    return (Path(write.marks) / name).exists()


def wait_mark(write: Write, name: str) -> None:
    ended = Path(write.marks) / ENDED
    eventually(lambda: marked(write, name) or ended.exists(), f"{write.case}: {name}")
    assert marked(write, name), f"it ended before {name}: {ended.read_text()}"


class Driver:
    """A running cluster_writes.py. `app`: the id of its application."""

    def __init__(self, process: subprocess.Popen[str], conf: Mapping[str, str]) -> None:
        self._process = process
        self._tell(json.dumps(conf))
        self.app: str = self._hear()["app"]

    def begin(self, write: Write) -> None:
        self._tell(msgspec.json.encode(write).decode())

    def end(self) -> None:
        """Wait for the end of a write, which must not fail."""
        error = self._hear()
        assert error is None, error

    def run(self, write: Write) -> None:
        self.begin(write)
        self.end()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _hear(self) -> Any:
        """Wait for the driver's next answer, a line that begins with SAID. Returns its JSON value."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(SAID):
                return json.loads(line.removeprefix(SAID))
        raise AssertionError("the driver has ended: see drivers.log")


@contextmanager
def driving(room: Room, conf: Mapping[str, str]) -> Iterator[Driver]:
    """Run cluster_writes.py as a driver, in a process that is killed when the block ends."""
    with open(room.folder / "drivers.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, cluster_writes.__file__],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield Driver(process, conf)
        finally:
            kill_tree(process.pid)
            process.communicate()


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    """A broker and a Spark cluster, on separate machines if `machines` can make them."""
    folder = tmp_path_factory.mktemp("cluster")
    data = folder / "data"
    with ExitStack() as opened:
        net = opened.enter_context(machines())
        reached = {} if net is None else {"host": "0.0.0.0", "allow-plaintext": ""}
        broker = BrokerProcess(data, {**BROKER, **reached})
        opened.callback(broker.clear)
        assert broker.start()
        with broker.client() as ball:
            now_ms = ball.status()["now_ms"]
        cluster = opened.enter_context(standalone(folder / "spark", data, net))
        port = broker.endpoint.rpartition(":")[2]
        yield Room(cluster, broker, folder, f"grpc://{cluster.here}:{port}", now_ms + 3 * HOUR_MS)


@pytest.fixture(scope="module")
def driver(room: Room) -> Iterator[Driver]:
    """A driver outside of the cluster. Speculation is on in all of its writes."""
    with driving(room, {"spark.master": room.cluster.master, **room.cluster.conf(), **SPECULATION}) as one:
        yield one


def kill_executors(room: Room, driver: Driver) -> None:
    """Kill all executors of the driver's application, and wait until they are dead."""
    executors = room.cluster.executors(driver.app)
    assert executors
    for executor in executors:
        executor.kill()
    eventually(lambda: all(map(is_dead, executors)), "the executors are dead")


# ---- tasks and executors -----------------------------------------------------------------------------------------


def test_speculation(room: Room, driver: Driver) -> None:
    write = room.write("speculation", fault="sleep")
    driver.run(write)
    assert marked(write, "half") and marked(write, "copied")
    room.check(write)


def test_task_retries(room: Room, driver: Driver) -> None:
    write = room.write("retries", fault="fail")
    driver.run(write)
    assert marked(write, "raised") and marked(write, "exited")
    room.check(write)


def test_executors_killed_while_they_write(room: Room, driver: Driver) -> None:
    write = room.write("executors-half", fault="wait")
    driver.begin(write)
    wait_mark(write, "half")
    room.check_absent(write)
    kill_executors(room, driver)
    mark(write.marks, "killed")
    driver.end()
    room.check(write)


def test_executors_killed_before_the_attach(room: Room, driver: Driver) -> None:
    write = room.write("executors-written", fault="hold")
    driver.begin(write)
    wait_mark(write, "written")
    room.check_absent(write)
    kill_executors(room, driver)
    for name in ("attach", "answer"):
        mark(write.marks, name)
    driver.end()
    room.check(write)


# ---- partitions --------------------------------------------------------------------------------------------------


def test_coalesced_partitions(room: Room, driver: Driver) -> None:
    conf = {"spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS), "spark.sql.adaptive.enabled": "true"}
    write = room.write("coalesced", shape="shuffled", conf=conf)
    driver.run(write)
    assert len(room.check(write)) < SHUFFLE_PARTITIONS / 10


@pytest.mark.siege
def test_tiny_partitions(room: Room, driver: Driver) -> None:
    write = room.write("tiny", 2 * TINY_PARTITIONS, partitions=TINY_PARTITIONS)
    driver.run(write)
    room.check(write)


def test_skewed_partition(room: Room, driver: Driver) -> None:
    write = room.write("skewed", shape="skewed", partitions=8)
    driver.run(write)
    assert max(room.check(write).values()) >= 0.95 * ROWS


def test_skewed_campaign(room: Room, driver: Driver) -> None:
    write = room.write("skewed-campaign", shape="skewed", campaign=True)
    driver.run(write)
    room.check(write)  # the broker may have merged the files meanwhile


# ---- the attach --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["asked", "drawn", "committed"])
def test_broker_killed_during_the_attach(room: Room, driver: Driver, moment: str) -> None:
    """`asked`: the broker has not read the request. `committed`: the files are in the table."""
    write = room.write(f"restart-{moment}", fault="hold")
    driver.begin(write)
    wait_mark(write, "written")
    room.check_absent(write)
    commits = room.commits()
    if moment == "asked":
        os.kill(room.broker.pid, signal.SIGSTOP)
    mark(write.marks, "attach")
    wait_mark(write, "attaching")
    if moment == "drawn":
        threading.Event().wait(float(np.random.default_rng(SEED).uniform(0, 0.1)))
    elif moment == "committed":
        eventually(lambda: room.commits() > commits, "the attach is in the table")
    room.broker.kill()
    assert room.broker.start()
    mark(write.marks, "answer")
    driver.end()
    room.check(write)


def test_rows_that_are_there_twice_are_noticed(room: Room, driver: Driver) -> None:
    write = room.write("doubled", 20)
    driver.run(write)
    room.check(write)
    driver.run(msgspec.structs.replace(write, name="doubled again"))
    with pytest.raises(AssertionError, match="20 doubled"):
        room.check(write)
    room.scheduled[write.case] = 40


# ---- drivers -----------------------------------------------------------------------------------------------------


def test_driver_lost_before_and_after_the_attach(room: Room, driver: Driver) -> None:
    """The master runs it again: on the other worker when its machine dies, else on the same worker."""
    cluster = room.cluster
    write = room.write("drivers", fault="hold", shape="shuffled")
    script = Path(cluster_writes.__file__)
    cluster.submit(script, msgspec.json.encode(write).decode(), conf=DYNAMIC_ALLOCATION)
    wait_mark(write, "written")
    eventually(
        lambda: len(cluster.executors()) == len(cluster.executors(driver.app)), "its executors have left"
    )
    room.check_absent(write)
    [lost] = cluster.drivers()
    kill_tree(cluster.workers[lost].pid)
    cluster.workers[lost].wait()
    (Path(write.marks) / "written").unlink()

    wait_mark(write, "written")
    room.check_absent(write)
    [(name, process)] = cluster.drivers().items()
    assert name != lost
    mark(write.marks, "attach")
    wait_mark(write, "attached")
    room.check(write)
    kill_tree(process.pid)

    mark(write.marks, "answer")
    wait_mark(write, ENDED)
    assert (Path(write.marks) / ENDED).read_text() == "null"
    room.check(write)
    cluster.start_worker(lost)
    cluster.wait_for_workers()


def test_cluster_mode_is_refused(room: Room) -> None:
    words = [
        str(SPARK_HOME / "bin/spark-submit"),
        "--master",
        room.cluster.master,
        "--deploy-mode",
        "cluster",
    ]
    done = subprocess.run(
        [*words, str(JOB), "audit"],
        env=room.cluster.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "not supported for python applications on standalone clusters" in done.stderr


def test_connect(room: Room) -> None:
    for module in ("grpc_status", "pandas", "zstandard"):
        pytest.importorskip(module, reason="pyspark[connect] is not installed")
    [port] = free_ports(1)
    conf = {
        **room.cluster.conf(),
        "spark.connect.grpc.binding.address": room.cluster.here,
        "spark.connect.grpc.binding.port": str(port),
    }
    options = [word for pair in conf.items() for word in ("--conf", "=".join(pair))]
    words = [
        str(SPARK_HOME / "bin/spark-submit"),
        "--master",
        room.cluster.master,
        "--class",
        CONNECT,
        *options,
    ]
    with open(room.folder / "connect.log", "ab") as log:
        memory = {"SPARK_DAEMON_MEMORY": "512m"}  # to spark-submit, this server is a daemon
        env = {**room.cluster.environment(), **memory}
        server = subprocess.Popen(words, env=env, stdout=log, stderr=log)
        try:
            eventually(lambda: is_open(room.cluster.here, port) or server.poll() is not None, "it listens")
            assert server.poll() is None, "it has ended: see connect.log"
            with driving(room, {"remote": f"sc://{room.cluster.here}:{port}"}) as client:
                write = room.write("connect", fault="fail")
                client.run(write)
        finally:
            kill_tree(server.pid)
            server.wait()
    assert marked(write, "raised") and marked(write, "exited")
    room.check(write)


def is_open(host: str, port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex((host, port)) == 0


# ---- all of them -------------------------------------------------------------------------------------------------


def test_books_balance_and_rows_are_released_once(room: Room) -> None:
    assert room.scheduled, "run the other tests with this one"
    endpoint = room.broker.endpoint.replace("0.0.0.0", "127.0.0.1")
    done = timeball("audit", "--no-spark", "--json", "--endpoint", endpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    counts = [report[name] for name in ("accepted", "pending", "lost", "duplicate", "unknown")]
    assert counts == [room.scheduled.total(), room.scheduled.total(), 0, 0, 0]
    with room.broker.client() as ball:
        ball.selections.release("TRUE")
        for case, rows in room.scheduled.items():
            eventually(lambda case=case, rows=rows: visible(ball, case) >= rows, f"{case} is released")
        assert {case: visible(ball, case) for case in room.scheduled} == dict(room.scheduled)
