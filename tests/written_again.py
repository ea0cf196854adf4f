"""Scheduled messages that were written again, and rows that retention has removed, on a running node.

These are the rows of a wheel's roll and of a cascade's hop, without the days that they take.
"""

from __future__ import annotations

import asyncio

import numpy as np
from tests.node_fixture import RunningNode

from timeball.broker.accepting.delivery import moved_rows
from timeball.schedule.locations import as_scheduled


def write_again(node: RunningNode, *places: int) -> list[int]:
    """Write the messages at these places again, as a roll and a hop do. Returns the places of the MOVED rows."""

    async def write() -> int:
        scheduled_rows = as_scheduled(node.broker.log.reader.read_rows(np.array(places, np.int64)))
        _, durable = node.broker.log.writer.append(
            moved_rows(scheduled_rows, now_ms=node.broker.clock.now_ms())
        )
        return await durable

    first_seq = node.run(write())
    return list(range(first_seq, first_seq + len(places)))


def fill_segment(node: RunningNode) -> None:
    """Send messages until the log has begun another segment, because retention removes whole ones."""
    ordinal, body = node.broker.log.reader.segments.last.ordinal, b"." * 1_000_000
    with node.client() as ball:
        for _ in range(2 + node.settings.segment_bytes // len(body)):
            ball.send("filler", body)
    assert node.broker.log.reader.segments.last.ordinal > ordinal


def apply_retention(node: RunningNode) -> int:
    """Remove all segments but the newest, as retention does. Returns the first remaining row."""

    async def remove() -> int:
        removed = node.broker.log.reader.segments.all[:-1]
        await asyncio.get_running_loop().run_in_executor(
            node.broker.threads.reader, node.broker.log.reader.segments.remove, node.broker.files, removed
        )
        return node.broker.log.reader.first_seq

    return node.run(remove())
