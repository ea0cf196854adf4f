"""What `designs` measures on a real broker: a process of its own, `fdatasync` before every acknowledgement.

Five pieces of work, each on a fresh broker. All but the steady load run with --compact-rows 0, so that the log's tail
is moved to the table when the benchmark says so (`hour_log` only) and its cost is a figure of its own. After each
the log is read, and every scheduled message accounted for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.designs_compared import Design, Ledger, Tally
from benchmarks.designs_work import Work, steadily, work_for
from benchmarks.harness import Server, now_ms, quantiles, releases, serving, wait_until
from benchmarks.report import Report
from timeball import Timeball
from timeball.io.files import RealFiles
from timeball.log import checkpoint
from timeball.model.message import Kind

BURST_BAR_S, LATENESS_BAR_MS, RESTART_BAR_S = 1.5, 20.0, 2.0  # of burst, punctual and restart
ON_TIME_MS = 20
REST_S, LOOK_S = 5.0, 0.2
BOUND_S = 180.0
WARM_ROWS = 1_000
NEVER_MS = 1 << 40


class Bench:
    """One strategy; `small` is for tests."""

    def __init__(self, design: Design, report: Report, tally: Tally) -> None:
        self._design, self._report, self._tally, self._small = design, report, tally, report.small

    @property
    def _ahead_ms(self) -> int:
        """Time enough to send everything before any of it is due; a level that there is."""
        by_level = self._design.by_level
        return (5_000 if by_level else 3_000) if self._small else (60_000 if by_level else 30_000)

    def all(self) -> None:
        """All five."""
        self.admission()
        self.burst()
        self.overdue()
        self.steady()
        self.restarts()

    # -- the pieces of work ----------------------------------------------------------------------------------

    def admission(self) -> None:
        """A million scheduled messages of the next day, then two million more; what these take while they wait."""
        rows, more = (2_000, 4_000) if self._small else (1_000_000, 2_000_000)
        with self._broker("--compact-rows", "0", MALLOC_ARENA_MAX="1") as (server, ball, work):
            work.far(WARM_ROWS)  # every path once, so that the base contains its code and buffers
            self._set_aside(ball)
            empty = self._at_rest(server, ball)
            work.far(rows)
            self._set_aside(ball)
            before = self._at_rest(server, ball)
            cpu_s, begun = server.cpu_s(), time.perf_counter()
            work.far(more)
            took_s, used_s = time.perf_counter() - begun, server.cpu_s() - cpu_s
            self._report.add("admit: rate", more / took_s, "msg/s")
            self._report.add("admit: server CPU", used_s / more * 1e6, "us/msg")
            cpu_s = server.cpu_s()
            if self._set_aside(ball):
                wait_until(lambda: _resting(server), BOUND_S, "the table's keys to be indexed")
                self._report.add("to the table: server CPU", (server.cpu_s() - cpu_s) / more * 1e6, "us/msg")
            held, own, log = (np.array(self._at_rest(server, ball)) - before) / more
            self._report.add("waiting: RAM", held, "bytes/message")
            self._report.add("waiting: disk, its own files", own, "bytes/message")
            self._report.add("waiting: disk, the log that must stay", log * _held_back(ball), "bytes/message")
            self._report.add("waiting: disk, its own files at first", empty[1] / 1e6, "MB")
            self._check("admission", ball, WARM_ROWS + rows + more, now_ms())

    def burst(self) -> None:
        """All due in one second, at random milliseconds of it; levels: as fast as they came."""
        rows, delay_ms = 5_000 if self._small else 1_000_000, self._ahead_ms
        with self._broker("--compact-rows", "0") as (server, ball, work):
            second_ms = (now_ms() + delay_ms) // 1_000 * 1_000
            due = second_ms + np.random.default_rng(3).integers(0, 1_000, rows)
            work.soon(rows, due, delay_ms)
            self._not_yet(second_ms)
            wait_until(lambda: now_ms() >= second_ms - 100, delay_ms / 1_000, "the second to begin")
            cpu_s = server.cpu_s()
            done_ms = _all_released(ball, rows)
            used_s = server.cpu_s() - cpu_s
            ledger = self._check("burst", ball, rows, done_ms)
        if not self._design.by_level:
            seconds = (done_ms - second_ms) / 1_000
            self._report.add(
                "burst: all on disk, from the second's begin", seconds, "s", BURST_BAR_S, "lower"
            )
            behind_ms = max(1, done_ms - int(ledger.due_ms.max()))
            self._report.add("burst: all on disk, from the last instant", behind_ms / 1_000, "s")
        self._report.add("burst: server CPU", used_s / rows * 1e6, "us/msg")

    def overdue(self) -> None:
        """All have fallen due while the broker was stopped."""
        rows, delay_ms = 5_000 if self._small else 1_000_000, self._ahead_ms
        with self._broker("--compact-rows", "0") as (server, _, work):
            first_ms = now_ms() + delay_ms
            due = first_ms + np.random.default_rng(4).integers(0, delay_ms // 3, rows)
            work.soon(rows, due, delay_ms)
            self._not_yet(first_ms)
            server.stop()
            last_ms = max(int(due.max()), now_ms() + delay_ms)
            wait_until(lambda: now_ms() > last_ms, 3 * delay_ms / 1_000, "all to be overdue")
            server.start()
            with server.client() as fresh:
                done_ms = _all_released(fresh, rows)
                used_s = server.cpu_s()
                ledger = self._check("overdue", fresh, rows, done_ms)
        took_ms = max(1, done_ms - int(ledger.released_ms.min()))
        self._report.add("overdue: rate", rows / took_ms * 1_000, "msg/s")
        self._report.add("overdue: all on disk, from the start", (done_ms - server.started_ms) / 1_000, "s")
        self._report.add("overdue: server CPU since its start", used_s / rows * 1e6, "us/msg")

    def steady(self) -> None:
        """10,000 scheduled messages a second come, and fall due, at random milliseconds."""
        rows_per_s, seconds = (2_000, 1) if self._small else (10_000, 40)
        delays_ms = (1_000, 2_000) if self._small else (1_000, 20_000)
        with self._broker() as (server, ball, work):
            work.mixed(1, delays_ms)
            cpu_s = server.cpu_s()
            rows = rows_per_s * seconds
            steadily(rows, rows_per_s, lambda count: work.mixed(count, delays_ms))
            done_ms = _all_released(ball, rows + 1)
            used_s = server.cpu_s() - cpu_s
            ledger = self._check("steady", ball, rows + 1, done_ms)
        p50, p99, worst = quantiles(ledger.late_ms)
        self._report.add("steady: lateness p50", p50, "ms")
        self._report.add("steady: lateness p99", p99, "ms", LATENESS_BAR_MS, "lower")
        self._report.add("steady: lateness max", worst, "ms")
        self._report.add("steady: server CPU", used_s / rows * 1e6, "us/msg")

    def restarts(self) -> None:
        """kill -9 with a million waiting, which were saved before, or of which nothing was."""
        self._restart("all saved", "1000", saved=True)
        self._restart("nothing saved yet", str(NEVER_MS), saved=False)

    def _restart(self, label: str, checkpoint_interval_ms: str, saved: bool) -> None:
        rows = 2_000 if self._small else 1_000_000
        window_ms, delay_ms = (8_000, 10_000) if self._small else (30_000, 30_000)
        options = ["--compact-rows", "0", "--checkpoint-interval-ms", checkpoint_interval_ms]
        with self._broker(*options) as (server, ball, work):
            work.far(rows)
            if saved:
                self._set_aside(ball)
                self._wait_for_checkpoint(server, ball)
            near_seq = ball.status()["log"]["durable_seq"]
            first_ms = self._one_each_ms(work, window_ms, delay_ms)
            wait_until(
                lambda: now_ms() > first_ms + 200, delay_ms, "the first scheduled messages to fall due"
            )
            server.kill()
            server.start()
            with server.client() as fresh:
                due_ms, stamp_ms = self._first_on_time(server, fresh, near_seq, window_ms)
                used_s = server.cpu_s()
                # In the order of their instants: all that was due before it has been released before it.
                self._check(f"restart, {label}", fresh, rows + window_ms, due_ms)
        name = f"restart, {label}: first release on time"
        self._report.add(name, (stamp_ms - server.started_ms) / 1_000, "s", RESTART_BAR_S, "lower")
        cost = used_s / (rows + window_ms) * 1e6
        self._report.add(f"restart, {label}: server CPU until seen", cost, "us/message")

    # -- inside ----------------------------------------------------------------------------------------------

    @contextmanager
    def _broker(self, *options: str, **environment: str) -> Iterator[tuple[Server, Timeball, Work]]:
        with serving(*self._design.options(self._small), *options, **environment) as (server, ball):
            assert ball.status()["strategy"] == self._design.schedule
            yield server, ball, work_for(self._design, server, ball)

    def _set_aside(self, ball: Timeball) -> bool:
        """Move what waits in the log's tail to the table, where the strategy does that."""
        moves = self._design.schedule == "hour_log" and not self._design.by_level
        if moves:
            ball.compact()
        return moves

    def _at_rest(self, server: Server, ball: Timeball) -> tuple[int, int, int]:
        """Bytes in RAM, in files other than the log's, and in the log, once the process has come to rest."""
        lowest, seen = server.memory_bytes()[0], time.monotonic()
        while time.monotonic() - seen < (0.2 if self._small else REST_S):
            time.sleep(0.05)
            now = server.memory_bytes()[0]
            if now < lowest:
                lowest, seen = now, time.monotonic()
        return lowest, _disk_bytes(server.data), ball.status()["log"]["bytes"]

    def _not_yet(self, first_ms: int) -> None:
        if now_ms() > first_ms - 500:
            raise RuntimeError("sending took longer than the time ahead: the figures would mean nothing")

    def _wait_for_checkpoint(self, server: Server, ball: Timeball) -> None:
        wanted = ball.status()["log"]["durable_seq"]

        def saved() -> bool:
            found = checkpoint.load(RealFiles(server.data))
            return found is not None and found.facts.seq >= wanted

        wait_until(saved, BOUND_S, "a checkpoint of all that waits")

    def _one_each_ms(self, work: Work, window_ms: int, delay_ms: int) -> int:
        """Messages due on each millisecond of a window; returns about when it begins. Levels: sent at that pace."""
        if self._design.by_level:
            first_ms = now_ms() + delay_ms
            steadily(window_ms, 1_000, lambda count: work.mixed(count, (delay_ms, delay_ms)))
            return first_ms
        first_ms = now_ms() + 1_000
        work.soon(window_ms, first_ms + np.arange(window_ms), delay_ms)
        return first_ms

    def _first_on_time(
        self, server: Server, ball: Timeball, near_seq: int, window_ms: int
    ) -> tuple[int, int]:
        """(due, stamp) of the first release since the server's start that was on time."""
        give_up_ms = now_ms() + 2 * window_ms
        # A toy's figure means nothing, and a busy machine may need all of its window for the start.
        on_time_ms = NEVER_MS if self._small else ON_TIME_MS
        while now_ms() < give_up_ms:
            found = releases(ball, near_seq)
            late = found["store_ms"] - found["due_ms"]
            on_time = np.flatnonzero((found["store_ms"] > server.started_ms) & (late <= on_time_ms))
            if len(on_time):
                return int(found["due_ms"][on_time[0]]), int(found["store_ms"][on_time[0]])
            time.sleep(LOOK_S)
        raise RuntimeError(f"{self._design.name}: no release was on time {window_ms} ms after a restart")

    def _check(self, what: str, ball: Timeball, promised: int, due_before_ms: int) -> Ledger:
        log = ball.status()["log"]
        kinds = [Kind.SCHEDULED, Kind.RELEASE]
        ledger = Ledger.of(ball.read_log(log["first_seq"], log["durable_seq"], kinds=kinds))
        self._tally.add(what, ledger, promised, due_before_ms)
        return ledger


def _disk_bytes(folder: Path) -> int:
    """Blocks of all files but the log's. A file that goes away meanwhile counts nothing."""
    total = 0
    for place, folders, names in os.walk(folder):
        if Path(place) == folder:
            folders.remove("log")
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def _held_back(ball: Timeball) -> float:
    """Which part of the log's rows retention must leave for those that wait, however old it is."""
    status = ball.status()
    log = status["log"]
    return float((log["durable_seq"] - status["watermark"]) / (log["durable_seq"] - log["first_seq"]))


def _resting(server: Server) -> bool:
    """Whether the process has used next to no CPU for half a second."""
    cpu_s = server.cpu_s()
    time.sleep(0.5)
    return server.cpu_s() - cpu_s < 0.02


def _all_released(ball: Timeball, rows: int) -> int:
    """Wait until so many releases of this process are on disk; returns when that was seen, in ms."""
    wait_until(lambda: ball.status()["lateness"]["released"] >= rows, BOUND_S, f"{rows} releases on disk")
    return now_ms()
