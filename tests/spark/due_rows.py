"""Scheduled messages in files of the pending table, due within seconds, for the tests of dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from tests.node_fixture import RunningNode, eventually
from tests.spark.traffic import visible

from timeball.model.message import TABLE_SCHEMA
from timeball.spark.endpoint import Endpoint
from timeball.spark.table_store import Store
from timeball.table.attachment import Attachment
from timeball.table.layout import sort_rows


def attach(broker: Endpoint, dues_ms: Sequence[int], topic: str = "due", job_id: str = "due") -> list[int]:
    """Attach one file of scheduled messages with these due times. Returns their sequence numbers."""
    first_seq, count = broker.reserve(len(dues_ms)), len(dues_ms)
    status = broker.status()
    columns = {
        "seq": range(first_seq, first_seq + count),
        "due_ms": sorted(dues_ms),
        "topic": [topic] * count,
        "body": [f"body {i}".encode() for i in range(count)],
        "unique_key": [f"{job_id}{i}" for i in range(count)],
        "accepted_ms": [status.now_ms] * count,
    }
    rows = pa.table(
        [pa.array(columns.get(f.name, [None] * count), f.type) for f in TABLE_SCHEMA], TABLE_SCHEMA
    )
    files = list(Store(status.table.uri).put_rows(sort_rows(rows), status.now_ms))
    broker.attach(Attachment(job="bulk", job_id=job_id, epoch=0, files=files, ranges=[(first_seq, count)]))
    return list(columns["seq"])


def left(node: RunningNode) -> int:
    """Count the rows that the broker has left to its dispatcher."""
    return int(status(node)["schedule"]["dispatched_rows"])


def fetched(node: RunningNode) -> int:
    """Count the rows that the broker has loaded because no dispatcher sent them."""
    return int(status(node)["schedule"]["fetched_rows"])


def released(node: RunningNode) -> int:
    """Count all releases since the start."""
    return int(status(node)["lateness"]["released"])


def status(node: RunningNode) -> dict[str, Any]:
    """Read the broker's status on its own event loop."""

    async def ask() -> dict[str, Any]:
        return node.broker.status()

    return node.run(ask())


def all_out(node: RunningNode, rows: int, topic: str = "due") -> None:
    """Wait until this number of messages is visible, and check that there are no more."""
    with node.client() as ball:
        eventually(lambda: visible(ball, topic) >= rows, f"{rows} rows released")
        assert visible(ball, topic) == rows
