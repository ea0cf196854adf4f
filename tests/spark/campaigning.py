"""Campaigns for tests, attached without Spark, and the outcomes of their scheduled messages."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
from tests.node_fixture import RunningNode

from timeball.model.limits import HOUR_MS
from timeball.model.message import Kind
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs.campaign import Campaign
from timeball.spark.source import scheduled_writer
from timeball.spark.table_store import Store
from timeball.spark.views.duckdb_session import SqlSession
from timeball.table.attachment import Attachment

TOPIC = "mail"


def attach(
    campaign: Campaign, rows: int, parts: int = 2, after_ms: int = HOUR_MS, step_ms: int = 1_000
) -> None:
    """Do the work of a bulk write: attach numbered rows in `parts` ranges, with keys k0, k1, …, due `step_ms` apart."""
    broker = campaign.broker
    now_ms = broker.status().now_ms
    campaign.plan(rows, now_ms)
    files, ranges = [], []
    for numbers in np.array_split(np.arange(rows), parts):
        table = pa.table(
            {
                "topic": pa.array([TOPIC] * len(numbers)),
                "body": pa.array([f"dear {n}" for n in numbers]),
                "keys": pa.array([f"k{n}" for n in numbers]),
                "due_ms": pa.array(now_ms + after_ms + numbers * step_ms),
            }
        )
        shaped = scheduled_writer.with_unique_keys(scheduled_writer.to_table_columns(table, now_ms))
        first_seq = broker.reserve(len(numbers))
        files += Store(campaign.table_uri).put_rows(scheduled_writer.numbered(shaped, first_seq), now_ms)
        ranges.append((first_seq, len(numbers)))
    broker.attach(Attachment(job="bulk", job_id=campaign.id, epoch=0, files=files, ranges=ranges))


def released(broker: Endpoint) -> Counter[str]:
    """Count the releases of each key in the kept log."""
    log = broker.status().log
    rows = broker.read_log(log.first_seq, log.durable_seq, [Kind.RELEASE], columns=["keys"])
    return Counter(key for batch in rows for key in batch.column("keys").to_pylist())


def waiting(broker: Endpoint) -> dict[str, int]:
    """Read {key: due time} of all pending messages. Fails if a key occurs twice."""
    with SqlSession(broker.uri, bodies=False) as session:
        result = session.run("select keys, due_ms from pending").rows.read_all().to_pylist()
    assert len({row["keys"] for row in result}) == len(result), "a scheduled message waits twice"
    return {row["keys"]: row["due_ms"] for row in result}


def campaign_of(node: RunningNode, name: str = "spring") -> Campaign:
    """Open a campaign on a connection that the test need not close."""
    return Campaign(Endpoint(node.endpoint, patience_s=5), name)
