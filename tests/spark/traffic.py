"""Messages and rows for the tests of the pipeline."""

from __future__ import annotations

import pyarrow as pa
from tests.node_fixture import RunningNode, eventually

from timeball import Timeball
from timeball.model.errors import NotFound
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.model.message import LOG_SCHEMA, READ_SCHEMA, Kind, build_rows, encode_properties
from timeball.spark.endpoint import Endpoint


def send(endpoint: str, rows: int, *, after_ms: int = 30 * DAY_MS, topic: str = "orders") -> None:
    """Send scheduled messages due `after_ms` from now and later, one hour apart in three hundred steps."""
    with Endpoint(endpoint) as broker, Timeball(endpoint) as ball:
        now_ms = broker.status().now_ms
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
    """Send scheduled messages that are due and released within moments."""
    with Endpoint(endpoint) as broker, Timeball(endpoint) as ball:
        for i in range(rows):
            row = {"body": [b"now %d" % i], "keys": [f"key{i}"], "delay_ms": pa.array([1], pa.int64())}
            ball.send_many(pa.table(row), topic=topic)
        eventually(lambda: _visible(broker, topic) >= rows, f"{rows} rows of {topic} released")


def _visible(broker: Endpoint, topic: str) -> int:
    try:
        return sum(end - begin for begin, end in broker.queues(topic).values())
    except NotFound:  # the topic does not exist before its first release
        return 0


def commit_half(node: RunningNode, **delay: int) -> int:
    """Commit a half message with a delay. Returns its number."""

    async def commit() -> int:
        properties = encode_properties({"TRAN_MSG": "true", "PGROUP": "payers"})
        row = {
            "topic": ["orders"],
            "body": [b"half"],
            "properties": [properties],
            "sys_flag": pa.array([5], pa.int32()),
        }
        accepted, durable = node.broker.prepare_nowait(pa.record_batch(row))
        await durable
        seq = int(accepted.first_seq)
        await node.broker.transactions.end(seq, "payers", commit=True, delay=lambda _: delay)
        return seq

    return node.run(commit())


def visible(ball: Timeball, topic: str) -> int:
    """Count the rows in the queues of a topic. The topic may not exist before its first release."""
    if topic not in ball.topics():
        return 0
    return sum(queue.max - queue.min for queue in ball.queues(topic).values())


def attached_seqs(broker: Endpoint) -> list[int]:
    """List the sequence numbers of all rows in the pending table, sorted."""
    from deltalake import DeltaTable

    table = DeltaTable(broker.status().table.uri).to_pyarrow_table(columns=["seq"])
    return sorted(table.column("seq").to_pylist())


def log_rows(kind: Kind, count: int, **columns: object) -> pa.RecordBatch:
    """Make rows as `read_log` yields them, with seq from 1 on."""
    rows = build_rows(count, kind=int(kind), **columns)
    seqs = columns.get("seq", pa.array(range(1, count + 1), pa.int64()))
    assert rows.schema == LOG_SCHEMA
    return pa.RecordBatch.from_arrays([seqs, *rows.columns], schema=READ_SCHEMA)
