"""An hour of mixed load: does what the broker holds stay level, and does each message come exactly once?

Three senders, one an edge (Flight, remoting, gRPC), send some 400 messages a second, half of them one by one and half
together, due at once or 0.2 s to 30 days later. Each topic is received and acknowledged over another edge than it is
sent by, and pulled by a second group. Meanwhile the broker compacts, and keeps its log for ten minutes. Memory,
descriptors and files are taken down by the minute, on stderr as they come and in the report; the medians of the last
quarter are compared with those of the second, because in the first the log and the table only fill.

    timeball bench soak                   an hour
    python -m benchmarks.soak 10          ten minutes; with TMPDIR its data lie elsewhere

Not measured: rates (the load is a small part of what the broker can do), messages larger than 128 bytes, clients that
come and go, Spark beside it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.harness import Server, now_ms, serving, wait_until
from benchmarks.report import Report
from benchmarks.soak_book import Book, body_of
from benchmarks.soak_clients import EDGES, Client, Edge, Parcel, PullingClient
from timeball import Timeball

ONLY_BY_NAME = True  # `timeball bench` without names leaves it out

ROWS_PER_S = 400
TICK_S = 0.25
MINUTES, MINUTE_S = 60, 60.0
MINUTES_SMALL, MINUTE_S_SMALL = 8, 0.75
SECOND_MS, MINUTE_MS, HOUR_MS = 1_000, 60_000, 3_600_000
# Shares of the messages, and after how long they are due; None: at once.
DELAYS_MS: list[tuple[float, tuple[int, int] | None]] = [
    (0.15, None),
    (0.45, (200, 2 * SECOND_MS)),
    (0.20, (2 * SECOND_MS, MINUTE_MS)),
    (0.10, (MINUTE_MS, 9 * MINUTE_MS)),
    (0.05, (10 * MINUTE_MS, 50 * MINUTE_MS)),
    (0.05, (HOUR_MS, 30 * 24 * HOUR_MS)),
]
RECEIVED_BY = {"flight": "grpc", "grpc": "remoting", "remoting": "flight"}
OPTIONS = [
    "--retention-ms", "10m", "--segment-bytes", "16777216", "--compact-interval-ms", "30s",
    "--compact-rows", "100000",
]  # fmt: skip
LAST_S = 600.0  # for what is due when the senders stop
GROWTH_MAX = {"held": 16.0, "descriptors": 16.0, "files": 256.0, "gone but mapped": 64.0}


@dataclass(frozen=True)
class Minute:
    """What the broker held at the end of one minute. `gone_mb`: removed files that are still mapped; `delta_entries`:
    of the table's Delta log, which Delta keeps for 30 days.
    """

    number: int
    held_mb: float
    mapped_mb: float
    descriptors: int
    threads: int
    files: int
    delta_entries: int
    disk_mb: float
    gone_mb: float
    waiting: int
    sent: int
    received: int
    late_p99_ms: float

    HEAD = (
        f"{'minute':>6} {'held MB':>8} {'rss MB':>8} {'fds':>5} {'threads':>7} {'files':>6} {'delta':>6} "
        f"{'disk MB':>8} {'gone MB':>8} {'waiting':>8} {'sent':>9} {'received':>9} {'late p99':>9}"
    )

    def line(self) -> str:
        """One row of the table."""
        return (
            f"{self.number:>6} {self.held_mb:>8.1f} {self.held_mb + self.mapped_mb:>8.1f} {self.descriptors:>5} "
            f"{self.threads:>7} {self.files:>6} {self.delta_entries:>6} "
            f"{self.disk_mb:>8.1f} {self.gone_mb:>8.1f} {self.waiting:>8} {self.sent:>9} "
            f"{self.received:>9} {self.late_p99_ms:>7.0f}ms"
        )


@dataclass
class SoakReport(Report):
    """The figures, and the table by the minute."""

    minutes: list[Minute] = field(default_factory=list)

    def lines(self) -> list[str]:
        """See Report."""
        return [*super().lines(), "", Minute.HEAD, *(minute.line() for minute in self.minutes)]

    def as_dict(self) -> dict[str, object]:
        """See Report."""
        return {**super().as_dict(), "minutes": [vars(minute) for minute in self.minutes]}


def run(small: bool = False, minutes: int = 0) -> SoakReport:
    """Measure; growth in megabytes, descriptors and files after the first quarter."""
    report = SoakReport("soak", small)
    count, length_s = (MINUTES_SMALL, MINUTE_S_SMALL) if small else (minutes or MINUTES, MINUTE_S)
    with serving(*OPTIONS) as (server, ball):
        soak = _Soak(server, ball)
        cpu_s = server.cpu_s()
        try:
            for minute in soak.minutes(count, length_s):
                report.minutes.append(minute)
                head = [Minute.HEAD] if minute.number % 20 == 1 else []
                print(*head, minute.line(), sep="\n", file=sys.stderr, flush=True)
            soak.finish()
        finally:
            soak.stop()
        _conclude(report, soak, server.cpu_s() - cpu_s)
    return report


def _conclude(report: SoakReport, soak: _Soak, cpu_s: float) -> None:
    books = list(soak.books.values())
    report.add("sent", sum(book.sent for book in books), "messages")
    report.add("received", sum(book.received for book in books), "messages")
    report.add("missing", soak.missing, "messages", 0, "lower")
    report.add(
        "more than once: missing acknowledgements",
        sum(book.doubled for book in books),
        "messages",
        0,
        "lower",
    )
    report.add("early", sum(book.early for book in books), "messages", 0, "lower")
    report.add("of other runs", sum(book.unknown for book in books), "messages", 0, "lower")
    report.add("failed requests", soak.failures, "requests", 0, "lower")
    add_growth(report)
    report.add("server CPU", cpu_s / max(1, sum(book.sent for book in books)) * 1e6, "us/msg")


def add_growth(report: SoakReport) -> None:
    """The verdict on what is to stay level."""
    minutes = report.minutes
    for name, values in {
        "held": [minute.held_mb for minute in minutes],
        "descriptors": [float(minute.descriptors) for minute in minutes],
        "files": [float(minute.files) for minute in minutes],
        "gone but mapped": [minute.gone_mb for minute in minutes],
    }.items():
        unit = "MB" if name in ("held", "gone but mapped") else name
        bar = None if report.small else GROWTH_MAX[name]
        report.add(f"{name}, growth after the first quarter", growth(values), unit, bar, "lower")
        report.add(f"{name}, most", max(values), unit)


def growth(values: Sequence[float]) -> float:
    """Median of the last quarter less that of the second."""
    if len(values) < 2:
        return 0.0
    quarter = max(1, len(values) // 4)
    return float(np.median(values[-quarter:]) - np.median(values[quarter : 2 * quarter]))


class _Soak:
    """Senders and receivers, a thread each, and what they count."""

    def __init__(self, server: Server, ball: Timeball) -> None:
        self._server, self._ball = server, ball
        self.books = {edge: Book(f"soak-{edge}", ["receivers", "pullers"]) for edge in EDGES}
        self.failures = 0
        self.missing = -1
        self._sending, self._receiving = threading.Event(), threading.Event()
        self._sending.set()
        self._receiving.set()
        for book in self.books.values():
            ball.create_topic(book.topic, 8)
        self._threads = [
            *(
                threading.Thread(target=self._send, args=(EDGES[edge], book))
                for edge, book in self.books.items()
            ),
            *(
                threading.Thread(target=self._receive, args=(EDGES[RECEIVED_BY[edge]], book))
                for edge, book in self.books.items()
            ),
            *(
                threading.Thread(target=self._receive, args=(PullingClient, book, "pullers"))
                for book in self.books.values()
            ),
        ]
        for thread in self._threads:
            thread.start()

    def minutes(self, count: int, length_s: float) -> Iterator[Minute]:
        """What the broker holds, minute by minute."""
        begun = time.monotonic()
        for number in range(1, count + 1):
            time.sleep(max(0.0, begun + number * length_s - time.monotonic()))
            yield self._minute(number)

    def finish(self) -> None:
        """Stop sending, and wait for all that is due by then."""
        self._sending.clear()
        due_ms = now_ms()

        def all_came() -> bool:
            self.missing = sum(book.missing(due_ms) for book in self.books.values())
            return self.missing == 0

        try:
            wait_until(all_came, LAST_S, "all that is due at the receivers")
        except RuntimeError as error:
            self._failed(error)
        time.sleep(2 * TICK_S)  # a message that comes twice has time to

    def stop(self) -> None:
        """End all threads after the request under way."""
        self._sending.clear()
        self._receiving.clear()
        for thread in self._threads:
            thread.join(90)

    def _minute(self, number: int) -> Minute:
        held, mapped = self._server.memory_bytes()
        process, schedule = self._server.process, self._ball.status()["schedule"]
        files, delta_entries, disk_bytes = _files_below(self._server.data)
        late = np.concatenate([book.drain_late_ms() for book in self.books.values()])
        return Minute(
            number,
            held / 1e6,
            mapped / 1e6,
            process.num_fds(),
            process.num_threads(),
            files,
            delta_entries,
            disk_bytes / 1e6,
            _gone_bytes(process.pid) / 1e6,
            schedule["tail_rows"] + schedule["table_rows"],
            sum(book.sent for book in self.books.values()),
            sum(book.received for book in self.books.values()),
            float(np.quantile(late, 0.99)) if len(late) else 0.0,
        )

    def _send(self, edge: Edge, book: Book) -> None:
        rng = np.random.default_rng(len(book.topic))
        singles = max(1, round(ROWS_PER_S * TICK_S / len(EDGES) / 2))
        client: Client | None = None
        while self._sending.is_set():
            begun = time.monotonic()
            numbers: list[int] = []
            try:
                client = client or edge(self._server)
                for _ in range(singles):
                    numbers, parcels = _parcels(book, rng, 1)
                    client.send(book.topic, parcels[0])
                numbers, parcels = _parcels(book, rng, singles, at_once=not client.delays_together)
                client.send_together(book.topic, parcels)
            except Exception as error:  # whatever it is, it is counted, and the load goes on
                book.doubt(numbers)
                self._dropped(error, client)
                client = None
            time.sleep(max(0.0, begun + TICK_S - time.monotonic()))
        if client is not None:
            client.close()

    def _receive(self, edge: Edge, book: Book, group: str = "receivers") -> None:
        client: Client | None = None
        while self._receiving.is_set():
            try:
                client = client or edge(self._server)
                bodies = client.receive(book.topic, group)
                if bodies:
                    book.came(group, bodies, now_ms())
            except Exception as error:  # as above
                self._dropped(error, client)
                client = None
        if client is not None:
            client.close()

    def _dropped(self, error: Exception, client: Client | None) -> None:
        self._failed(error)
        if client is not None:
            client.close()
        time.sleep(1.0)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        print(f"{time.strftime('%H:%M:%S')} {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _parcels(
    book: Book, rng: np.random.Generator, count: int, *, at_once: bool = False
) -> tuple[list[int], list[Parcel]]:
    """Messages with the numbers the book has given them, due as `DELAYS_MS` says."""
    now = now_ms()
    spans = rng.choice(len(DELAYS_MS), count, p=[share for share, _ in DELAYS_MS])
    dues = [
        None if at_once or (span := DELAYS_MS[at][1]) is None else now + int(rng.integers(*span))
        for at in spans
    ]
    numbers = book.begin([now if due is None else due for due in dues])
    return numbers, [Parcel(body_of(number), due) for number, due in zip(numbers, dues, strict=True)]


def _files_below(folder: Path) -> tuple[int, int, int]:
    """Files other than entries of the Delta log, these, and the bytes of all; files come and go meanwhile."""
    files = delta_entries = size_bytes = 0
    for name, _, found in os.walk(folder):
        for each in found:
            with contextlib.suppress(FileNotFoundError):
                size_bytes += (Path(name) / each).stat().st_blocks * 512
                delta_entries += name.endswith("_delta_log")
                files += not name.endswith("_delta_log")
    return files, delta_entries, size_bytes


def _gone_bytes(pid: int) -> int:
    """Bytes of files that a process still maps although they have been removed: their room is not free."""
    gone = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("(deleted)"):
            begin, _, end = line.split(" ", 1)[0].partition("-")
            gone += int(end, 16) - int(begin, 16)
    return gone


if __name__ == "__main__":
    for found in run(minutes=int(sys.argv[1]) if len(sys.argv) > 1 else 0).lines():
        print(found)
