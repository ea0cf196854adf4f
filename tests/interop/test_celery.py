"""Real workers of Celery: prefork, threads and solo; kills of workers and brokers; the same script on Redis."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.cli.processes import Running, environment, timeball
from tests.docs_pages import page
from tests.node_fixture import eventually
from tests.ports import free_ports
from tests.rounds import rounds

from timeball import Timeball

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("celery")]

HERE = Path(__file__).parent
KILLS = rounds(6, 40)
LEASE_MS = 3_000
TASKS_PER_KILL = 12
TIMEBALL = {"broker_transport_options": {"lease_ms": LEASE_MS}}
PAGE_URL, PAGE_REDIS, PAGE_DATA = "127.0.0.1:7480", "127.0.0.1:6379", "/tmp/shop-data"


# ---- processes ------------------------------------------------------------------------------------------------


class Broker:
    """`timeball serve`, which keeps its port and its folder."""

    def __init__(self, data: Path) -> None:
        (self.port,) = free_ports(1)
        self._data = data
        self.start()

    def start(self) -> None:
        arguments = ["--json", "--port", "0", "--data", str(self._data)]
        self._process = Running("serve", *arguments, TIMEBALL_HTTP_PORT=str(self.port))
        self._process.wait_line(event="ready")

    def kill(self) -> None:
        self._process.end(signal.SIGKILL)

    def stop(self) -> None:
        self._process.end()

    @property
    def url(self) -> str:
        return f"timeball://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """A Redis without files. Yields its port."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (Debian: redis-server)")
    (port,) = free_ports(1)
    options = ["--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as process:
        try:
            import redis

            with redis.Redis(port=port) as client:
                eventually(lambda: _answers(client), "Redis answers")
            yield port
        finally:
            process.terminate()


def _answers(client: Any) -> bool:
    import redis

    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


class Shop:
    """The application: its workers, and the runs of its tasks."""

    def __init__(self, folder: Path, url: str, **settings: Any) -> None:
        self.folder, self.url = folder, url
        self.runs_file = folder / "runs"
        self.runs_file.touch()
        self._settings = settings
        self.workers: list[Worker] = []

    @property
    def environment(self) -> dict[str, str]:
        return {
            "SHOP_BROKER": self.url,
            "SHOP_RUNS": str(self.runs_file),
            "SHOP_OPTIONS": json.dumps(self._settings),
        }

    def worker(self, *options: str) -> Worker:
        self.workers.append(Worker(self, len(self.workers), *options))
        return self.workers[-1]

    def celery(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "celery_shop", *arguments],
            env=environment(**self.environment), cwd=HERE, capture_output=True, text=True, timeout=BOUND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def send(self, names: list[str], *, seconds: float = 0.0, etas: list[datetime] | None = None) -> None:
        """Send tasks in a process of its own, as a producer does."""
        etas_text = None if etas is None else [eta.isoformat() for eta in etas]
        program = (
            "import json, sys, celery_shop\n"
            "names, seconds, etas = json.loads(sys.stdin.read())\n"
            "for number, name in enumerate(names):\n"
            "    celery_shop.run.apply_async([name, seconds], eta=etas[number] if etas else None)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], input=json.dumps([names, seconds, etas_text]),
            env=environment(**self.environment), cwd=HERE, capture_output=True, text=True, timeout=BOUND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def runs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.runs_file.read_text().splitlines()]

    def ended(self) -> Counter[str]:
        return Counter(run["name"] for run in self.runs() if run["what"] == "end")

    def stop(self) -> None:
        for worker in self.workers:
            worker.kill()


class Worker:
    """`celery worker`, in a process group of its own."""

    def __init__(self, shop: Shop, number: int, *options: str) -> None:
        self.name = f"w{number}@test"
        self._log = (shop.folder / f"worker-{number}.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "celery_shop", "worker", "-n", self.name, "-l", "INFO", *options],
            env=environment(**shop.environment), cwd=HERE, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def wait_ready(self) -> None:
        eventually(lambda: " ready." in self.log() or self._process.poll() is not None, "a worker is ready")
        assert self._process.poll() is None, self.log()

    def kill(self) -> None:
        """Kill -9 the worker and its pool."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(BOUND_S)
        self._log.close()

    def end(self) -> None:
        """Stop the worker in order."""
        self._process.terminate()
        self._process.wait(BOUND_S)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    running = Broker(tmp_path / "data")
    yield running
    running.stop()


@contextmanager
def shop_of(folder: Path, url: str, **settings: Any) -> Iterator[Shop]:
    shop = Shop(folder, url, **settings)
    try:
        yield shop
    finally:
        shop.stop()


POOLS = {
    "prefork": ["-P", "prefork", "-c", "2"],
    "threads": ["-P", "threads", "-c", "4"],
    "solo": ["-P", "solo"],
}


def in_seconds(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


# ---- workers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_tasks_run_once_and_not_before_their_etas(
    broker: Broker, tmp_path: Path, pool: str, late: bool
) -> None:
    with shop_of(tmp_path, broker.url, task_acks_late=late) as shop:
        shop.worker(*POOLS[pool]).wait_ready()
        etas = {f"eta-{number}": in_seconds(2 + number / 20) for number in range(40)}
        shop.send([f"now-{number}" for number in range(40)])
        shop.send(list(etas), etas=list(etas.values()))
        eventually(lambda: len(shop.ended()) == 80, "all tasks have run")
        shop.workers[0].end()
        assert set(shop.ended().values()) == {1}
        for run in shop.runs():
            if run["name"] in etas:
                assert run["ms"] >= int(etas[run["name"]].timestamp() * 1000)
        with Timeball(broker.endpoint) as ball:
            (state,) = ball.groups("celery")
            assert [(each.lag, each.in_flight) for each in state.topics] == [(0, 0)]


def test_a_child_that_dies_is_replaced_and_its_task_becomes_a_dead_letter(
    broker: Broker, tmp_path: Path
) -> None:
    with shop_of(tmp_path, broker.url, **TIMEBALL) as shop:
        worker = shop.worker(*POOLS["prefork"])
        worker.wait_ready()
        program = "import celery_shop\ncelery_shop.die.delay('poison')\n"
        subprocess.run(
            [sys.executable, "-c", program], env=environment(**shop.environment), cwd=HERE, check=True
        )
        with Timeball(broker.endpoint) as ball:
            eventually(lambda: _dead_letters(ball), "a dead letter")
        assert Counter(run["name"] for run in shop.runs()) == {"poison": 17}
        shop.send(["healthy"])
        eventually(lambda: shop.ended()["healthy"] == 1, "the pool works on")
        worker.end()


def _dead_letters(ball: Timeball) -> int:
    return len(ball.dead_letters("celery").dead_letters)


def test_a_worker_that_stops_gives_its_tasks_back_at_once(broker: Broker, tmp_path: Path) -> None:
    with shop_of(tmp_path, broker.url) as shop:  # with leases of 30 s
        first = shop.worker("-P", "solo")
        first.wait_ready()
        shop.send([f"task-{number}" for number in range(6)], seconds=1.0)
        eventually(lambda: shop.runs(), "the first task begins")
        begin_s = time.monotonic()
        first.end()
        shop.worker(*POOLS["threads"]).wait_ready()
        eventually(lambda: len(shop.ended()) == 6, "all tasks have run")
        assert time.monotonic() - begin_s < 25, "before a lease ends"
        assert set(shop.ended().values()) == {1}


def test_remote_control_from_the_command_line(broker: Broker, tmp_path: Path) -> None:
    with shop_of(tmp_path, broker.url) as shop:
        for _ in range(2):
            shop.worker("-P", "solo").wait_ready()
        assert shop.celery("inspect", "ping", "--timeout", "10").count("pong") == 2
        assert "empty" in shop.celery("inspect", "scheduled", "--timeout", "10")


# ---- kills ----------------------------------------------------------------------------------------------------


def interrupted(shop: Shop, name: str, kills_ms: list[int], slack_ms: int) -> bool:
    """True if each run of this task but the last was under way, or had just ended, when something was killed."""
    begins = sorted(run["ms"] for run in shop.runs() if (run["name"], run["what"]) == (name, "begin"))
    return all(
        any(begin - slack_ms <= kill <= later for kill in kills_ms)
        for begin, later in itertools.pairwise(begins)
    )


@pytest.mark.siege
@pytest.mark.parametrize("pool", POOLS)
def test_no_task_is_lost_when_workers_and_the_broker_are_killed(tmp_path: Path, pool: str) -> None:
    """Each task runs to its end. It runs again only if something was killed since its run began."""
    broker, chance = Broker(tmp_path / "data"), random.Random(17)
    kills_ms: list[int] = []
    try:
        with shop_of(tmp_path, broker.url, task_acks_late=True, **TIMEBALL) as shop:
            for _ in range(2):
                shop.worker(*POOLS[pool]).wait_ready()
            names: list[str] = []
            for kill in range(KILLS):
                new = [f"{kill}-{number}" for number in range(TASKS_PER_KILL)]
                etas = [in_seconds(chance.uniform(0, 3)) for _ in new]
                shop.send(new, seconds=0.2, etas=etas)
                names += new
                threading.Event().wait(chance.uniform(0.5, 2))
                kills_ms.append(time.time_ns() // 1_000_000)
                if kill % 3 == 2:
                    broker.kill()
                    broker.start()
                else:
                    chance.choice(shop.workers[-2:]).kill()
                    shop.worker(*POOLS[pool]).wait_ready()
            eventually(lambda: len(shop.ended()) == len(names), "all tasks have run")
            again = [name for name in names if not interrupted(shop, name, kills_ms, 1_000)]
            assert not again, f"ran twice without a kill: {again}"
    finally:
        broker.stop()


# ---- beside Redis ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["timeball", "redis"])
def test_an_eta_beyond_the_visibility_timeout(tmp_path: Path, system: str) -> None:
    """A second worker starts while the first one holds the task, as in a deployment. Redis gives it the task, too."""
    with ExitStack() as stack:
        if system == "redis":
            url = f"redis://127.0.0.1:{stack.enter_context(redis_server(tmp_path))}/0"
            settings: dict[str, Any] = {"broker_transport_options": {"visibility_timeout": 2}}
        else:
            running = Broker(tmp_path / "data")
            stack.callback(running.stop)
            url, settings = running.url, TIMEBALL
        shop = stack.enter_context(shop_of(tmp_path, url, **settings))
        shop.worker("-P", "solo").wait_ready()
        eta = in_seconds(20)
        shop.send(["reminder"], etas=[eta])
        threading.Event().wait(4)  # longer than the visibility timeout
        shop.worker("-P", "solo").wait_ready()
        eventually(lambda: shop.ended()["reminder"], "the reminder")
        threading.Event().wait(3)
        runs = shop.ended()["reminder"]
        assert runs == 1 if system == "timeball" else runs > 1


def test_pending_tasks_are_moved_from_redis(broker: Broker, tmp_path: Path) -> None:
    """Some that a worker had fetched, some that none had fetched, and some without an ETA."""
    with redis_server(tmp_path) as port:
        url, target = f"redis://127.0.0.1:{port}/0", ["--endpoint", broker.endpoint, "--json"]
        with shop_of(tmp_path, url, task_default_queue="mail.high") as old:
            worker = old.worker("-P", "solo")
            worker.wait_ready()
            fetched = [f"fetched-{number}" for number in range(8)]
            old.send(fetched, etas=[in_seconds(60)] * 8)
            eventually(lambda: worker.log().count("received") == 8, "the worker has fetched them")
            refused = timeball("import", "celery", "--from", url, *target)
            assert refused.returncode == 2 and "stop the workers first" in refused.stderr
            worker.kill()  # so they stay in `unacked`
            old.send([f"waits-{number}" for number in range(5)], etas=[in_seconds(60)] * 5)
            old.send(["now"])
            for words in (["--dry-run"], [], []):
                done = timeball("import", "celery", "--from", url, *words, *target)
                assert done.returncode == 0, done.stderr
                moved = json.loads(done.stdout)
                assert moved["moved"] == (0 if moved["moved"] == 0 else 13) and moved["left"] == 1
            assert moved["moved"] == 0, "the last one finds none"
    with (
        Timeball(broker.endpoint) as ball,
        shop_of(tmp_path, broker.url, task_default_queue="mail.high") as new,
    ):
        assert list(ball.topics()) == ["mail%2Ehigh"]
        new.worker("-P", "solo").wait_ready()
        eventually(lambda: len(new.ended()) == 13, "the moved tasks have run")
        assert set(new.ended().values()) == {1} and "now" not in new.ended()


# ---- the page -------------------------------------------------------------------------------------------------


def test_the_page_runs_as_it_stands(broker: Broker, tmp_path: Path) -> None:
    text = page("docs/celery.md")
    commands = [
        line for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()
    ]
    assert commands[0] == f"timeball serve --data {PAGE_DATA}"  # `broker` is one
    for name, code in re.findall(r'^```python title="(\w+\.py)"\n(.*?)^```', text, re.M | re.S):
        (tmp_path / name).write_text(code.replace(PAGE_URL, f"127.0.0.1:{broker.port}").replace("=5)", "=1)"))
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path))
        log = stack.enter_context((tmp_path / "log").open("w"))
        place = {"env": environment(), "cwd": tmp_path}
        celery = commands[1].replace("celery", f"{sys.executable} -m celery", 1).split()
        worker = subprocess.Popen(celery, stdout=log, stderr=subprocess.STDOUT, **place)  # type: ignore[call-overload]
        stack.callback(worker.wait)
        stack.callback(worker.terminate)
        placed = subprocess.run(
            [sys.executable, "place_orders.py"], capture_output=True, text=True, check=False, **place  # type: ignore[call-overload]
        )  # fmt: skip
        assert placed.stdout == "cancelled\n", placed.stderr
        eventually(lambda: "close order 17 if unpaid" in (tmp_path / "log").read_text(), "the task")
        look, *moves = commands[2:]
        shown = subprocess.run(
            look.replace("localhost:7480", f"localhost:{broker.port}"),
            shell=True, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(shown.stdout) == {"messages": []}
        for move in moves:
            words = move.replace(PAGE_REDIS, f"127.0.0.1:{redis}").split()[1:]
            done = timeball(*words, "--endpoint", broker.endpoint)
            assert done.returncode == 0 and "0 tasks" in done.stdout, done.stderr
    assert "close order 18" not in (tmp_path / "log").read_text()
