"""Tasks with an ETA far beyond the visibility timeout, while workers and the broker are killed, also with Redis.

Timeball's broker has a manual clock, so that two hours pass during the kills. With Redis the ETA is as far away as the
kills take, and the visibility timeout is half of that. Hardly any worker lives so long under kills. Thus there is a
test of Redis without kills, too, in which it delivers a task again after each timeout.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from tests.bounds import BOUND_S
from tests.interop.celery_processes import POOLS, ManualBroker, Shop, shop_of
from tests.node_fixture import eventually
from tests.ports import free_ports
from tests.rounds import only_in_a_siege, rounds

from timeball import Timeball

pytestmark = [pytest.mark.interop, pytest.mark.siege, pytest.mark.xdist_group("celery")]

TASKS = rounds(30, 334)  # in each of the three pools
KILLS = rounds(4, 34)
BEFORE = 0.8  # the share of the kills before the ETA
ETA = timedelta(hours=2)
VISIBILITY = timedelta(hours=1)
REDIS_ETA_PER_KILL_S = 10.0  # a worker starts in a few seconds
LEASE_MS = 10_000
RUN_S = 0.05  # the duration of a task
ACKNOWLEDGED_MS = 1_000  # the maximum time from the end of a task to its acknowledgement
STEP_S = 0.25
# After a restart of the broker, workers may take this time for acknowledgements. One that is killed earlier may run a
# task twice.
REACHED_S = 4.0
PENDING = rounds(20_000, 1_000_000)
BODY_BYTES = 800  # of a task with one argument


# ---- brokers --------------------------------------------------------------------------------------------------


class Redis:
    """A Redis that syncs each command, and keeps its port and its folder.

    It has the methods of ManualBroker that `besiege` calls.
    """

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed (Debian: redis-server)")
        (self.port,) = free_ports(1)
        self._command = [
            program, "--port", str(self.port), "--save", "", "--appendonly", "yes", "--appendfsync", "always", "--dir",
            str(folder),
        ]  # fmt: skip
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        import redis

        def answers() -> bool:
            try:
                return bool(redis.Redis(port=self.port).ping())
            except redis.RedisError:
                return False

        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        eventually(answers, "Redis answers")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(BOUND_S)

    stop = kill  # its data is not needed any more

    def now(self) -> datetime:
        """Return the time by which tasks become due."""
        return datetime.now(UTC)

    def wait(self, duration: timedelta) -> None:
        """Wait until the server's time has advanced by `duration`."""
        time.sleep(duration.total_seconds())

    def breathe(self, seconds: float) -> None:
        """Let the workers go on for some seconds."""
        time.sleep(seconds)


# ---- runs of tasks --------------------------------------------------------------------------------------------


def find_doubled(runs: list[dict[str, Any]], killed_ms: dict[int, int]) -> list[str]:
    """Return the names of tasks that ran again although the worker of the earlier run was not killed during it.

    `killed_ms` has the times of kills by the worker's process id. A kill shortly after the end of a run is no fault,
    because the run may not be acknowledged yet.
    """
    doubled, by_name = [], dict[str, list[dict[str, Any]]]()
    for run in runs:
        by_name.setdefault(run["name"], []).append(run)
    for name, events in by_name.items():
        begun = sorted(
            (event for event in events if event["what"] == "begin"), key=lambda event: int(event["ms"])
        )
        for run in begun[:-1]:
            ends_ms = [
                int(event["ms"])
                for event in events
                if event["what"] == "end" and event["pid"] == run["pid"] and event["ms"] >= run["ms"]
            ]
            end_ms = min(ends_ms, default=run["ms"] + 10**9)  # a run that has not ended was still under way
            died_ms = killed_ms.get(run["worker"])
            if died_ms is None or not run["ms"] <= died_ms <= end_ms + ACKNOWLEDGED_MS:
                doubled.append(name)
    return doubled


def test_a_task_that_runs_twice_is_noticed() -> None:
    """The second run of `twice` begins after the end of the first. The two runs of `beside` are at the same time."""
    runs = [
        {"name": name, "what": what, "ms": ms, "pid": pid, "worker": pid}
        for name, what, ms, pid in [
            ("once", "begin", 1, 7), ("once", "end", 2, 7),
            ("died", "begin", 5_000, 7), ("died", "begin", 6_000, 8), ("died", "end", 6_001, 8),
            ("twice", "begin", 1, 7), ("twice", "end", 2, 7), ("twice", "begin", 4_000, 8), ("twice", "end", 4_001, 8),
            ("beside", "begin", 1, 8), ("beside", "begin", 2, 9), ("beside", "end", 3, 9), ("beside", "end", 4, 8),
        ]
    ]  # fmt: skip
    assert find_doubled(runs, {7: 5_500}) == ["twice", "beside"]


def report(title: str, shop: Shop, killed_ms: dict[int, int]) -> list[str]:
    """Print how often tasks ran, and return the names of the doubled ones."""
    names = find_doubled(shop.runs(), killed_ms)
    begun = sum(run["what"] == "begin" for run in shop.runs())
    print(f"{title}: {TASKS} tasks, {len(killed_ms)} workers killed, {begun} runs, {len(names)} doubled")
    return names


def besiege(
    system: ManualBroker | Redis, shop: Shop, pool: str, eta: timedelta, kills: int = KILLS
) -> dict[int, int]:
    """Send tasks, and kill workers and the broker until all tasks have run. Return worker -> time of its kill in ms."""
    chance, killed_ms = random.Random(pool), dict[int, int]()
    alive = [shop.worker(*POOLS[pool]) for _ in range(2)]
    for worker in alive:
        worker.wait_ready()
    due = system.now() + eta
    shop.send([str(number) for number in range(TASKS)], seconds=RUN_S, etas=[due] * TASKS)
    before = int(kills * BEFORE)
    for kill in range(kills):
        if kill < before:
            system.wait(max((due - system.now()) / (before - kill + 1), timedelta(0)))
        elif kill == before:
            system.wait(max(due - system.now(), timedelta(0)))
        for _ in range(chance.randint(1, 4)):
            system.breathe(STEP_S)
        if kill % 4 == 3:  # each fourth kill is that of the broker, the others are those of workers
            system.kill()
            system.start()
            for _ in range(int(REACHED_S / STEP_S)):
                system.breathe(STEP_S)
        else:
            worker = alive.pop(chance.randrange(2))
            killed_ms[worker.pid] = time.time_ns() // 1_000_000
            worker.kill()
            alive.append(shop.worker(*POOLS[pool]))
            alive[-1].wait_ready()

    def all_have_run() -> bool:
        system.breathe(STEP_S)
        return len(shop.ended()) == TASKS

    eventually(all_have_run, "all tasks have run")
    for _ in range(int(1.2 * LEASE_MS / 1_000 / STEP_S)):  # a task that is still leased would run again
        system.breathe(STEP_S)
    return killed_ms


@contextmanager
def started(make: Callable[[Path], ManualBroker | Redis], folder: Path) -> Iterator[ManualBroker | Redis]:
    """Run a broker or a Redis with its data in `folder`."""
    system = make(folder)
    try:
        yield system
    finally:
        system.stop()


@pytest.mark.parametrize("pool", POOLS)
def test_a_task_with_a_far_eta_is_repeated_only_if_its_worker_is_killed(tmp_path: Path, pool: str) -> None:
    """The ETA is beyond the visibility timeout."""
    options = {"lease_ms": LEASE_MS, "visibility_timeout": VISIBILITY.total_seconds()}
    with (
        started(ManualBroker, tmp_path / "data") as system,
        shop_of(tmp_path, system.url, task_acks_late=True, broker_transport_options=options) as shop,
    ):
        assert not report(pool, shop, besiege(system, shop, pool, ETA))


@only_in_a_siege
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("pool", POOLS)
def test_on_redis_each_task_with_a_far_eta_runs_under_kills(tmp_path: Path, pool: str) -> None:
    """The ETA is beyond the visibility timeout. The test prints how many tasks are doubled."""
    eta_s = KILLS * REDIS_ETA_PER_KILL_S
    options = {"visibility_timeout": eta_s / 2}
    with (
        started(Redis, tmp_path) as system,
        shop_of(tmp_path, system.url, task_acks_late=True, broker_transport_options=options) as shop,
    ):
        killed_ms = besiege(system, shop, pool, timedelta(seconds=eta_s))
        report(pool, shop, killed_ms)


@only_in_a_siege
@pytest.mark.timeout(600)
def test_redis_doubles_a_task_that_waits_longer_than_the_visibility_timeout(tmp_path: Path) -> None:
    """A worker checks once in 100 s whether messages must be delivered again (kombu 5.6)."""
    options = {"visibility_timeout": 30}
    with (
        started(Redis, tmp_path) as system,
        shop_of(tmp_path, system.url, task_acks_late=True, broker_transport_options=options) as shop,
    ):
        assert report(
            "without kills", shop, besiege(system, shop, "prefork", timedelta(seconds=150), kills=0)
        )


# ---- memory ---------------------------------------------------------------------------------------------------


def test_pending_tasks_take_no_memory_of_a_worker(tmp_path: Path) -> None:
    """The second worker starts while PENDING tasks with an ETA are pending."""
    with started(ManualBroker, tmp_path / "data") as system, shop_of(tmp_path, system.url) as shop:
        assert isinstance(system, ManualBroker)
        without_mb = _memory_mb(shop, "without")
        _send_columns(system, PENDING)
        with_mb = _memory_mb(shop, "with")
        print(f"memory of a worker: {without_mb:.1f} MiB, with {PENDING} pending tasks {with_mb:.1f} MiB")
        assert with_mb - without_mb < 4


def _memory_mb(shop: Shop, name: str) -> float:
    """Return the memory of the main process of a worker that has run a task, in MiB."""
    worker = shop.worker(*POOLS["prefork"])
    worker.wait_ready()
    shop.send([name])
    eventually(lambda: shop.ended()[name] == 1, "a task")
    threading.Event().wait(2)  # longer than the worker takes to fetch all tasks that it may fetch
    memory_mb = psutil.Process(worker.pid).memory_info().rss / 2**20
    worker.end()
    return memory_mb


def _send_columns(system: ManualBroker, count: int) -> None:
    """Send `count` messages of the size of a task, with an ETA."""
    due_ms = int((system.now() + ETA).timestamp() * 1000)
    body = pa.repeat(pa.scalar(b"x" * BODY_BYTES, pa.binary()), count)
    with Timeball(system.endpoint, flight=system.flight) as ball:
        sent = ball.send_many(pa.table({"body": body, "due_ms": pa.repeat(due_ms, count)}), topic="celery")
    assert sent.rows == count
