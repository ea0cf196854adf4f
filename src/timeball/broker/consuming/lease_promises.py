"""The promises that stand for leases: which version the schedule knows, and how answers to them are decided.

Each is decided on the event loop as every cancel is, by the promise's newest version: a receipt whose promise is being
released is not valid any more, and a promise that was cancelled is never released. If another request moved the promise
first, its newest version is looked up once that request's row is durable, and decided on again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from timeball.broker.components import Components
from timeball.broker.consuming.requests import Receipt
from timeball.broker.filters.tags import BoolArray
from timeball.errors import OverLimit, RequestError
from timeball.message import Int64Array

Versions = tuple[Int64Array, Int64Array]  # due_ms and version, by which the schedule knows a promise
# Settles or moves the promises of these receipts that wait, durably; is told their indexes too; returns which waited.
Attempt = Callable[[Sequence[Receipt], Sequence[int]], Awaitable[BoolArray]]


def newest_versions(parts: Components, receipts: Sequence[Receipt]) -> Versions:
    """Return the versions by which the schedule knows the promises of these now."""
    # The receipt has the instant of the first version, and stays good when the lease is given another.
    due_ms = np.array([receipt.due_ms for receipt in receipts], dtype=np.int64)
    number = np.array([receipt.seq for receipt in receipts], dtype=np.int64)
    return parts.outcomes.moved.newest_of(due_ms, number)


def count_ended(parts: Components, receipts: Sequence[Receipt], won: BoolArray) -> None:
    """Count the leases of these that were ended."""
    parts.lease_counts.end(np.array([receipt.seq for receipt in receipts], dtype=np.int64)[won])


def settle_leases(parts: Components, due_ms: Int64Array, version: Int64Array) -> BoolArray:
    """Cancel the promises of these that still wait; return which did."""
    # Nearly always: a set costs less than numpy's `unique`, also for many.
    if len(set(version.tolist())) == len(version):
        return parts.scheduler.cancel(due_ms, version)
    won = np.zeros(len(version), dtype=np.bool_)
    first = np.unique(version, return_index=True)[1]  # a receipt that is there twice settles once
    won[first] = parts.scheduler.cancel(due_ms[first], version[first])
    return won


async def decide(parts: Components, receipts: list[Receipt], attempt: Attempt) -> BoolArray:
    """Call `attempt` for these, again for those that another request moved meanwhile; return which it settled."""
    valid = np.zeros(len(receipts), dtype=np.bool_)
    left = np.arange(len(receipts))
    while len(left):
        some = [receipts[i] for i in left.tolist()]
        version = newest_versions(parts, some)[1]
        try:
            valid[left] = await attempt(some, left.tolist())
        except (RequestError, OverLimit):
            if not valid.any():
                raise
            # Some were settled in a round before, and the batcher must not begin those again: the rest is answered
            # as not valid, and comes again when its lease ends.
            break
        lost = ~valid[left]
        if not lost.any():
            break
        # The newest version is not known before the row that moved the promise is durable.
        await parts.writer.flushed()
        left = left[lost & (newest_versions(parts, some)[1] != version)]
    return valid
