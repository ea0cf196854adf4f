"""Scheduled messages that were written again, and rows that retention has let go, on a running node.

What a wheel's roll and a cascade's hop write, without the days that they take.
"""

from __future__ import annotations

import asyncio

import numpy as np
from tests.node_fixture import RunningNode

from timeball.broker.accepting.delivery import moved_rows
from timeball.schedule.locations import as_scheduled


def write_again(node: RunningNode, *places: int) -> list[int]:
    """Messages at these places once more, as a wheel's roll and a cascade's hop do; the places of the MOVED rows."""

    async def write() -> int:
        scheduled_rows = as_scheduled(node.broker.log.reader.read_rows(np.array(places, np.int64)))
        _, durable = node.broker.log.writer.append(
            moved_rows(scheduled_rows, now_ms=node.broker.clock.now_ms())
        )
        return await durable

    first_seq = node.run(write())
    return list(range(first_seq, first_seq + len(places)))


def fill_segment(node: RunningNode) -> None:
    """Messages, until the log has begun another segment: retention takes whole ones."""
    ordinal, body = node.broker.log.reader.segments.last.ordinal, b"." * 1_000_000
    with node.client() as ball:
        for _ in range(2 + node.settings.segment_bytes // len(body)):
            ball.send("filler", body)
    assert node.broker.log.reader.segments.last.ordinal > ordinal


def apply_retention(node: RunningNode) -> int:
    """All segments but the newest, as retention lets them go; the first row that is kept."""

    async def remove() -> int:
        gone = node.broker.log.reader.segments.all[:-1]
        await asyncio.get_running_loop().run_in_executor(
            node.broker.threads.reader, node.broker.log.reader.segments.remove, node.broker.files, gone
        )
        return node.broker.log.reader.first_seq

    return node.run(remove())
