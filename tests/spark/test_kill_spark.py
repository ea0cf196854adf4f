"""kill -9 of Spark, and of the broker under it, at any moment: the pipeline catches up, nothing is lost or doubled.

Spark runs as in `timeball up`: a child of the supervisor, with the supervisor's own command line. It is killed with
all its processes, at moments drawn from a seed: while it starts, when a task has just written a file that nobody has
attached, or after some attaches. KILL_SEED makes other moments.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests import bounds
from tests.cli.processes import environment
from tests.crash.siege import CLOCK, Siege, cancel, consume, send_many, send_one
from tests.rounds import only_in_a_siege
from tests.spark import bulk_write

from timeball import Timeball
from timeball.cli.options import SparkOptions
from timeball.cli.up import Supervisor, pipeline_command, pipeline_jobs
from timeball.model.config import Settings
from timeball.model.limits import HOUR_MS
from timeball.model.message import Kind
from timeball.spark.jobs import audit

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # each start of Spark takes ten seconds or twenty

SEED = int(os.environ.get("KILL_SEED", "1"))
BOUND_S = max(bounds.BOUND_S, 120)  # a Spark that starts beside other work takes its time
SETTINGS = Settings(compact_rows=1_000, compact_interval_ms=500)


def eventually(true: Callable[[], object], what: str, bound_s: int = BOUND_S) -> None:
    """Wait as node_fixture's function does, but for longer and with shorter intervals: some moments are short."""
    pause = threading.Event()
    begin_ns = CLOCK.monotonic_ns()
    while not true():
        assert CLOCK.monotonic_ns() - begin_ns < bound_s * 1e9, f"did not happen in {bound_s} s: {what}"
        pause.wait(0.002)


def kill_tree(pid: int) -> int:
    """Kill a process and all processes below it by SIGKILL. Returns their number."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass  # it died of the others' death
    eventually(lambda: all(is_dead(process) for process in family), f"all of {family} are dead")
    return len(family)


def is_dead(process: psutil.Process) -> bool:
    """Check whether a process has ended, also if its parent has not noticed yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def data_files(table: Path) -> set[str]:
    return {path.name for path in table.glob("bucket=*/*.parquet")}


class SupervisedSpark:
    """The supervisor of `timeball up` on its own event loop, and the pid of its child."""

    def __init__(self, endpoint: str) -> None:
        self.pids: list[int] = []
        self.said: list[str] = []
        command = pipeline_command(SETTINGS, endpoint, SparkOptions("local[2]"), pipeline_jobs(SETTINGS))
        self._supervisor = Supervisor(command, self._say)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="supervisor")
        self._thread.start()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._supervisor.stop(), self._loop).result(BOUND_S)
        self._thread.join(BOUND_S)
        for pid in self.pids:
            kill_tree(pid)

    @property
    def pid(self) -> int:
        """The pid of the running child, which may not have been started yet."""
        eventually(lambda: self.pids, "the supervisor has started Spark")
        return self.pids[-1]

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._supervisor.run())

    def _say(self, state: str, sentence: str) -> None:
        self.said.append(sentence)
        if state == "started":
            assert self._supervisor._child is not None
            self.pids.append(self._supervisor._child.pid)


@contextmanager
def supervised(endpoint: str) -> Iterator[SupervisedSpark]:
    """Run Spark under a supervisor until the block ends."""
    spark = SupervisedSpark(endpoint)
    try:
        yield spark
    finally:
        spark.stop()


class Attack:
    """Kills processes at drawn moments."""

    def __init__(self, siege: Siege, spark: SupervisedSpark, ball: Timeball) -> None:
        self.siege, self.spark, self.ball = siege, spark, ball
        self.table = siege.broker.data / "pending"
        self.rng = np.random.default_rng(SEED)
        self.moments: list[str] = []
        self.unattached = 0  # kills after which a file lay there that the table did not know

    def watermark(self) -> int:
        return int(self.ball.status()["watermark"])

    def spark_at_work(self) -> None:
        """Wait until Spark has attached something since this call."""
        before = self.watermark()
        eventually(lambda: self.watermark() > before, f"Spark moves the watermark again ({self.moments})")

    def on_start(self) -> None:
        """Wait until the child has a JVM."""
        pid = self.spark.pid
        eventually(lambda: psutil.Process(pid).children(), "Spark has begun to start")

    def on_file(self) -> None:
        """Wait until a task has written a file, shortly before its attach."""
        known = data_files(self.table)
        eventually(lambda: data_files(self.table) - known, "a new file")

    def on_attach(self) -> None:
        """Wait for one to three more attaches."""
        self.spark_at_work()
        for _ in range(int(self.rng.integers(0, 3))):
            self.spark_at_work()

    def kill_spark(self, moment: Callable[[], None]) -> None:
        """Wait for `moment`, kill Spark, and wait until the supervisor has started it again."""
        self.moments.append(f"Spark {moment.__name__}")
        begin_ns = CLOCK.monotonic_ns()
        moment()
        self.moments[-1] += f" after {(CLOCK.monotonic_ns() - begin_ns) // 10**9} s"
        starts = len(self.spark.pids)
        assert kill_tree(self.spark.pid), f"Spark had died before it was killed: {self.spark.said}"
        self.unattached += bool(data_files(self.table) - set(self.live_names()))
        eventually(lambda: len(self.spark.pids) > starts, "the supervisor starts it again")

    def kill_broker(self) -> None:
        """Kill the broker when Spark has just written a file, so that its attach finds no broker."""
        self.moments.append("broker on_file")
        self.on_file()
        self.siege.strike()
        begin_ns = CLOCK.monotonic_ns()
        self.spark_at_work()
        self.moments[-1] += f", at work again after {(CLOCK.monotonic_ns() - begin_ns) // 10**9} s"

    def live_names(self) -> list[str]:
        return [uri.rpartition("/")[2] for uri in DeltaTable(str(self.table)).file_uris()]


def check_table(siege: Siege, ball: Timeball) -> int:
    """Check that each row of the table is a scheduled message of the log, once. Returns the number of rows."""
    status = ball.status()
    rows = DeltaTable(status["table"]["uri"]).to_pyarrow_table(columns=["seq", "unique_key"])
    seqs = rows.column("seq").to_pylist()
    assert len(seqs) == len(set(seqs)), "the table holds a scheduled message twice"
    log = ball.read_log(status["log"]["first_seq"], status["watermark"], kinds=[Kind.SCHEDULED]).read_all()
    of_log = dict(zip(log.column("seq").to_pylist(), log.column("unique_key").to_pylist(), strict=True))
    result = dict(zip(seqs, rows.column("unique_key").to_pylist(), strict=True))
    foreign = {seq: key for seq, key in result.items() if of_log.get(seq) != key}
    assert not foreign, f"in the table but not in the log: {foreign}"
    settled = set(
        ball.read_log(
            status["log"]["first_seq"], status["log"]["durable_seq"], kinds=[Kind.RELEASE, Kind.CANCEL]
        )
        .read_all()
        .column("source_seq")
        .to_pylist()
    )
    missing = of_log.keys() - settled - result.keys()
    assert not missing, f"waiting, below the watermark, and not in the table: {sorted(missing)[:20]}"
    return len(seqs)


@pytest.mark.siege
@only_in_a_siege
def test_compact_survives_its_own_death_and_the_brokers(tmp_path: Path, spark: SparkSession) -> None:
    # The broker's own compaction would hide a pipeline that does nothing.
    quiet = {"segment-bytes": "8MiB", "checkpoint-interval-ms": "500", "compact-rows": "100000000"}
    # Spark is to be killed, not starved: on two cores clients without a pause leave it little.
    with Siege(tmp_path / "data", SEED, quiet, pause_ms=150) as siege:
        endpoint = siege.broker.endpoint
        with supervised(endpoint) as child, siege.broker.client() as ball:
            siege.clients(send_one, send_many, cancel, consume)
            attack = Attack(siege, child, ball)
            spark_moments = [attack.on_start, attack.on_file, attack.on_attach]
            for i in attack.rng.permutation(len(spark_moments)):
                attack.kill_spark(spark_moments[i])
                if i % 2:
                    attack.kill_broker()
            siege.end_clients()
            end = ball.status()["log"]["durable_seq"]
            eventually(
                lambda: attack.watermark() >= end - SETTINGS.compact_early_rows, "the watermark catches up"
            )
        with siege.broker.client() as ball:
            report = audit.run(spark, endpoint)
            waiting = check_table(siege, ball)
        result = siege.faults()
    figures = f"{siege} waiting={waiting} kills={attack.moments} unattached={attack.unattached} {report}"
    print(figures)
    lines = "\n  ".join(f"{fault.kind}: {fault.text}" for fault in result[:20])
    assert not result, f"{len(result)} faults, {figures}:\n  {lines}"
    assert report.ok and report.overdue == 0, figures
    assert waiting and attack.unattached, f"no kill left a file that nobody had attached: {figures}"


# ---- bulk writes -----------------------------------------------------------------------------------------------

ROWS = 20_000


@contextmanager
def bulk_writing(endpoint: str, first_due_ms: int, *job_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a bulk write of ROWS rows in a process, which is killed when the block ends."""
    command = [sys.executable, bulk_write.__file__, endpoint, str(ROWS), str(first_due_ms), *job_id]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        kill_tree(process.pid)
        process.wait(BOUND_S)


def bodies(table: Path) -> list[str]:
    rows = DeltaTable(str(table)).to_pyarrow_table(columns=["unique_key"])
    return sorted(rows.column("unique_key").to_pylist())


@pytest.mark.siege
@only_in_a_siege
def test_a_bulk_write_that_is_killed_and_run_again_is_there_once(tmp_path: Path) -> None:
    with Siege(tmp_path / "data", SEED, {"compact-rows": "1000000"}) as siege:
        endpoint, table = siege.broker.endpoint, tmp_path / "data" / "pending"
        with siege.broker.client() as ball:
            due_ms, rng = ball.status()["now_ms"] + HOUR_MS * 2, np.random.default_rng(SEED)
            expected = sorted(f"key {i}" for i in range(ROWS))

            def version() -> int:
                return int(ball.status()["table"]["version"])

            def killed_when(true: Callable[[], object], what: str, *job_id: str) -> None:
                with bulk_writing(endpoint, due_ms, *job_id) as process:
                    eventually(lambda: true() or process.poll() is not None, what)
                    assert process.poll() is None, f"it ended before it was killed: {what}"

            empty = version()
            files = int(rng.integers(1, 30))  # written, and nothing attached
            killed_when(lambda: len(data_files(table)) >= files, f"{files} files", "import")
            assert version() == empty and bodies(table) == []
            killed_when(lambda: version() > empty, "attached", "import")  # the answer may not have come
            assert bodies(table) == expected
            with bulk_writing(endpoint, due_ms, "import") as process:
                assert process.wait(BOUND_S) == 0
            assert version() == empty + 1 and bodies(table) == expected
            # Control: a write without a name is another one each time, and that is noticed.
            with bulk_writing(endpoint, due_ms) as process:
                assert process.wait(BOUND_S) == 0
            assert bodies(table) == sorted(expected * 2)
