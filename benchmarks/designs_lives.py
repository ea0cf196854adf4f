"""Bytes written for a scheduled message over its whole life, in virtual time: 40 days pass in seconds.

A real node without sockets, on real files, with a clock that is moved by hand to each instant at which a
strategy wants to be called, or a duty of the broker is due. Ten batches are sent within a second. Each is due in a
second of its own, within 5 % of the delay (a round delay would be a single hop of a cascade), at random milliseconds of
it; where a level is used, after exactly the delay. Near their instants the clock goes in steps of 100 ms, so that
releases come in batches too. A scheduled message that came or fell due alone would cost every strategy a page or so
more, each time.

What is counted: all pages that the process has made dirty, as the kernel counts them (`write_bytes` of
/proc/self/io): log, files of the strategy, mapped ones too, the table with its keys and its Delta log,
checkpoints, queue indexes. A page that is written again after it was synced counts again, as it does on the disk.
Beside it the bytes of the log's frames: scheduled messages, moves, releases.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pyarrow as pa

from benchmarks.designs_compared import HOUR_MS, Design, Ledger, level_of
from benchmarks.harness import BODY_BYTES, TOPIC, messages
from timeball.broker import maintenance
from timeball.io.clock import ManualClock
from timeball.io.threads import in_thread
from timeball.model.config import Settings
from timeball.node.node import Node

DELAYS_MS = {"10 s": 10_000, "1 h": HOUR_MS, "3 d": 72 * HOUR_MS, "40 d": 960 * HOUR_MS}
BATCHES, BATCH_PAUSE_MS = 10, 100
SPREAD = 0.05
STEP_MS = 100
LOOK_MS, FIRST_LOOK_MS, FIRST_LOOKS_MS = HOUR_MS, 60_000, 300_000
CHECKPOINT_MS = 10_000
CALM_ROUNDS = 3
BOUND_S = 60.0
NEVER_MS = 1 << 40  # no duty by itself: the life calls them, in its own time


@dataclass(frozen=True)
class Life:
    """What it took to keep `rows` scheduled messages; multiples are of the bodies' bytes."""

    rows: int
    written_bytes: int  # 0 where the file system does not count (one in memory)
    log_bytes: int
    ledger: Ledger
    due_before_ms: int

    @property
    def written(self) -> float:
        """Bytes written for each byte of a body."""
        return self.written_bytes / (self.rows * BODY_BYTES)

    @property
    def logged(self) -> float:
        """Of them the log's frames."""
        return self.log_bytes / (self.rows * BODY_BYTES)


def live(design: Design, delay_ms: int, rows: int, folder: Path, small: bool = False) -> Life | None:
    """Keep `rows` scheduled messages of one delay in an empty folder; None when the strategy cannot express it."""
    level = level_of(delay_ms) if design.by_level else 0
    if level is None or delay_ms > design.reach_ms(small):
        return None
    return asyncio.run(_Living(design, folder, rows, small).live(delay_ms, level))


class _Living:
    """One node and its clock."""

    def __init__(self, design: Design, folder: Path, rows: int, small: bool) -> None:
        self._clock = ManualClock()
        self._rows = rows // BATCHES * BATCHES
        settings = Settings(
            data=folder,
            segment_bytes=32 << 20 if small else 256 << 20,
            compact_rows=min(Settings().compact_rows, 50 * self._rows),  # half of them after the interval
            checkpoint_interval_ms=NEVER_MS,
            retention_ms=NEVER_MS,
            **design.settings(small),  # type: ignore[arg-type]
        )
        self._node = Node(settings, clock=self._clock)
        self._checkpoint_ms = self._checkpoint_seq = -1

    async def live(self, delay_ms: int, level: int) -> Life:
        """See `live`."""
        with mock.patch.object(maintenance, "COMPACT_CHECK_INTERVAL_MS", NEVER_MS):
            await self._node.start(listen=False)
        self._broker = self._node.broker
        try:
            await self._broker.create_topic(TOPIC, 8)
            await self._node.maintenance.save_offsets()
            written, logged = self._counts()
            last_due_ms = await self._send(delay_ms, level)
            while self._broker.lateness.released < self._rows:
                if self._clock.wall > last_due_ms + HOUR_MS:
                    raise RuntimeError(f"an hour late, {self._broker.lateness.released} are released")
                self._clock.advance(self._next_ms() - self._clock.wall)
                await self._duties()
            await self._node.maintenance.checkpoint()
            now_written, now_logged = self._counts()
            reader = self._broker.log.reader
            ledger = Ledger.of(self._broker.read_log(reader.first_seq, reader.next_seq))
        finally:
            await self._node.stop()
        return Life(self._rows, now_written - written, now_logged - logged, ledger, last_due_ms + 1)

    async def _send(self, delay_ms: int, level: int) -> int:
        """Ten batches within a second; returns the last instant promised."""
        count, rng, last_ms = self._rows // BATCHES, np.random.default_rng(11), 0
        for number in range(BATCHES):
            second_ms = self._clock.wall + int(delay_ms * rng.uniform(1 - SPREAD, 1 + SPREAD))
            due = second_ms + rng.integers(0, 1_000, count)
            batch = messages(count, None if level else due, seed=number + 1)
            if level:
                due = np.full(count, self._clock.wall + delay_ms)
                batch = batch.append_column("delay_level", pa.array(np.full(count, level, np.int32)))
            last_ms = max(last_ms, int(due.max()))
            await self._broker.send(batch)
            self._clock.advance(BATCH_PAUSE_MS)
            await self._duties()
        self._begun_ms = self._clock.wall
        return last_ms

    def _next_ms(self) -> int:
        """When a strategy wants to be called, or a duty is to be looked at; a step ahead at least."""
        now_ms = self._clock.wall
        young = now_ms - self._begun_ms < FIRST_LOOKS_MS
        look_ms, wanted_ms = now_ms + (FIRST_LOOK_MS if young else LOOK_MS), self._wanted_ms()
        return max(now_ms + STEP_MS, look_ms if wanted_ms is None else min(look_ms, wanted_ms))

    def _wanted_ms(self) -> int | None:
        return self._broker.scheduling.scheduler.next_due_ms()

    async def _duties(self) -> None:
        """What the broker does at this instant: by itself, and what maintenance would do by its own clock."""
        await self._calm()
        await self._node.maintenance.compact_if_worth()
        await self._node.maintenance.index_keys()
        await self._calm()
        seq = self._broker.log.writer.next_seq
        if self._clock.wall - self._checkpoint_ms >= CHECKPOINT_MS and seq != self._checkpoint_seq:
            await self._node.maintenance.checkpoint()
            self._checkpoint_ms, self._checkpoint_seq = self._clock.wall, seq

    async def _calm(self) -> None:
        """Until nothing is due any more, nothing on its way to the disk, and the reader thread idle."""
        seen, rounds = None, 0
        async with asyncio.timeout(BOUND_S):
            while rounds < CALM_ROUNDS:
                self._broker.ticker.wake()
                await asyncio.sleep(0)
                await self._broker.log.writer.flushed()
                # The one thread that loads for strategies: what stands before this call is done after it.
                await in_thread(self._broker.threads.reader, int)
                await asyncio.sleep(0)
                wanted_ms, in_flight = self._wanted_ms(), self._broker.scheduling.scheduler.in_flight_rows
                due = wanted_ms is not None and wanted_ms <= self._clock.wall
                state = (self._broker.log.writer.next_seq, wanted_ms, in_flight)
                rounds = rounds + 1 if state == seen and not due and not in_flight else 0
                seen = state

    def _counts(self) -> tuple[int, int]:
        """Pages written by this process so far, in bytes; bytes of the log's frames."""
        return psutil.Process().io_counters().write_bytes, self._broker.log.reader.segments.size_bytes
