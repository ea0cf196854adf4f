"""The same work with Spark and without, as a user would give it: `python -m benchmarks.engines ROWS...`.

For each size: scheduled messages of 128 bytes due over the next year are sent to a fresh broker. Then each engine does
the work, each as a command of its own, so that its start is in the time:

    compact     the broker itself (`compact` over Flight); `pipeline run compact --once` with and without Spark
    ledger      `pipeline run ledger --once` with and without Spark, each into a table of its own
    forecast    `forecast` by DuckDB, and with --master
    audit       in full, then since the last one; each with Spark and without

Compact needs a tail, so it has a broker of its own for each engine. Printed: seconds and CPU-seconds of the command.

Not measured: a cluster, where tasks run on more cores than one machine has; messages that come meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np

from benchmarks.compact import Family
from benchmarks.harness import CHECKOUT, Server, now_ms, send_scheduled, serving
from timeball import Timeball

HOUR_MS = 3_600_000
STEP_ROWS = 1_000_000
LONGEST_S = 3_600
SPARK, PLAIN = ["--master", "local[2]"], ["--no-spark"]


def fill(ball: Timeball, rows: int) -> None:
    """Send in steps, as the memory of this process asks for."""
    for begin in range(0, rows, STEP_ROWS):
        due = np.random.default_rng(begin).integers(HOUR_MS, 365 * 24 * HOUR_MS, min(STEP_ROWS, rows - begin))
        send_scheduled(ball, now_ms() + due)


def command(server: Server, *words: str) -> tuple[float, float]:
    """Return seconds, and CPU-seconds of the command with all its processes."""
    begun = time.perf_counter()
    line = [sys.executable, "-m", "timeball", *words, "--endpoint", server.endpoint]
    job = subprocess.Popen(line, cwd=CHECKOUT, stdout=subprocess.DEVNULL)
    family = Family(job.pid)
    if job.wait(LONGEST_S) != 0:
        raise RuntimeError(f"{' '.join(words)} ended with code {job.returncode}")
    return time.perf_counter() - begun, family.cpu_s()


def show(rows: int, work: str, engine: str, took: tuple[float, float]) -> None:
    """Print one line of the table."""
    print(f"| {rows:,} | {work} | {engine} | {took[0]:.1f} | {took[1]:.1f} |", flush=True)


def measure(rows: int) -> None:
    """Do all of it at one size."""
    run = ["pipeline", "run", "--once", "--log-level", "warning"]
    for engine in (SPARK, PLAIN):
        with serving("--compact-rows", "0") as (server, ball):
            fill(ball, rows)
            show(rows, "compact", engine[0], command(server, *run, "compact", *engine))
            if engine is SPARK:
                continue
            for each in (SPARK, PLAIN):
                uri = str(server.data / f"ledger{len(each)}")
                took = command(server, *run, "ledger", "--option", f"ledger.uri={uri}", *each)
                show(rows, "ledger", each[0], took)
            command(server, *run, "ledger", *PLAIN)  # the audit's
            for words in ([], SPARK):
                show(rows, "forecast", words[0] if words else "DuckDB", command(server, "forecast", *words))
            for each in (SPARK, PLAIN):
                for words, name in ((["--full"], "audit --full"), ([], "audit")):
                    show(rows, name, each[0], command(server, "audit", *words, *each))
    with serving("--compact-rows", "0") as (server, ball):
        fill(ball, rows)
        cpu_s, begun = server.cpu_s(), time.perf_counter()
        ball.compact()
        show(rows, "compact", "broker", (time.perf_counter() - begun, server.cpu_s() - cpu_s))


if __name__ == "__main__":
    print("| rows | work | engine | s | CPU-s |\n| ---: | --- | --- | ---: | ---: |", flush=True)
    for size in sys.argv[1:] or ["1000000"]:
        measure(int(size))
