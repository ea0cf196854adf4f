"""Acknowledge leases kept in the log: cancel their scheduled messages, with one append for many requests.

Nearly all requests are decided and their rows appended within the turn of the loop that begins them, and the commit
answers them. If a scheduled message was already settled or moved, a task decides again once the row of that change is
durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.appender import Appender
from timeball.broker.accepting.ingress import Batcher, BegunBatch, settle
from timeball.broker.consuming.lease_rows import (
    Versions,
    cancel_rows,
    count_ended,
    decide,
    few_cancel_rows,
    newest_versions,
    settle_leases,
)
from timeball.broker.consuming.redelivery_rows import FEW_ROWS
from timeball.broker.consuming.requests import Receipt
from timeball.broker.filters.tags import BoolArray
from timeball.broker.registry.lease_counts import LeaseCounts
from timeball.io.clock import SchedulerClock
from timeball.log.writer import LogWriter
from timeball.model.errors import OverLimit, RequestError
from timeball.model.message import CANCEL_REASON, encode_properties
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler

ACKNOWLEDGED = encode_properties({CANCEL_REASON: "acknowledged"})
CALLS_PER_TURN = 4_096  # requests of one turn: the others wait for the next turn
ROWS_PER_APPEND = 65_536  # far below the limit of a frame

_Request = tuple[Sequence[Receipt], "asyncio.Future[list[bool]]"]


class Acknowledgements:
    """Ends leases kept in the log. Belongs to the event loop."""

    def __init__(
        self,
        appender: Appender,
        *,
        clock: SchedulerClock,
        writer: LogWriter,
        lease_counts: LeaseCounts,
        scheduler: Scheduler,
        outcomes: Outcomes,
    ) -> None:
        self._appender = appender
        self._clock, self._writer, self._lease_counts = clock, writer, lease_counts
        self._scheduler, self._outcomes = scheduler, outcomes
        self._batcher: Batcher[_Request] = Batcher(
            self._begin, _answer, _refuse, rows_max=CALLS_PER_TURN, is_pipelined=False
        )
        self._tasks: set[asyncio.Future[BoolArray]] = set()

    def put(self, receipts: Sequence[Receipt]) -> asyncio.Future[list[bool]]:
        """End these leases. When all rows are durable, the future states for each receipt whether it was valid."""
        future: asyncio.Future[list[bool]] = asyncio.get_running_loop().create_future()
        self._batcher.put((receipts, future))
        return future

    def _begin(self, requests: list[_Request]) -> BegunBatch:
        receipts = (
            requests[0][0] if len(requests) == 1 else [receipt for some, _ in requests for receipt in some]
        )
        versions = newest_versions(receipts, outcomes=self._outcomes)
        valid, durable = self._end(receipts, versions)
        # The usual case needs no task, and no turn of the loop beyond the commit.
        if durable is not None and valid.all():
            return valid, durable
        task = asyncio.ensure_future(self._decide_again(receipts, versions, valid, durable))
        self._tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)
        return task, task

    def _end(
        self, receipts: Sequence[Receipt], versions: Versions
    ) -> tuple[BoolArray, asyncio.Future[int] | None]:
        """Cancel the scheduled messages of these receipts.

        Returns which were pending, and a future that is done when their rows are durable (None without rows).
        """
        valid, durable = np.zeros(len(receipts), dtype=np.bool_), None
        for begin in range(0, len(receipts), ROWS_PER_APPEND):
            chunk = receipts[begin : begin + ROWS_PER_APPEND]
            due_ms, version = (column[begin : begin + len(chunk)] for column in versions)
            # Decided by the newest version, between two awaits: a later release finds the scheduled message cancelled.
            now_ms = self._clock.now_ms()
            was_pending = valid[begin : begin + len(chunk)] = settle_leases(
                due_ms, version, scheduler=self._scheduler
            )
            count_ended(chunk, was_pending, lease_counts=self._lease_counts)
            if was_pending.any():
                # No await since the decision: the CANCEL rows stand in the log before any later release.
                durable = self._append(chunk, (due_ms, version), was_pending, now_ms)
        return valid, durable

    def _append(
        self, receipts: Sequence[Receipt], versions: Versions, was_pending: BoolArray, now_ms: int
    ) -> asyncio.Future[int]:
        if len(receipts) <= FEW_ROWS:
            values = few_cancel_rows(receipts, *versions, ACKNOWLEDGED, now_ms)
            return self._appender.append_few(
                [values[index] for index in np.flatnonzero(was_pending).tolist()]
            )
        rows = cancel_rows(receipts, *versions, ACKNOWLEDGED, now_ms)
        return self._appender.append(
            rows if was_pending.all() else rows.filter(pa.array(was_pending))
        ).durable

    async def _decide_again(
        self,
        receipts: Sequence[Receipt],
        versions: Versions,
        valid: BoolArray,
        durable: asyncio.Future[int] | None,
    ) -> BoolArray:
        """End the leases that another request has moved meanwhile. Returns which receipts were valid in the end."""
        if durable is not None:
            await durable  # the receipts that were valid are answered only when their rows are durable
        # The newest version is known only when the row that moved the scheduled message is durable.
        await self._writer.flushed()
        undecided = np.flatnonzero(
            ~valid & (newest_versions(receipts, outcomes=self._outcomes)[1] != versions[1])
        )
        if len(undecided):
            try:
                valid[undecided] = await decide(
                    [receipts[index] for index in undecided.tolist()],
                    self._attempt,
                    writer=self._writer,
                    outcomes=self._outcomes,
                )
            except (RequestError, OverLimit):
                if not valid.any():
                    raise
                # Others of these have ended. The rest is answered as not valid, and comes back when its leases end.
        return valid

    async def _attempt(self, receipts: Sequence[Receipt], _at: Sequence[int]) -> BoolArray:
        valid, durable = self._end(receipts, newest_versions(receipts, outcomes=self._outcomes))
        if durable is not None:
            await durable
        return valid


def _answer(requests: list[_Request], begun: Any) -> None:
    results = (begun.result() if isinstance(begun, asyncio.Future) else begun).tolist()
    begin = 0
    for receipts, future in requests:
        settle(future, results[begin : begin + len(receipts)])
        begin += len(receipts)


def _refuse(requests: list[_Request], error: BaseException) -> None:
    for _, future in requests:
        settle(future, error)
