"""What `benchmarks.pipeline` measures from inside: `python -m benchmarks.pipeline_work ENDPOINT ROWS FOLDER`.

A process of its own, because a session can be started only once in one, and because what its processes hold is to be
told apart. Prints one line of JSON: [[name, value, unit], …].
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import psutil
from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import BODY_BYTES, TOPIC, now_ms
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import bulk, ledger
from timeball.spark.jobs.bulk import Columns
from timeball.spark.run.session import SparkEngine, build_session
from timeball.spark.table_store import sibling

MIB = 1024 * 1024
HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS

Figures = list[tuple[str, float, str]]


def measure(endpoint: str, rows: int, folder: str) -> Figures:
    """All figures, in the order in which they are taken."""
    found: Figures = []
    begun = time.perf_counter()
    spark = build_session("local[2]", "timeball bench")
    found.append(("session: ready", time.perf_counter() - begun, "s"))
    try:
        spark.range(1).count()
        found.append(("session: ready, and a first query", time.perf_counter() - begun, "s"))
        _read(spark, endpoint, columns="seq").count()
        found.append(("session: ready, and a first query of the log", time.perf_counter() - begun, "s"))
        found += _memory("idle")
        found += _reads(spark, endpoint)
        found += _ledger(spark, endpoint)
        found += _bulk(spark, endpoint, rows, folder)
        found += _memory("after the work")
    finally:
        spark.stop()
    return found


def _read(spark: SparkSession, endpoint: str, **options: str) -> DataFrame:
    return spark.read.format("timeball").option("endpoint", endpoint).options(**options).load()


def _drain(frame: DataFrame) -> None:
    """Every row into the JVM, and no further."""
    frame.write.format("noop").mode("overwrite").save()


def _second(work: Callable[[], None]) -> float:
    """Seconds of the second of two runs: the first one warms JVM and workers."""
    work()
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _reads(spark: SparkSession, endpoint: str) -> Figures:
    reads = {
        "log, all columns": {"kinds": "scheduled"},
        "log, seq and due_ms": {"kinds": "scheduled", "columns": "seq,due_ms"},
        "pending, all columns": {"read": "pending"},
        "pending, seq and due_ms": {"read": "pending", "columns": "seq,due_ms"},
    }
    found = []
    for name, options in reads.items():
        frame = _read(spark, endpoint, **options)
        rows, took_s = frame.count(), _second(lambda frame=frame: _drain(frame))  # type: ignore[misc]
        found.append((f"read {name}: rate", rows / took_s, "rows/s"))
    return found


def _ledger(spark: SparkSession, endpoint: str) -> Figures:
    with Endpoint(endpoint) as broker:
        status = broker.status()
    begun = time.perf_counter()
    rows = ledger.extend(
        SparkEngine(spark), endpoint, sibling(status.table.uri, "ledger"), status.log.durable_seq
    )
    return [("ledger: rate", rows / (time.perf_counter() - begun), "rows/s")]


def _bulk(spark: SparkSession, endpoint: str, rows: int, folder: str) -> Figures:
    path = f"{folder}/messages"
    first_ms = now_ms() + HOUR_MS
    spark.range(0, rows).selectExpr(
        f"timestamp_millis({first_ms} + pmod(xxhash64(id), {YEAR_MS})) as due",
        # 128 bytes that no compression makes smaller
        "unhex(concat(sha2(cast(id as string), 512), sha2(concat('x', id), 512))) as body",
    ).write.parquet(path)
    frame = spark.read.parquet(path)
    first = frame.first()
    assert first is not None and len(first["body"]) == BODY_BYTES
    used_s = _cpu_s()
    report = bulk.run(spark, frame, endpoint, columns=Columns(topic_name=TOPIC), campaign="bench")
    return [
        ("bulk: scheduled", report.rows, "messages"),
        ("bulk: rate", report.rows_per_s, "msg/s"),
        ("bulk: bytes written for a byte of payload", report.amplification or 0.0, "B/B"),
        ("bulk: CPU of the job", (_cpu_s() - used_s) / rows * 1e6, "us/msg"),
    ]


# ---- the processes of the session -------------------------------------------------------------------------


def _family() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _cpu_s() -> float:
    """User and system time of all of them, and of those of their children that have ended."""
    times = [process.cpu_times() for process in _family()]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


def _memory(when: str) -> Figures:
    java = workers = driver = 0
    for process in _family():
        held = process.memory_full_info().pss
        if "java" in process.name():
            java += held
        elif process.pid == psutil.Process().pid:
            driver += held
        else:
            workers += held
    parts = (("Java", java), ("Python workers", workers), ("the driver's Python", driver))
    return [(f"memory, {when}: {name}", size / MIB, "MiB") for name, size in parts]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
