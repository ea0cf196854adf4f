"""What a steady stream of delayed messages suffers from other guests of the HTTP edge.

100 messages a second are sent over Flight, each due 300 ms later, alone and beside: 10,000 long polls of 100 groups, in
vain, 1,000 live tails of an idle topic, and requests that no client would send (made from the OpenAPI
document by schemathesis, and damaged bytes; 5,000, or TIMEBALL_FUZZED of them). Lateness is store_ms - due_ms of
every release row, read back from the log; a send's time is its client's. The broker's memory is measured beside the
guests and after they have gone. "Machine": how long a process that only sleeps was kept waiting, which is no fault of
the broker's.

Not measured: guests on other machines, TLS. The guests, two processes, share the cores with broker and stream, and
are most of the load: a fuzzed request costs its sender ten times what it costs the broker, so they run with less
priority.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from benchmarks.harness import CHECKOUT, TOPIC, Server, messages, now_ms, quantiles, serving
from benchmarks.report import Report
from timeball import Timeball
from timeball.model.message import Kind

ROWS_PER_S, AHEAD_MS = 100, 300
SECONDS, SECONDS_SMALL = 10.0, 0.5
POLLS, POLLS_SMALL = 10_000, 50
TAILS, TAILS_SMALL = 1_000, 10
FUZZED = int(os.environ.get("TIMEBALL_FUZZED", "5000"))
FUZZED_SMALL = 60
STALL_BAR_MS = 250.0
READY = "ready\n"


def run(small: bool = False) -> Report:
    """Measure; lateness in milliseconds, memory in MiB."""
    report = Report("beside", small)
    fuzzed = FUZZED_SMALL if small else FUZZED
    with serving() as (server, ball):
        ball.create_topic(TOPIC, 8)
        ball.create_topic("idle", 8)
        seconds = SECONDS_SMALL if small else SECONDS
        _stream(report, server, ball, "nothing", _until(time.monotonic() + seconds))
        for name, count in (
            ("polls", POLLS_SMALL if small else POLLS), ("tails", TAILS_SMALL if small else TAILS)
        ):  # fmt: skip
            with _guest(server, name, count) as guest:
                assert guest.stdout is not None and guest.stdout.readline() == READY
                _stream(report, server, ball, f"{count:,} {name}", _until(time.monotonic() + seconds))
            report.add(f"after {count:,} {name}: held", _held_mib(server), "MiB")
        with _guest(server, "raw", fuzzed // 2) as raw, _guest(server, "document", fuzzed // 2) as document:
            row = f"{fuzzed:,} fuzzed requests"
            _stream(report, server, ball, row, _while_run(raw, document), STALL_BAR_MS)
            faults = [guest.wait() for guest in (raw, document)]
        report.add(f"beside {row}: guests that found a fault", sum(map(bool, faults)), "guests", 0, "lower")
    return report


@contextmanager
def _guest(server: Server, kind: str, count: int) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that keeps the broker busy; ended at the end."""
    command = [sys.executable, "-m", "benchmarks.beside_guests", kind, server.http, str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT) as guest:
        try:
            yield guest
        finally:
            guest.kill()


@contextmanager
def _sleeper() -> Iterator[subprocess.Popen[str]]:
    """A process that shows how long the machine keeps one waiting; it says so when its input is closed."""
    command = [sys.executable, "-m", "benchmarks.sleeper"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    ) as sleeper:
        yield sleeper


def _until(end_s: float) -> Iterator[None]:
    while time.monotonic() < end_s:
        yield


def _while_run(*guests: subprocess.Popen[str]) -> Iterator[None]:
    while any(guest.poll() is None for guest in guests):
        yield


def _stream(
    report: Report,
    server: Server,
    ball: Timeball,
    row: str,
    going: Iterator[None],
    bar_ms: float | None = None,
) -> None:
    """Send until `going` ends; a send that comes late sends the rows it is behind."""
    first_seq = ball.status()["log"]["durable_seq"]
    begun_s, sent, answer_ms = time.monotonic(), 0, []
    with server.spending(f"beside {row}") as spent, _sleeper() as sleeper:
        for _ in going:
            wanted = int((time.monotonic() - begun_s) * ROWS_PER_S)
            if wanted > sent:
                asked_s = time.monotonic()
                due_ms = np.full(wanted - sent, now_ms() + AHEAD_MS, dtype=np.int64)
                ball.send_many(messages(wanted - sent, due_ms, seed=wanted))
                answer_ms.append((time.monotonic() - asked_s) * 1e3)
                sent = wanted
            time.sleep(1 / ROWS_PER_S / 2)
        held_mib = _held_mib(server)
        time.sleep(2 * AHEAD_MS / 1e3)  # the last ones come due
        overslept_ms = float(sleeper.communicate()[0])
    late_ms = _lateness_ms(ball, first_seq)
    late = quantiles(late_ms)
    for name, value, bar in zip(("p50", "p99", "max"), late, (None, None, bar_ms), strict=True):
        report.add(f"beside {row}: lateness {name}", value, "ms", bar, "lower")
    for name, value in zip(("p50", "p99", "max"), quantiles(np.array(answer_ms)), strict=True):
        report.add(f"beside {row}: send {name}", value, "ms")
    report.add(f"beside {row}: machine max", overslept_ms, "ms")
    report.add(f"beside {row}: missing", sent - len(late_ms), "messages")
    report.add(f"beside {row}: held", held_mib, "MiB")
    report.add_cost(spent, sent)


def _lateness_ms(ball: Timeball, first_seq: int) -> npt.NDArray[np.int64]:
    """Return store_ms - due_ms of each release of the stream since then; the fuzzed requests schedule messages, too."""
    found = ball.read_log(first_seq, ball.status()["log"]["durable_seq"], kinds=[Kind.RELEASE]).read_all()
    mine = found.filter(pc.equal(found.column("topic"), TOPIC))
    late: npt.NDArray[np.int64] = pc.subtract(mine.column("store_ms"), mine.column("due_ms")).to_numpy()
    return late


def _held_mib(server: Server) -> float:
    return server.memory_bytes()[0] / 2**20
