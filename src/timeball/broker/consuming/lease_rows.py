"""The scheduled messages of leases in the log: their newest versions, and concurrent answers to a lease.

Like every cancel, an answer is decided on the event loop, by the newest version of the scheduled message. A receipt is
no longer valid once the release of its scheduled message has begun, and a cancelled scheduled message is never
released. If another request moved the scheduled message first, its newest version is looked up when that request's row
is durable, and the answer is decided again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pyarrow as pa

from timeball.broker.consuming.redelivery_rows import retry_topic
from timeball.broker.consuming.requests import Receipt
from timeball.broker.filters.tags import BoolArray
from timeball.broker.registry.lease_counts import LeaseCounts
from timeball.log.writer import LogWriter
from timeball.model.errors import OverLimit, RequestError
from timeball.model.message import Int64Array, Kind, LogRow, build_rows
from timeball.model.rows import cancel_row
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler

Versions = tuple[Int64Array, Int64Array]  # due_ms and version: the key of a scheduled message in the schedule
# Settles or moves the scheduled messages of receipts, durably, and returns which of them were pending. The second
# argument contains the indexes of the receipts in the whole request.
Attempt = Callable[[Sequence[Receipt], Sequence[int]], Awaitable[BoolArray]]


def newest_versions(receipts: Sequence[Receipt], *, outcomes: Outcomes) -> Versions:
    """Find the current due times and versions of the scheduled messages of these receipts."""
    # The receipt contains the due time of the first version, and stays valid when the lease gets another.
    due_ms = np.array([receipt.due_ms for receipt in receipts], dtype=np.int64)
    number = np.array([receipt.seq for receipt in receipts], dtype=np.int64)
    return outcomes.moved.newest_of(due_ms, number)


def count_ended(receipts: Sequence[Receipt], ended: BoolArray, *, lease_counts: LeaseCounts) -> None:
    """Count the leases that were ended, which `ended` marks."""
    lease_counts.end(np.array([receipt.seq for receipt in receipts], dtype=np.int64)[ended])


def settle_leases(due_ms: Int64Array, version: Int64Array, *, scheduler: Scheduler) -> BoolArray:
    """Cancel those of these scheduled messages that are pending. The result marks them."""
    # The usual case, without duplicates: a set costs less than numpy's `unique`, even for many receipts.
    if len(set(version.tolist())) == len(version):
        return scheduler.cancel(due_ms, version)
    was_pending = np.zeros(len(version), dtype=np.bool_)
    # A receipt that occurs twice settles its scheduled message once.
    first_indexes = np.unique(version, return_index=True)[1]
    was_pending[first_indexes] = scheduler.cancel(due_ms[first_indexes], version[first_indexes])
    return was_pending


async def decide(
    receipts: list[Receipt], attempt: Attempt, *, writer: LogWriter, outcomes: Outcomes
) -> BoolArray:
    """Call `attempt` for these receipts, and again for those that another request moved meanwhile.

    Returns which of them were settled. Raises the errors of `attempt` (RequestError, OverLimit) only while none was.
    """
    valid = np.zeros(len(receipts), dtype=np.bool_)
    undecided = np.arange(len(receipts))
    while len(undecided):
        remaining = [receipts[index] for index in undecided.tolist()]
        version = newest_versions(remaining, outcomes=outcomes)[1]
        try:
            valid[undecided] = await attempt(remaining, undecided.tolist())
        except (RequestError, OverLimit):
            if not valid.any():
                raise
            # An earlier round has settled some of them, and the batcher must not begin those again. The others are
            # answered as not valid, and their messages come back when their leases end.
            break
        lost = ~valid[undecided]
        if not lost.any():
            break
        # The newest version is known only when the row that moved the scheduled message is durable.
        await writer.flushed()
        undecided = undecided[lost & (newest_versions(remaining, outcomes=outcomes)[1] != version)]
    return valid


# The CANCEL rows that end leases kept in the log: as columns, or as values when they are few. No I/O.
#
# The rows have no id, because the message's id belongs to its sender. Each names the scheduled message that it ends. If
# the scheduled message was moved, it also names the row that gave the scheduled message its current due time.
# `tests/broker/consuming/test_lease_ends.py` checks that both ways build the same rows.


def cancel_rows(
    receipts: Sequence[Receipt], due_ms: Int64Array, version: Int64Array, reason: str, now_ms: int
) -> pa.RecordBatch:
    """Build LOG_SCHEMA rows that end these leases. `due_ms` and `version` are those of the newest versions."""
    number = np.array([receipt.seq for receipt in receipts], dtype=np.int64)
    return build_rows(
        len(receipts),
        kind=int(Kind.CANCEL),
        topic=[retry_topic(receipt.group, receipt.topic) for receipt in receipts],
        # A CANCEL row is not visible, so it has no queue.
        queue_id=-1,
        # All rows of a call have the same reason, which is encoded once.
        properties=reason,
        store_ms=now_ms,
        due_ms=due_ms,
        source_seq=number,
        # Null for a scheduled message that was never moved, as the number names it already.
        version_seq=pa.array(version, mask=version == number),
    )


def few_cancel_rows(
    receipts: Sequence[Receipt], due_ms: Int64Array, version: Int64Array, reason: str, now_ms: int
) -> list[LogRow]:
    """Build the rows of `cancel_rows` as values."""
    return [
        cancel_row(
            topic=retry_topic(receipt.group, receipt.topic), source_seq=receipt.seq, due_seq=seq, due_ms=due,
            store_ms=now_ms, properties=reason,
        )
        for receipt, due, seq in zip(receipts, due_ms.tolist(), version.tolist(), strict=True)
    ]  # fmt: skip
