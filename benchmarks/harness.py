"""What the benchmarks share: a real server as a child process, batches of messages, columns read back.

The server is `python -m timeball serve --port 0 --json` in a folder that goes away with it; its ready line
says the port, so nothing waits for a guessed time. Every wait has a bound and an end in an error.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa

from benchmarks.report import Spent
from timeball import Timeball
from timeball.model.message import Kind

READY_S = 60.0
BODY_BYTES = 128
ANY_PORTS = ["--name-server-port", "0", "--remoting-port", "0", "--grpc-port", "0", "--http-port", "0"]
_CPU_CLOCK = 2  # CPUCLOCK_SCHED of the kernel's posix-timers: time on a CPU, user and system
TOPIC = "bench"
CHECKOUT = Path(__file__).resolve().parents[1]
# The row to be profiled, and those that there were; set by `profiling`.
_profiled: str | None = None
_rows: list[str] = []


class Server:
    """One broker in a process of its own. A context manager; `kill` and `start` again for restarts."""

    def __init__(self, data: Path, *options: str, **environment: str) -> None:
        self.data = data
        self._environment = {**os.environ, **environment}
        # An installed package is compiled by pip; without this each start from a checkout would compile it again.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._ticks = data.with_name("ticks.json")
        program = ["timeball"] if _profiled is None else ["benchmarks.profiled", str(self._ticks)]
        self._command = [sys.executable, "-m", *program, "serve", "--json", "--port", "0", *ANY_PORTS]
        self._command += ["--data", str(data), *options]
        self.started_ms = 0
        self.start()

    def start(self) -> None:
        """Start the process and wait for its ready line."""
        self.started_ms = now_ms()
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, text=True, env=self._environment, cwd=CHECKOUT
        )
        ready = _first_line(self._process, READY_S)
        self.endpoint: str = ready["endpoint"]
        self.name_server: str = ready["name_server"]
        self.remoting: str = ready["remoting"]
        self.grpc: str = ready["grpc"]
        self.http: str = ready["http"]
        self.process = psutil.Process(self._process.pid)

    def client(self) -> Timeball:
        """A client with columns."""
        return Timeball(f"http://{self.http}", flight=self.endpoint)

    def cpu_s(self) -> float:
        """CPU time that the server's process has used, user and system, all threads, to the nanosecond.

        /proc counts in ticks of 10 ms, more than a small load takes. The id of a process's own CPU clock is what
        clock_getcpuclockid(3) computes; Python has no name for it.
        """
        return time.clock_gettime(~self.process.pid << 3 | _CPU_CLOCK)

    @contextmanager
    def spending(self, row: str) -> Iterator[Spent]:
        """Measure the CPU time of what is done within; by stage if it is the row to be profiled."""
        _rows.append(row)
        spent = Spent(row)
        if row == _profiled:
            os.kill(self.process.pid, signal.SIGUSR1)
        begin_s = self.cpu_s()
        yield spent
        spent.cpu_s = self.cpu_s() - begin_s
        if row == _profiled:
            os.kill(self.process.pid, signal.SIGUSR2)
            wait_until(self._ticks.exists, READY_S, "the counts of the profile")
            spent.ticks = json.loads(self._ticks.read_text())
            self._ticks.unlink()

    def memory_bytes(self) -> tuple[int, int]:
        """(held, mapped): what the process itself holds in RAM, and the pages of mapped files that it has touched.

        Mapped pages belong to the page cache: the system takes them back when it needs the room.
        """
        info = self.process.memory_info()
        return int(info.rss - info.shared), int(info.shared)

    def kill(self) -> None:
        """kill -9: nothing is flushed, nothing is said."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close()

    def stop(self) -> None:
        """SIGTERM, and wait: what was accepted is finished, and saved. `kill` when it takes 30 s."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _close(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def profiling(row: str | None) -> Iterator[list[str]]:
    """Start servers that can say where a row's CPU time goes; yields the rows that were run."""
    global _profiled
    _profiled = row
    _rows.clear()
    try:
        yield _rows
    finally:
        _profiled = None


@contextmanager
def serving(*options: str, **environment: str) -> Iterator[tuple[Server, Timeball]]:
    """A fresh broker and a client of it."""
    with (
        tempfile.TemporaryDirectory(prefix="timeball-bench-") as folder,
        Server(Path(folder) / "data", *options, **environment) as server,
        server.client() as ball,
    ):
        yield server, ball


def _first_line(process: subprocess.Popen[str], bound_s: float) -> dict[str, Any]:
    """The ready line; RuntimeError when the process ends or stays silent."""
    lines: list[str] = []
    stream = process.stdout
    assert stream is not None
    reading = threading.Thread(target=lambda: lines.append(stream.readline()), daemon=True)
    reading.start()
    reading.join(bound_s)
    if not lines or not lines[0]:
        process.kill()
        raise RuntimeError(f"the server did not become ready (exit code {process.wait()})")
    document: dict[str, Any] = json.loads(lines[0])
    return document


def now_ms() -> int:
    """The wall clock, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def wait_until(reached: Callable[[], bool], bound_s: float, what: str) -> None:
    """Look every 20 ms; RuntimeError naming `what` when the bound passes."""
    give_up = time.monotonic() + bound_s
    while not reached():
        if time.monotonic() > give_up:
            raise RuntimeError(f"{what}: not within {bound_s:.0f} s")
        time.sleep(0.02)


def messages(
    rows: int,
    due_ms: npt.NDArray[np.int64] | None = None,
    seed: int = 1,
    *,
    body_bytes: int = BODY_BYTES,
) -> pa.RecordBatch:
    """A batch of `rows` messages of random bytes with ids, due at `due_ms` or visible at once."""
    rng = np.random.default_rng(seed)
    bodies = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(body_bytes), rows, [None, pa.py_buffer(rng.bytes(rows * body_bytes))]
    )
    columns = {
        "topic": pa.repeat(TOPIC, rows),
        "body": bodies.cast(pa.binary()),
        "unique_key": pa.array([f"{seed:08x}{i:024x}" for i in range(rows)]),
    }
    if due_ms is not None:
        columns["due_ms"] = pa.array(due_ms)
    return pa.RecordBatch.from_pydict(columns)


def send_scheduled(
    ball: Timeball,
    due_ms: npt.NDArray[np.int64],
    chunk_rows: int = 100_000,
    *,
    body_bytes: int = BODY_BYTES,
) -> None:
    """Schedule one message for each instant of `due_ms`, in bounded memory."""
    for number, begin in enumerate(range(0, len(due_ms), chunk_rows)):
        due = due_ms[begin : begin + chunk_rows]
        ball.send_many(messages(len(due), due, seed=number + 1, body_bytes=body_bytes))


def releases(ball: Timeball, from_seq: int | None = None) -> dict[str, npt.NDArray[np.int64]]:
    """Columns of all release rows on disk: source_seq, due_ms, store_ms."""
    names = ("source_seq", "due_ms", "store_ms")
    log = ball.status()["log"]
    begin = log["first_seq"] if from_seq is None else from_seq
    batches = list(ball.read_log(begin, log["durable_seq"], kinds=[Kind.RELEASE]))
    return {
        name: np.concatenate(
            [np.asarray(b.column(name), dtype=np.int64) for b in batches] or [np.empty(0, np.int64)]
        )
        for name in names
    }


def quantiles(values: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """p50, p99 and the largest."""
    return float(np.quantile(values, 0.5)), float(np.quantile(values, 0.99)), float(values.max())
