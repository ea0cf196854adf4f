"""Scenarios with an external dispatcher, which brings some messages once, some twice, and others never."""

from __future__ import annotations

import asyncio

import pyarrow as pa
from tests.crash.steps import Step, cancel_some
from tests.crash.world import HOUR_MS, SECOND_MS, World

from timeball.model.message import TABLE_SCHEMA

NEAR_MS = 20 * SECOND_MS
LEASE_MS = 120 * SECOND_MS


async def lease(world: World) -> None:
    """Register a dispatcher."""
    world.broker.delivery.lease_to_dispatcher(LEASE_MS)


def pass_by(ms: int, dispatched: int) -> Step:
    """Let time pass in steps of a second, until `dispatched` messages are left to the dispatcher."""

    async def step(world: World) -> None:
        for _ in range(ms // SECOND_MS):
            world.clock.advance(SECOND_MS)
            world.broker.ticker.wake()
            await asyncio.sleep(0)
        counts = world.broker.schedule_statistics
        await world.until(
            lambda: counts()["dispatched_rows"] == dispatched, f"{dispatched} are left to the dispatcher"
        )

    return step


def bring(every: int) -> Step:
    """Bring every n-th of the due rows, in files of any age."""

    async def step(world: World) -> None:
        for file in world.broker.scheduling.hour_log.pending.all():
            rows = file.rows_between((0, 0), (world.clock.wall + 1, 0)).combine_chunks()
            for batch in rows.take(pa.array(range(0, rows.num_rows, every), pa.int64())).to_batches():
                if batch.num_rows:
                    columns = batch.select(TABLE_SCHEMA.names).columns
                    await world.broker.delivery.release_dispatched(
                        pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)
                    )

    return step


# Left to the dispatcher by compaction and by a bulk job: brought, cancelled, brought twice, never brought. With a save.
DISPATCH: list[Step] = [
    lambda w: w.start(),
    lambda w: w.send("a", [None, 500, NEAR_MS, NEAR_MS, NEAR_MS + 1, NEAR_MS + 2, 2 * HOUR_MS]),  # k0 to k6
    lambda w: w.compact(),
    lambda w: w.bulk("b", [NEAR_MS, NEAR_MS + 500, NEAR_MS + SECOND_MS, HOUR_MS], 1),  # k7 to k10
    lease,
    pass_by(19 * SECOND_MS, 7),
    lambda w: w.checkpoint(),
    cancel_some(3, 77),
    pass_by(SECOND_MS, 7),
    bring(2),
    lambda w: w.consume(),
    lambda w: w.checkpoint(),
    bring(1),
    cancel_some(2, 8),
    lambda w: w.advance(4 * SECOND_MS),  # the grace time, and messages that were not brought
    lambda w: w.consume(),
    lambda w: w.rewrite(1),
    lambda w: w.checkpoint(),
    lambda w: w.send("a", [NEAR_MS, NEAR_MS + 700]),  # k11, k12
    lambda w: w.compact(),
    lease,
    pass_by(19 * SECOND_MS, 2),
    lambda w: w.restart(),
    lambda w: w.advance(2 * SECOND_MS),
    bring(1),
    lambda w: w.consume(),
    lambda w: w.merge(),
    lambda w: w.apply_retention(),
    lambda w: w.checkpoint(),
]

SCENARIOS = {"dispatch": DISPATCH}
