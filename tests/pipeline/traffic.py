"""Messages and rows for the tests of the pipeline."""

from __future__ import annotations

import asyncio

import numpy as np
import pyarrow as pa
from tests.node_fixture import RunningNode, eventually

from timeball import Timeball
from timeball.broker.delivery import moved_rows
from timeball.limits import DAY_MS, HOUR_MS
from timeball.log import retention
from timeball.message import LOG_SCHEMA, READ_SCHEMA, Kind, build_rows
from timeball.pipeline.endpoint import Endpoint
from timeball.schedule.places import as_promises


def send(endpoint: str, rows: int, *, after_ms: int = 30 * DAY_MS, topic: str = "orders") -> None:
    """Promises due `after_ms` from now and later, an hour apart in three hundred steps."""
    with Timeball(endpoint) as ball:
        now_ms = ball.status()["now_ms"]
        due = [now_ms + after_ms + HOUR_MS * (i % 300) for i in range(rows)]
        ball.send_many(
            pa.table(
                {
                    "topic": pa.array([topic] * rows),
                    "body": pa.array([f"body {i}".encode() for i in range(rows)], pa.binary()),
                    "due_ms": pa.array(due, pa.int64()),
                }
            )
        )


def send_due_now(endpoint: str, rows: int, topic: str = "orders") -> None:
    """Promises that are due, and released, within moments."""
    with Timeball(endpoint) as ball:
        for i in range(rows):
            ball.send(topic, f"now {i}", after="1ms", keys=f"key{i}")
        eventually(lambda: visible(ball, topic) >= rows, f"{rows} rows of {topic} released")


def visible(ball: Timeball, topic: str) -> int:
    """Rows that stand in the queues of a topic; a topic begins with its first release."""
    if topic not in ball.topics():
        return 0
    return sum(queue.max - queue.min for queue in ball.queues(topic).values())


def write_again(node: RunningNode, *places: int) -> list[int]:
    """Promises at these places once more, as a wheel's roll and a cascade's hop do; the places of the MOVED rows."""

    async def write() -> int:
        parts = node.broker.parts
        promises = as_promises(parts.reader.take(np.array(places, np.int64)))
        _, durable = parts.writer.append(moved_rows(promises, now_ms=parts.clock.now_ms()))
        return await durable

    first_seq = node.run(write())
    return list(range(first_seq, first_seq + len(places)))


def fill_segment(node: RunningNode) -> None:
    """Messages, until the log has begun another segment: retention takes whole ones."""
    parts = node.broker.parts
    ordinal, body = parts.reader.segments.last.ordinal, b"." * 1_000_000
    with Timeball(node.endpoint) as ball:
        for _ in range(2 + node.settings.segment_bytes // len(body)):
            ball.send("filler", body)
    assert parts.reader.segments.last.ordinal > ordinal


def let_go(node: RunningNode) -> int:
    """All segments but the newest, as retention lets them go; the first row that is kept."""

    async def remove() -> int:
        parts = node.broker.parts
        gone = parts.reader.segments.all[:-1]
        await asyncio.get_running_loop().run_in_executor(
            parts.reader_thread, retention.remove, parts.files, parts.reader.segments, gone
        )
        return parts.reader.first_seq

    return node.run(remove())


def attached_seqs(broker: Endpoint) -> list[int]:
    """Sequence numbers of all rows in the pending table, sorted."""
    from deltalake import DeltaTable

    table = DeltaTable(broker.status().table.uri).to_pyarrow_table(columns=["seq"])
    return sorted(table.column("seq").to_pylist())


def log_rows(kind: Kind, count: int, **columns: object) -> pa.RecordBatch:
    """Rows as `read_log` yields them, seq from 1 on."""
    rows = build_rows(count, kind=int(kind), **columns)
    seqs = columns.get("seq", pa.array(range(1, count + 1), pa.int64()))
    assert rows.schema == LOG_SCHEMA
    return pa.RecordBatch.from_arrays([seqs, *rows.columns], schema=READ_SCHEMA)
