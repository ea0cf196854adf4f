"""Leases across a restart: recovery after a crash, and saved leases after an orderly stop.

After a crash, the log shows which positions of a group's queues are done. A group's offsets are saved once a second,
but each scheduled message is saved before a consumer sees its message. So the log may contain scheduled messages of
positions that the saved offsets do not count as done. Without this module, these positions would be handed out again,
and their scheduled messages would bring the messages back a second time. Each scheduled message names its group, and
the row that it is a copy of, which has queue and position.

The log is read from the row on that was saved with the offsets. Earlier scheduled messages do not count, because the
group may have been moved back since, and then these messages must be handed out again.

After an orderly stop, receipts stay valid and nothing is handed out twice. The broker writes one META row for each
queue when it stops, and deletes these rows before the next start serves, so that a crash never finds old ones. A queue
whose stored offset has changed by then (a crash during the stop, or a group that was moved) is forgotten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa

from timeball.broker.consuming.leases import Key, Lease, Leases, OpenCount, QueueLeases
from timeball.broker.registry.leases import SavedLease, SavedLeases
from timeball.broker.registry.meta import MetaTable
from timeball.broker.registry.offsets import Offsets, Parked
from timeball.broker.registry.topic import Topic
from timeball.broker.registry.topics import Topics
from timeball.log.reader import LogReader
from timeball.model.message import ORIGIN_GROUP, Kind, decode_properties

_COLUMNS = ["seq", "kind", "properties", "source_seq"]
_BATCH_ROWS = 65_536

Positions = dict[Key, set[int]]  # (group, topic, queue) -> positions


def done_positions(reader: LogReader, parked: Parked) -> Positions:
    """Find the done positions, in the state saved with the offsets and in later rows of the log (reader thread)."""
    positions: Positions = defaultdict(set)
    for group, topics in parked.ahead.items():
        for topic, queues in topics.items():
            for queue_id, ranges in queues.items():
                for begin, end in ranges:
                    positions[(group, topic, queue_id)].update(range(begin, end))
    # Earlier scheduled messages were saved as positions (`ahead`), together with the offsets.
    begin = max(parked.from_seq, reader.first_seq)
    for rows in reader.coalesced(begin, reader.next_seq, [Kind.SCHEDULED], _BATCH_ROWS, _COLUMNS):
        sources = rows.column("source_seq").fill_null(0).to_numpy()
        # A row that retention has removed cannot be handed out again, so its position need not be skipped.
        matches = np.flatnonzero(sources >= reader.first_seq)
        if len(matches):
            _add(
                positions,
                reader.read_rows(sources[matches]),
                rows.column("properties").take(pa.array(matches)),
            )
    return positions


def _add(positions: Positions, handed_out: pa.RecordBatch, texts: pa.Array) -> None:
    names = ("topic", "queue_id", "queue_offset")
    queue_positions = zip(*(handed_out.column(name).to_pylist() for name in names), strict=True)
    for (topic, queue_id, offset), text in zip(queue_positions, texts.to_pylist(), strict=True):
        group = decode_properties(text or "").get(ORIGIN_GROUP)
        if group is not None and offset is not None:
            positions[(group, topic, queue_id)].add(offset)


def skip_done(leases: Leases, done: Positions, *, topics: Topics, offsets: Offsets) -> None:
    """Make the groups skip these positions."""
    for (group, name, queue_id), positions in done.items():
        topic = topics.find_topic(name)
        # A group without an offset was deleted, and a new group of the same name starts from the beginning.
        has_offset = offsets.find_offset(group, name, queue_id) is not None
        if topic is not None and has_offset and queue_id < len(topic.queues):
            # Through the leases and not as stored offsets, because earlier positions may still be open.
            leases.skip_done(group, topic, queue_id, positions)


# ---- an orderly stop -----------------------------------------------------------------------------------------------


def save(kept: MetaTable[SavedLeases], queues: Iterable[QueueLeases], as_wall: Callable[[int], int]) -> None:
    """Append all queues that are not idle to the log. `as_wall` converts deadlines to wall-clock times (ms)."""
    # No name contains `@` (check_name), so the keys are distinct.
    named = ((f"{q.group}@{q.topic}@{q.queue_id}", q) for q in queues if not q.idle)
    kept.put((name, saved(queue, as_wall)) for name, queue in named)


def pop_leases(
    kept: MetaTable[SavedLeases], find_topic: Callable[[str], Topic | None], count: OpenCount, now_ms: int
) -> list[QueueLeases]:
    """Restore the leases that the last stop saved, and delete them from the log, so that the next start finds none.

    A lease that seems to have begun after `now_ms` began before the clock was set back. It lasts at most its whole
    invisible time from now on.
    """
    # When a topic is deleted, its messages and their leases are gone too.
    saved_queues = [(saved_queue, find_topic(saved_queue.topic)) for saved_queue in kept.values.values()]
    restored = [
        _restored(saved_queue, topic, count, now_ms)
        for saved_queue, topic in saved_queues
        if topic is not None
    ]
    # Deleted at once: after a crash, leases of an older stop must not come back, as they have ended long ago.
    kept.put([(name, None) for name in kept.values])
    return restored


def saved(queue: QueueLeases, as_wall: Callable[[int], int]) -> SavedLeases:
    """Convert the leases of one queue to their saved form."""
    return SavedLeases(
        queue.group, queue.topic, queue.queue_id, queue.next_offset, queue.stored_offset,
        queue.last_pop_ms, queue.attempt_id, [_as_row(*item, as_wall) for item in queue.in_flight.items()],
        [_as_row(*item, as_wall) for item in queue.returned.items()], sorted(queue.acked_ahead), queue.in_log,
    )  # fmt: skip


def _restored(kept: SavedLeases, topic: Topic, count: OpenCount, now_ms: int) -> QueueLeases:
    queue = QueueLeases(
        kept.group, kept.topic, kept.queue_id, topic.queues[kept.queue_id].index,
        kept.next_offset, kept.stored_offset, count,
        last_pop_ms=kept.last_pop_ms, attempt_id=kept.attempt_id, in_log=kept.in_log,
    )  # fmt: skip
    in_flight, returned = (
        {row.offset: _lease(row, now_ms) for row in rows} for rows in (kept.in_flight, kept.returned)
    )
    queue.restore(in_flight, returned, set(kept.acked_ahead))
    return queue


def _as_row(offset: int, lease: Lease, as_wall: Callable[[int], int]) -> SavedLease:
    return SavedLease(
        offset, lease.seq, lease.size_bytes, lease.pop_ms, as_wall(lease.deadline_ms), lease.in_order, lease.times,
        lease.nacked_ms, lease.nack_reason,
    )  # fmt: skip


def _lease(row: SavedLease, now_ms: int) -> Lease:
    # After a start, elapsed time begins at wall-clock time. `pop_ms` is the time when the lease began or was renewed.
    deadline_ms = row.deadline_ms - max(0, row.pop_ms - now_ms)
    return Lease(
        row.seq, row.size_bytes, row.pop_ms, deadline_ms, row.in_order, row.times, row.nacked_ms, row.nack_reason
    )  # fmt: skip
