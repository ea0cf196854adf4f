"""Celery's workers, a broker and Redis as processes, for test_celery.py and test_celery_siege.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.cli.processes import Running, environment
from tests.node_fixture import eventually
from tests.ports import free_ports

HERE = Path(__file__).parent
LEASE_MS = 3_000
TIMEBALL = {"broker_transport_options": {"lease_ms": LEASE_MS}}


class Broker:
    """`timeball serve` with the system's clock. It keeps its port and its folder."""

    def __init__(self, data: Path, *options: str) -> None:
        (self.port,) = free_ports(1)
        self._data, self._options = data, options
        self.start()

    def start(self) -> None:
        """Start the broker, and wait until it is ready."""
        arguments = ["--json", "--port", "0", "--data", str(self._data), *self._options]
        self._process = Running("serve", *arguments, TIMEBALL_HTTP_PORT=str(self.port))
        self._ready = self._process.wait_line(event="ready")

    def kill(self) -> None:
        self._process.end(signal.SIGKILL)

    def stop(self) -> None:
        self._process.end()

    @property
    def url(self) -> str:
        """Return the URL for Celery's setting `broker`."""
        return f"timeball://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        """Return the HTTP address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def flight(self) -> str:
        """Return the address of the Flight port."""
        return f"grpc://127.0.0.1:{self._ready['port']}"


class ManualBroker(Broker):
    """A broker whose clock the test moves. Its leases and acknowledgements are on disk before its answers."""

    def __init__(self, data: Path) -> None:
        super().__init__(data, "--clock", "manual", "--ack-save-ms", "0")

    def now(self) -> datetime:
        """Return the time of the manual clock."""
        return datetime.fromisoformat(self._ask("clock", None)["now"])

    def wait(self, duration: timedelta) -> None:
        """Let time pass at once."""
        self._ask("clock/advance", {"after": f"{duration // timedelta(milliseconds=1)}ms"})

    def breathe(self, seconds: float) -> None:
        """Let time pass by the clocks of the workers, who renew their leases by them."""
        time.sleep(seconds)
        self.wait(timedelta(seconds=seconds))

    def _ask(self, path: str, document: Any) -> Any:
        """Return the JSON answer to a request below /v1/: a GET if `document` is None, otherwise a POST."""
        data = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(
            f"{self.endpoint}/v1/{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
            return json.load(answer)


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
    """Check that a Redis client gets an answer."""
    import redis

    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


class Shop:
    """The application of celery_shop.py: its workers, and the runs of its tasks. `settings` are Celery's."""

    def __init__(self, folder: Path, url: str, **settings: Any) -> None:
        self.folder, self.url = folder, url
        self.runs_file = folder / "runs"
        self.runs_file.touch()
        self._settings = settings
        self.workers: list[Worker] = []

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that celery_shop.py reads."""
        return {
            "SHOP_BROKER": self.url,
            "SHOP_RUNS": str(self.runs_file),
            "SHOP_OPTIONS": json.dumps(self._settings),
        }

    def worker(self, *options: str) -> Worker:
        """Start one more worker with options of `celery worker`. `wait_ready` waits until it works."""
        self.workers.append(Worker(self, len(self.workers), *options))
        return self.workers[-1]

    def celery(self, *arguments: str) -> str:
        """Run a command of Celery, which must succeed. Return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "celery_shop", *arguments],
            env=environment(**self.environment), cwd=HERE, capture_output=True, text=True, timeout=BOUND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def send(self, names: list[str], *, seconds: float = 0.0, etas: list[datetime] | None = None) -> None:
        """Send tasks that take `seconds`, in a process of its own, as a producer does. An ETA belongs to each name."""
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
        """Return the begins and ends of runs so far, as `note` in celery_shop.py writes them."""
        return [json.loads(line) for line in self.runs_file.read_text().splitlines()]

    def ended(self) -> Counter[str]:
        """Return how many runs of each task have ended."""
        return Counter(run["name"] for run in self.runs() if run["what"] == "end")

    def stop(self) -> None:
        """Kill all workers."""
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
        """Return the process id of the main process, which is that of the process group, too."""
        return self._process.pid

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def wait_ready(self) -> None:
        """Wait until the worker takes tasks. Raise AssertionError with its log if it ends before."""
        eventually(lambda: " ready." in self.log() or self._process.poll() is not None, "a worker is ready")
        assert self._process.poll() is None, self.log()

    def kill(self) -> None:
        """Kill -9 the worker and its pool."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(BOUND_S)
        self._log.close()

    def end(self) -> None:
        """Let the worker finish, as SIGTERM does, and wait for its end."""
        self._process.terminate()
        self._process.wait(BOUND_S)


@contextmanager
def shop_of(folder: Path, url: str, **settings: Any) -> Iterator[Shop]:
    """Make a shop, and kill its workers at the end of the block."""
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
    """Return the time that is `seconds` ahead by the system's clock."""
    return datetime.now(UTC) + timedelta(seconds=seconds)
