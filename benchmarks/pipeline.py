"""The Spark pipeline on one machine, local[2]: start and memory, how fast rows are read, scheduled and told of.

A broker holds scheduled messages of 128 bytes due over the next year, sent and compacted beforehand. A process of its
own starts a session (seconds until it is ready, until its first query, until its first query with Python workers),
reads the log and the pending table through the data source, brings the ledger up to date, and schedules a Parquet file
in bulk. Rates of reads are of second runs; those of the ledger and of bulk are of single ones, with their planning.
Memory is what belongs to each process alone and its share of what they share (PSS), before and after the work. Then the
streaming job `dispatch` releases a steady load and a burst in place of the broker's own wheel.

Not measured: a cluster, an object store, senders and consumers at work meanwhile, compaction (see the benchmark
compact), the streams ledger and archive, forecast and replay.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import pipeline_dispatch
from benchmarks.harness import Server, now_ms, send_scheduled, serving
from benchmarks.report import Report
from timeball import Timeball

ROOT = Path(__file__).resolve().parents[1]
BULK_BAR = 300_000.0
HOUR_MS = 3_600_000
LONGEST_S = 1_800


def run(small: bool = False) -> Report:
    """Measure; rows a second, seconds, MiB."""
    report = Report("pipeline", small)
    with serving("--compact-rows", "0") as (server, ball):
        waiting, bulk = (2_000, 5_000) if small else (2_000_000, 10_000_000)
        send_scheduled(
            ball, now_ms() + np.random.default_rng(3).integers(HOUR_MS, 365 * 24 * HOUR_MS, waiting)
        )
        ball.compact()
        cpu_s = server.cpu_s()
        for name, value, unit in _work(server, bulk):
            bar = BULK_BAR if name == "bulk: rate" else None
            report.add(name, value, unit, bar)
        report.add("bulk and reads: CPU of the broker", (server.cpu_s() - cpu_s) / bulk * 1e6, "us/msg")
        _check(report, ball, waiting + bulk)
    pipeline_dispatch.measure(report, small)
    return report


def _work(server: Server, bulk: int) -> list[tuple[str, float, str]]:
    """What the process with the session has measured."""
    with tempfile.TemporaryDirectory(prefix="timeball-bench-") as folder:
        command = [sys.executable, "-m", "benchmarks.pipeline_work", server.endpoint, str(bulk), folder]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    if done.returncode:
        raise RuntimeError(f"the process with the session ended with code {done.returncode}:\n{done.stderr}")
    return [(name, value, unit) for name, value, unit in json.loads(done.stdout.splitlines()[-1])]


def _check(report: Report, ball: Timeball, wanted: int) -> None:
    """Nothing was due yet: all that was sent and attached must wait.

    A run of compaction ends after so many numbers, of which rows of state have some: a few scheduled messages stay in
    the tail.
    """
    waiting = ball.status()["schedule"]
    there = waiting["table_rows"] + waiting["tail_rows"]
    report.add("missing or doubled", abs(there - wanted), "messages", 0, "lower")
