"""What requests of a hostile client cost the broker, in memory and in punctuality; a server without bounds beside it.

The broker is a process of its own with an access file, each attack another one. Messages, delayed by a second, go
through all the while, a thousand a second.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.accounts import access_file, keys
from tests.cli.processes import Running, environment, running
from tests.node_fixture import eventually
from tests.protocols.flight.attackers import ATTACKS

from timeball import Timeball
from timeball.message import Kind

ATTACKERS = Path(__file__).with_name("attackers.py")
ROOT = Path(__file__).resolve().parents[3]
PEAK_MIB_MAX = 600
BATCH, BATCHES_A_SECOND = 100, 10
CARELESS = """
import pyarrow.flight as flight
class Server(flight.FlightServerBase):
    def do_action(self, context, action):
        raise flight.FlightUnauthenticatedError("who are you?")
server = Server("grpc://127.0.0.1:0")
print('{"event": "ready", "endpoint": "grpc://127.0.0.1:%d"}' % server.port, flush=True)
server.serve()
"""


class Peak:
    """The most memory that a process has in a block; not what files back: the mapped log is not its own."""

    def __init__(self, pid: int) -> None:
        self._path, self._stop = Path(f"/proc/{pid}/status"), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.mib = 0

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            lines = dict(line.split(":") for line in self._path.read_text().splitlines())
            self.mib = max(self.mib, int(lines["RssAnon"].split()[0]) // 1024)
            if self._stop.wait(0.005):
                return


def attack(endpoint: str, name: str, credentials: str = "") -> list[str]:
    """Run an attack to its end; how its calls ended."""
    done = subprocess.run(
        [sys.executable, str(ATTACKERS), endpoint, name, credentials],
        env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


class Steady:
    """A thousand delayed messages a second, for the length of a block."""

    def __init__(self, endpoint: str) -> None:
        self._ball = Timeball(endpoint, **keys("root"))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self.first_seq = self.rows = 0

    def __enter__(self) -> Steady:
        self.first_seq = self._ball.status()["log"]["next_seq"]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        eventually(
            lambda: self._ball.status()["lateness"]["released"] >= Steady.sent, "all that is due came out"
        )
        status = self._ball.status()
        log = self._ball.read_log(
            self.first_seq, status["log"]["durable_seq"], kinds=[Kind.RELEASE], columns=["store_ms", "due_ms"]
        ).read_all()
        self.late_ms = log["store_ms"].to_numpy() - log["due_ms"].to_numpy()
        self._ball.close()

    sent = 0  # since the broker's start

    def _send(self) -> None:
        while not self._stop.wait(1 / BATCHES_A_SECOND):
            rows = [{"topic": "steady", "body": b"tick", "after": 1}] * BATCH
            Steady.sent += self._ball.send_many(rows).rows
            self.rows += BATCH

    def p99_ms(self) -> float:
        return float(np.percentile(self.late_ms, 99))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    folder = tmp_path_factory.mktemp("attacked")
    options = ["--access-file", str(access_file(folder)), "--data", str(folder / "data")]
    Steady.sent = 0
    with running("serve", "--json", "--port", "0", *options) as server:
        yield server, str(server.wait_line(event="ready")["endpoint"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", ["", "root:root secret 3"], ids=["stranger", "known"])
@pytest.mark.parametrize("name", ATTACKS)
def test_no_request_takes_the_memory_of_others(
    broker: tuple[Running, str], name: str, who: str, record_property: Any
) -> None:
    server, endpoint = broker
    with Steady(endpoint) as steady, Peak(server.pid) as peak:
        outcomes = attack(endpoint, name, who)
    text = f"{name}, {'known' if who else 'stranger'}: peak {peak.mib} MiB, p99 {steady.p99_ms():.0f} ms"
    record_property("measured", text)
    print(f"{text}, worst {steady.late_ms.max()} ms of {steady.rows}; {sorted(set(outcomes))}")
    assert 0 < peak.mib < PEAK_MIB_MAX
    assert len(steady.late_ms) >= steady.rows, "every message of the steady stream came out"
    assert server.code is None


@pytest.mark.slow
def test_a_server_without_bounds_takes_what_it_is_sent() -> None:
    with running(command=[sys.executable, "-c", CARELESS]) as server:
        endpoint = server.wait_line(event="ready")["endpoint"]
        with Peak(server.pid) as before:
            pass
        with Peak(server.pid) as peak:
            attack(endpoint, "an action of 1 GiB")
    assert before.mib < PEAK_MIB_MAX < peak.mib
