"""One machine of three is lost for good: how long until a new one holds all that waits, and whether service goes on.

The table of what waits is written as a bulk job writes it, in due order, and attached; one node of three is killed and
its disk wiped; another one starts on an empty disk and is added. A client schedules a message every few milliseconds
all the while: before, and until the record names three replicas again.

TIMEBALL_BENCH_ROWS says how many wait, 1 million unless it is set. Not measured: machines of their own. All nodes read,
ship and write on one disk, and share its cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.cluster import cpu_s
from benchmarks.report import Report
from timeball.model.errors import SetupError, TimeballError
from timeball.model.message import TABLE_SCHEMA, Kind
from timeball.spark.endpoint import Endpoint
from timeball.table import layout
from timeball.table.attachment import Attachment, FileEntry

if TYPE_CHECKING:
    from tests.cluster.processes import Cluster, NodeProcess

ONLY_BY_NAME = True  # needs etcd
ROWS, ROWS_SMALL, CHUNK_ROWS = 1_000_000, 2_000, 250_000
BODY_BYTES = 128
YEAR_MS, HOUR_MS = 365 * 86_400_000, 3_600_000
EVERY_S, AFTER_MS = 0.005, 1_000
BEFORE_S, BEFORE_S_SMALL = 10.0, 0.5
TOPIC = "steady"
OPTIONS = {"lease-ttl-ms": "2s", "segment-bytes": "256MiB"}


def run(*, small: bool) -> Report:
    """Measure once; raises SetupError without etcd."""
    # What these need is a checkout's alone, as in benchmarks/cluster.py.
    from tests.cluster.etcd_cluster import BINARY
    from tests.cluster.processes import NodeProcess, running_cluster

    if BINARY is None:
        raise SetupError("etcd is not installed (Debian: etcd-server)")
    rows = ROWS_SMALL if small else int(os.environ.get("TIMEBALL_BENCH_ROWS", ROWS))
    report = Report("add_replica", small)
    with (
        tempfile.TemporaryDirectory(prefix="timeball-bench-") as name,
        running_cluster(Path(name), net=None, **OPTIONS) as cluster,
    ):
        leader = cluster.leader()
        began_s = time.monotonic()
        fill(leader, rows)
        report.add("waiting messages", waiting(leader), "messages", rows)
        report.add("to write and attach them", time.monotonic() - began_s, "s")
        report.add("data folder of the leader", size_bytes(leader.data) / 1e6, "MB")
        report.add("load average at the begin", os.getloadavg()[0], "processes")
        steady = Steady([*cluster.nodes.values()])
        with steady.sending("before"):
            time.sleep(BEFORE_S_SMALL if small else BEFORE_S)
        lost = next(node for node in cluster.nodes.values() if node is not leader)
        assert leader.process is not None
        spent_s = cpu_s(leader.process.pid)
        with steady.sending("while it is added"):
            lost.kill()
            lost.wipe()
            began_s = time.monotonic()
            fresh = NodeProcess("d", cluster.folder, cluster.etcd.endpoints, dict(lost.options))
            cluster.nodes["d"] = fresh
            fresh.start()
            cluster.wait("d has reported", lambda: "d" in cluster.ask("reports"))  # type: ignore[operator]
            command(cluster, "add-replica", "d", "--wait", "2h")
            command(cluster, "remove-replica", lost.name)
            took_s = time.monotonic() - began_s
        spent_s = cpu_s(leader.process.pid) - spent_s
        report.add("from an empty disk to full redundancy", took_s / 60, "min")
        shipped = size_bytes(fresh.data)
        report.add("data folder of the new replica", shipped / 1e6, "MB")
        report.add("shipped", shipped / 1e6 / took_s, "MB/s")
        report.add("leader's CPU meanwhile, for each that waits", spent_s / rows * 1e6, "us/message")
        steady.report(leader, report)
    return report


def command(cluster: Cluster, *arguments: str) -> None:
    """Run a command of `timeball cluster`; raises CalledProcessError."""
    where = ["--cluster", "tests", "--etcd", ",".join(cluster.etcd.endpoints), "--json"]
    subprocess.run(
        [sys.executable, "-m", "timeball", "cluster", *arguments, *where], check=True, stdout=subprocess.PIPE
    )


# -- what waits ------------------------------------------------------------------------------------------------


def fill(leader: NodeProcess, rows: int) -> None:
    """Attach so many messages, due evenly over a year that begins in an hour."""
    with Endpoint(leader.endpoint) as broker:
        now_ms = broker.status().now_ms
        for at in range(0, rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, rows - at)
            first_seq = broker.reserve(count)
            table = waiting_rows(first_seq, count, now_ms + HOUR_MS, at / rows, count / rows, now_ms)
            files = write(leader.data, table, now_ms)
            broker.attach(
                Attachment(job="bulk", job_id="waiting", epoch=at, files=files, ranges=[(first_seq, count)])
            )


def waiting_rows(
    first_seq: int, count: int, begin_ms: int, part: float, share: float, now_ms: int
) -> pa.Table:
    """Return rows of the pending table for a share of the year, with bodies that do not compress."""
    due_ms = begin_ms + ((part + share * np.arange(count) / count) * YEAR_MS).astype(np.int64)
    seq = np.arange(first_seq, first_seq + count)
    ends = np.arange(count + 1, dtype=np.int32) * BODY_BYTES
    bodies = np.random.default_rng(first_seq).bytes(count * BODY_BYTES)
    text = pc.cast(pa.array(seq), pa.string())
    columns: dict[str, pa.Array] = {
        "seq": pa.array(seq),
        "due_ms": pa.array(due_ms),
        "topic": pa.repeat("waiting", count),
        "queue_id": pa.repeat(pa.scalar(-1, pa.int32()), count),
        "unique_key": pc.utf8_lpad(text, 32, "0"),
        "keys": pc.binary_join_element_wise("order", text, "-"),
        "body": pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(bodies)]),
        "born_ms": pa.repeat(pa.scalar(now_ms, pa.int64()), count),
        "accepted_ms": pa.repeat(pa.scalar(now_ms, pa.int64()), count),
        **{
            name: pa.repeat(pa.scalar(0, pa.int32()), count)
            for name in ("flag", "sys_flag", "reconsume_times")
        },
    }
    return pa.table(
        [columns.get(field.name, pa.nulls(count, field.type)) for field in TABLE_SCHEMA], schema=TABLE_SCHEMA
    )


def write(folder: Path, rows: pa.Table, now_ms: int) -> list[FileEntry]:
    """Write rows into files of the leader's table; return their entries."""
    entries = []
    for entry, data in layout.sorted_files(rows, now_ms):
        path = folder / layout.FOLDER / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        entries.append(entry)
    return entries


def waiting(leader: NodeProcess) -> int:
    """Return how many messages the group says are waiting."""
    with leader.client() as ball:
        return int(json.loads(json.dumps(ball.status()))["waiting_messages"])


def size_bytes(folder: Path) -> int:
    """Return the bytes on the disk of all files in a folder; some go while they are counted."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


# -- service ---------------------------------------------------------------------------------------------------


class Steady:
    """A client that schedules a message every few milliseconds, one after the other."""

    def __init__(self, nodes: list[NodeProcess]) -> None:
        self._nodes = nodes
        self._acks_ms: dict[str, list[float]] = {}
        self._spans_ms: dict[str, tuple[int, int]] = {}
        self._failed: dict[str, int] = {}

    @contextmanager
    def sending(self, phase: str) -> Iterator[None]:
        """Send for as long as the block lasts."""
        ended = threading.Event()
        acks_ms, self._failed[phase] = self._acks_ms.setdefault(phase, []), 0
        sender = threading.Thread(target=self._send, args=(phase, acks_ms, ended))
        begun_ms = time.time_ns() // 1_000_000
        sender.start()
        try:
            yield
        finally:
            ended.set()
            sender.join()
            self._spans_ms[phase] = begun_ms, time.time_ns() // 1_000_000

    def _send(self, phase: str, acks_ms: list[float], ended: threading.Event) -> None:
        from tests.cluster.processes import client_of

        with client_of(self._nodes) as ball:
            while not ended.wait(EVERY_S):
                began_s = time.monotonic()
                try:
                    ball.send(TOPIC, b"x" * BODY_BYTES, after=f"{AFTER_MS}ms", retry=True)
                except TimeballError:
                    self._failed[phase] += 1
                else:
                    acks_ms.append((time.monotonic() - began_s) * 1e3)

    def report(self, leader: NodeProcess, report: Report) -> None:
        """Add rates, waits for acknowledgements, and how late what was due in each phase became visible."""
        time.sleep(2 * AFTER_MS / 1e3)
        due_ms, late_ms = lateness(leader)
        for phase, (begin_ms, end_ms) in self._spans_ms.items():
            acks_ms = np.array(self._acks_ms[phase])
            report.add(f"{phase}: sends", len(acks_ms) / (end_ms - begin_ms) * 1e3, "msg/s")
            report.add(f"{phase}: failed", self._failed[phase], "sends")
            report.add(f"{phase}: ack p50", np.percentile(acks_ms, 50), "ms")
            report.add(f"{phase}: ack p99", np.percentile(acks_ms, 99), "ms")
            report.add(f"{phase}: longest ack", acks_ms.max(), "ms")
            late = late_ms[(due_ms >= begin_ms) & (due_ms < end_ms)]
            report.add(f"{phase}: late p50", np.percentile(late, 50) if len(late) else 0, "ms")
            report.add(f"{phase}: late p99", np.percentile(late, 99) if len(late) else 0, "ms")
            report.add(f"{phase}: latest", late.max() if len(late) else 0, "ms")


def lateness(leader: NodeProcess) -> tuple[np.ndarray, np.ndarray]:
    """Return the instants of all messages that were released, and by how many milliseconds each was late."""
    due, late = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    with Endpoint(leader.endpoint) as broker:
        for queue, kept in broker.queues(TOPIC).items():
            for rows in broker.read_queue(TOPIC, queue, *kept):
                assert set(rows.column("kind").to_pylist()) == {Kind.RELEASE}
                due.append(rows.column("due_ms").to_numpy())
                late.append(rows.column("store_ms").to_numpy() - due[-1])
    return np.concatenate(due), np.concatenate(late)
