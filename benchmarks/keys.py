"""Cancel by key among very many messages of the pending table; start, memory and files; a release of an hour beside.

The files are made by the functions of Spark's tasks (rows a task, each with its run of keys), in this process, and
attached as one bulk job after the other. TIMEBALL_KEYS_ROWS says how many scheduled messages (100000000 for the bar,
which needs 20 GB of disk and some minutes a 10 million), TIMEBALL_KEYS_TASK_ROWS how many rows a task has: fewer make
more files.

Then, with the runs merged as they are while it runs: cancels one after the other, each of another key at random;
cancels from many connections at once; a kill -9 and a start, to the first answer. At last a million is due within
100 s, as an hour's busiest may be, while 1,000 a second are steady, and the lateness of these is told.

Not measured: a cold page cache, a cluster, an object store; releases from files, as the burst comes from the tail
of the log.
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pyarrow as pa

from benchmarks.harness import TOPIC, Server, messages, now_ms, releases, serving, wait_until
from benchmarks.report import Report
from timeball import Timeball
from timeball.spark.endpoint import Endpoint
from timeball.spark.source import scheduled_writer
from timeball.spark.table_store import Store
from timeball.table.attachment import Attachment, FileEntry

HOUR_MS = 3_600_000
BODY_BYTES = 100
RATE_BAR, P99_BAR_MS, START_BAR_S, MEMORY_BAR = 1_000, 20, 5, 1.0
CLIENTS = 8, 32  # at once, in turn
ATTACH_ROWS = 5_000_000
SETTLE_S = 300.0


def run(small: bool = False) -> Report:
    """Measure."""
    report = Report("keys", small)
    rows = int(os.environ.get("TIMEBALL_KEYS_ROWS", 4_000 if small else 1_000_000))
    task_rows = int(os.environ.get("TIMEBALL_KEYS_TASK_ROWS", min(rows, 1_000_000)))
    with serving("--compact-rows", "0", MALLOC_ARENA_MAX="1") as (server, ball):
        ball.cancel(key="none")
        base, _ = server.memory_bytes()
        _fill(report, server, rows, task_rows)
        _wait_merged(ball)
        held, mapped = server.memory_bytes()
        schedule = ball.status()["schedule"]
        report.add("scheduled messages in the table", schedule["table_rows"], "scheduled")
        report.add("files", schedule["table_files"], "files")
        report.add("runs of keys", schedule["key_runs"], "runs")
        report.add("memory", (held - base) / rows, "bytes/message", MEMORY_BAR, "lower")
        report.add("memory, empty", base / 1e6, "MB")
        report.add("mapped files", mapped / 1e6, "MB")
        picked = np.random.default_rng(7).permutation(rows)
        count = 40 if small else 2_000
        _one_by_one(report, server, ball, picked[:count])
        for at, clients in enumerate(CLIENTS, 1):
            _at_once(report, server, picked[at * count : (at + 1) * count], clients)
        _restart(report, server, int(picked[-1]))
        with server.client() as fresh:
            _burst(report, fresh, 2_000 if small else 1_000_000, seconds=2 if small else 100)
    return report


def _fill(report: Report, server: Server, rows: int, task_rows: int) -> None:
    """Write and attach them: due over the next two years, keys k0, k1, …"""
    rng, attach_s, begun = np.random.default_rng(3), list[float](), time.perf_counter()
    with Endpoint(server.endpoint) as broker:
        status = broker.status()
        store = Store(status.table.uri)
        files, ranges = list[FileEntry](), list[tuple[int, int]]()
        for first in range(0, rows, task_rows):
            count = min(task_rows, rows - first)
            due = np.sort(status.now_ms + rng.integers(2 * HOUR_MS, 17_000 * HOUR_MS, count))
            bodies = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(BODY_BYTES), count, [None, pa.py_buffer(rng.bytes(count * BODY_BYTES))]
            )
            table = pa.table(
                {
                    "topic": pa.repeat(TOPIC, count),
                    "body": bodies.cast(pa.binary()),
                    "keys": pa.array([f"k{n}" for n in range(first, first + count)]),
                    "due_ms": pa.array(due),
                }
            )
            shaped = scheduled_writer.with_unique_keys(
                scheduled_writer.to_table_columns(table, status.now_ms)
            )
            first_seq = broker.reserve(count)
            files += store.put_rows(scheduled_writer.numbered(shaped, first_seq), status.now_ms)
            ranges.append((first_seq, count))
            if first + count == rows or sum(n for _, n in ranges) >= ATTACH_ROWS:
                at = time.perf_counter()
                broker.attach(
                    Attachment(job="bulk", job_id=f"keys-{first}", epoch=0, files=files, ranges=ranges)
                )
                attach_s.append(time.perf_counter() - at)
                files, ranges = [], []
    report.add("written and attached", rows / (time.perf_counter() - begun), "msg/s")
    report.add("the longest attach", max(attach_s), "s")


def _wait_merged(ball: Timeball) -> None:
    """Return when the runs have stayed as they are for some seconds."""
    seen = (-1, time.monotonic())

    def at_rest() -> bool:
        nonlocal seen
        runs = int(ball.status()["schedule"]["key_runs"])
        if runs != seen[0]:
            seen = runs, time.monotonic()
        return runs > 0 and time.monotonic() - seen[1] > 3

    wait_until(at_rest, SETTLE_S, "runs of keys to be merged")


def _one_by_one(report: Report, server: Server, ball: Timeball, picked: np.ndarray) -> None:
    took, cpu_s, begun = [], server.cpu_s(), time.perf_counter()
    for number in picked.tolist():
        at = time.perf_counter()
        [verdict] = ball.cancel(key=f"k{number}")
        took.append(time.perf_counter() - at)
        assert verdict.verdict == "cancelled", verdict
    spent_s = time.perf_counter() - begun
    report.add("cancel by key, 1 at a time: rate", len(picked) / spent_s, "/s")
    report.add("cancel by key, 1 at a time: p50", float(np.percentile(took, 50)) * 1e3, "ms")
    report.add(
        "cancel by key, 1 at a time: p99", float(np.percentile(took, 99)) * 1e3, "ms", P99_BAR_MS, "lower"
    )
    report.add(
        "cancel by key, 1 at a time: server CPU", (server.cpu_s() - cpu_s) / len(picked) * 1e6, "us/msg"
    )


def _at_once(report: Report, server: Server, picked: np.ndarray, clients: int) -> None:
    took: list[float] = []

    def cancel(numbers: list[int]) -> None:
        with server.client() as ball:
            for number in numbers:
                at = time.perf_counter()
                [verdict] = ball.cancel(key=f"k{number}")
                took.append(time.perf_counter() - at)
                assert verdict.verdict == "cancelled", verdict

    threads = [
        threading.Thread(target=cancel, args=(part.tolist(),)) for part in np.array_split(picked, clients)
    ]
    cpu_s, begun = server.cpu_s(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent_s = time.perf_counter() - begun
    report.add("missing or failed", len(picked) - len(took), "cancels", bar=0, better="lower")
    report.add(f"cancel by key, {clients} at a time: rate", len(picked) / spent_s, "/s", RATE_BAR)
    report.add(
        f"cancel by key, {clients} at a time: p99",
        float(np.percentile(took, 99)) * 1e3,
        "ms",
        P99_BAR_MS,
        "lower",
    )
    report.add(
        f"cancel by key, {clients} at a time: server CPU",
        (server.cpu_s() - cpu_s) / len(picked) * 1e6,
        "us/msg",
    )


def _restart(report: Report, server: Server, number: int) -> None:
    server.kill()
    server.start()
    report.add("kill -9 to ready", (now_ms() - server.started_ms) / 1e3, "s", START_BAR_S, "lower")
    with server.client() as fresh:
        [verdict] = fresh.cancel(key=f"k{number}")
        assert verdict.verdict == "cancelled", verdict
        report.add(
            "kill -9 to the first cancel by key",
            (now_ms() - server.started_ms) / 1e3,
            "s",
            START_BAR_S,
            "lower",
        )


def _burst(report: Report, ball: Timeball, rows: int, seconds: int) -> None:
    """`rows` within so many seconds, and beside them 1 a millisecond, told apart by their numbers."""
    begin_ms = now_ms() + (4_000 if rows < 10_000 else 60_000)
    rng = np.random.default_rng(5)
    for at in range(0, rows, 100_000):
        count = min(100_000, rows - at)
        ball.send_many(messages(count, begin_ms + rng.integers(0, seconds * 1_000, count), seed=100 + at))
    steady_ms = begin_ms - 1_000 + np.arange((seconds + 2) * 1_000)
    steady_seq = ball.status()["log"]["durable_seq"]
    ball.send_many(messages(len(steady_ms), steady_ms, seed=99))
    first, total = ball.status()["log"]["durable_seq"], rows + len(steady_ms)
    # No look at the log until all were due: to read a million rows takes the server more than to release some.
    end_ms = begin_ms + (seconds + 2) * 1_000
    time.sleep(max(0.0, (end_ms - now_ms()) / 1e3))
    wait_until(lambda: len(releases(ball, first)["due_ms"]) >= total, 60 + 10 * seconds, "all that were due")
    found = releases(ball, first)
    late = found["store_ms"] - found["due_ms"]
    report.add("released", len(late), "messages")
    report.add(
        "missing or doubled",
        abs(total - len(np.unique(found["source_seq"]))),
        "messages",
        bar=0,
        better="lower",
    )
    report.add("late, p99, a million an hour's burst beside 1,000/s", float(np.percentile(late, 99)), "ms")
    steady = found["source_seq"] >= steady_seq
    report.add(
        "late, p99, of the 1,000/s alone", float(np.percentile(late[steady], 99)), "ms", P99_BAR_MS, "lower"
    )
