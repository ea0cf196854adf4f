"""Save the leases of consumer groups in the log, and restore them at a start.

A lease is state in memory: nothing is written before a message is handed out or after it was acknowledged. The state
follows in META rows within `ack_save_ms`, in one frame with the offsets of the same groups. After a crash or a change
of leader, the groups continue with the last rows: messages that were acknowledged later are handed out again when their
leases end, and messages that were received later are handed out again at once (G4). With `ack_save_ms` 0, the rows are
durable before the answer.

A row covers PART_POSITIONS positions of one queue. It lists the open positions: all others before its `next_offset` are
done. Only parts that have changed are written. A part without open positions has no row, unless it is the last one of a
queue: its row contains the newest `next_offset`. A queue whose stored offset is its `next_offset` has no rows.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

from timeball.broker.consuming.leases import PART_POSITIONS, Key, Lease, Leases, OpenCount, QueueLeases
from timeball.broker.registry.lease_meta import LeaseRun, SavedPart
from timeball.broker.registry.meta import Change, MetaTable, together
from timeball.broker.registry.tables import Tables
from timeball.broker.registry.topic import Topic
from timeball.io.clock import SchedulerClock
from timeball.log.writer import LogWriter

QUEUES_AT_ONCE = 64  # saved in one slice, which takes about two milliseconds
AGAIN_MS = 1_000  # the next try when the disk is full


class LeaseSaver:
    """Appends the changes of leases to the log. Belongs to the event loop, and `close` ends its timer."""

    def __init__(
        self,
        leases: Leases,
        *,
        clock: SchedulerClock,
        writer: LogWriter,
        tables: Tables,
        save_ms: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._leases, self._clock, self._writer, self._tables = leases, clock, writer, tables
        self.save_ms, self._on_failure = save_ms, on_failure
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        leases.count.on_change = self._on_change

    def close(self) -> None:
        """End the timer. `save` still works."""
        self._leases.count.on_change = lambda: None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def saved(self) -> None:
        """Save all changes so far, durably."""
        self._save_leases()
        await self._writer.flushed()

    def save(self) -> None:
        """Append all changes of leases, and all changed offsets of groups."""
        self._append(self.change(list(self._leases.count.changed), all_offsets=True))

    def change(self, queues: Sequence[QueueLeases], *, all_offsets: bool = False) -> Change:
        """Build the rows that save these queues, with the offsets of their groups (or all changed offsets)."""
        units = {_key_of(queue)[:2] for queue in queues} | {key[:2] for key in self._leases.orphaned_parts}
        # An offset that was changed elsewhere ends the leases of its queue, in the same frame.
        moved = self._tables.offsets.moved()
        for group, topic in moved if all_offsets else units & moved:
            self._leases.forget_moved(group, topic)
        queues = [queue for queue in queues if self._leases.get(*_key_of(queue)) is queue]
        saved: dict[str, SavedPart | None] = {}
        orphaned = dict(self._leases.orphaned_parts)
        for key, numbers in orphaned.items():
            saved |= {_name(key, number): None for number in numbers}
        saved_parts: dict[QueueLeases, set[int]] = {}
        for queue in queues:
            parts = self._parts_of(queue)
            saved |= {_name(_key_of(queue), number): part for number, part in parts.items()}
            unchanged = queue.saved_parts - parts.keys()
            saved_parts[queue] = unchanged | {number for number, part in parts.items() if part is not None}
        rows, keep_values = together(
            self._tables.leases.changed(saved.items()),
            self._tables.offsets.changed(None if all_offsets else units),
        )

        def keep() -> None:
            keep_values()
            for queue, numbers in saved_parts.items():
                queue.saved_parts = numbers
                queue.changed_parts.clear()
                self._leases.count.changed.pop(queue, None)
            for key in orphaned:
                del self._leases.orphaned_parts[key]

        return Change(rows, keep)

    # -- the timer ---------------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        if self._timer is None and self.save_ms:
            self._timer = self._loop.call_later(self.save_ms / 1_000, self._save_slice)

    def _save_slice(self) -> None:
        self._timer = None
        if self._writer.failed is not None:
            return
        try:
            if self._writer.no_room:
                # Not from the space that is reserved for releases.
                self._timer = self._loop.call_later(AGAIN_MS / 1_000, self._save_slice)
                return
            changed = self._leases.count.changed
            self._append(self.change([queue for queue, _ in zip(changed, range(QUEUES_AT_ONCE))]))
            if changed:
                self._timer = self._loop.call_soon(self._save_slice)
        except Exception as error:  # no caller waits for the timer, so an error must stop the broker
            self._on_failure(error)

    def _save_leases(self) -> None:
        changed = self._leases.count.changed
        if changed:
            self._append(self.change(list(changed)))

    def _append(self, change: Change) -> None:
        if change.rows.num_rows:
            self._writer.append(change.rows)
        change.keep()

    # -- the saved form ----------------------------------------------------------------------------------------

    def _parts_of(self, queue: QueueLeases) -> dict[int, SavedPart | None]:
        """Build the changed parts of a queue. None for a part whose row is to be deleted."""
        open_offsets = [
            *(offset for offset, lease in queue.in_flight.items() if not lease.is_written),
            *queue.returned,
        ]
        # The offset of the group says the same as these rows would.
        if queue.stored_offset == queue.next_offset and not (open_offsets or queue.acked_ahead):
            return dict.fromkeys(queue.saved_parts)
        last = max(queue.next_offset - 1, 0) // PART_POSITIONS
        # The row of the former last part is deleted if it was written for its `next_offset` only.
        numbers = queue.changed_parts | {last} | ({max(queue.saved_parts)} if queue.saved_parts else set())
        by_part, ahead = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for offset in open_offsets:
            if offset // PART_POSITIONS in numbers:
                by_part[offset // PART_POSITIONS].append(offset)
        for offset in sorted(queue.acked_ahead):
            ahead[offset // PART_POSITIONS].append(offset)
        return {
            number: SavedPart(
                queue.group, queue.topic, queue.queue_id, number, queue.next_offset,
                self._runs(queue, sorted(by_part[number])), ahead[number], queue.last_pop_ms, queue.attempt_id,
            )
            if by_part[number] or ahead[number] or number == last
            else None
            for number in numbers
        }  # fmt: skip

    def _runs(self, queue: QueueLeases, offsets: list[int]) -> list[LeaseRun]:
        runs: list[LeaseRun] = []
        wall_shift_ms = self._clock.as_wall(0)
        former: tuple[object, ...] = ()
        for offset in offsets:
            lease = queue.in_flight.get(offset) or queue.returned[offset]
            state = (
                lease.pop_ms, lease.deadline_ms, lease.since_ms, lease.in_order, lease.counts, lease.times,
                lease.nacked_ms, lease.nack_reason,
            )  # fmt: skip
            if runs and state == former and offset == runs[-1].offset + runs[-1].count:
                runs[-1].count += 1
            else:
                former = state
                runs.append(
                    LeaseRun(
                        offset, 1, lease.pop_ms, lease.deadline_ms + wall_shift_ms, lease.since_ms, lease.in_order,
                        lease.counts, lease.times, lease.nacked_ms, lease.nack_reason,
                    )
                )  # fmt: skip
        return runs


def _key_of(queue: QueueLeases) -> Key:
    return queue.group, queue.topic, queue.queue_id


def _name(key: Key, part: int) -> str:
    group, topic, queue_id = key
    return f"{group}@{topic}@{queue_id}@{part}"


# ---- a start -------------------------------------------------------------------------------------------------


def restored_queues(
    saved: MetaTable[SavedPart],
    find_topic: Callable[[str], Topic | None],
    find_offset: Callable[[str, str, int], int | None],
    count: OpenCount,
    now_ms: int,
) -> list[QueueLeases]:
    """Build the queues whose leases the log contains.

    A lease ends when it would have ended without the restart: elapsed time continues from the wall clock's. If the wall
    clock was set back meanwhile, it ends within its whole invisible time from now on.
    """
    by_queue = defaultdict[Key, list[SavedPart]](list)
    for part in saved.values.values():
        by_queue[part.group, part.topic, part.queue_id].append(part)
    queues = []
    for key, parts in by_queue.items():
        topic, stored = find_topic(key[1]), find_offset(*key)
        # Otherwise the topic or the group was deleted.
        if topic is not None and stored is not None and key[2] < len(topic.queues):
            queues.append(_restored(topic, parts, stored, count, now_ms))
    return queues


def _restored(
    topic: Topic, parts: list[SavedPart], stored: int, count: OpenCount, now_ms: int
) -> QueueLeases:
    newest = max(parts, key=lambda part: part.next_offset)
    in_order = max(parts, key=lambda part: part.last_pop_ms)
    index = topic.queues[newest.queue_id].index
    queue = QueueLeases(
        newest.group, newest.topic, newest.queue_id, index, min(newest.next_offset, index.max_offset), stored, count,
        last_pop_ms=in_order.last_pop_ms, attempt_id=in_order.attempt_id,
    )  # fmt: skip
    in_flight: dict[int, Lease] = {}
    returned: dict[int, Lease] = {}
    for run in (run for part in parts for run in part.runs):
        # Retention may have removed the first rows.
        begin, end = max(run.offset, index.min_offset), min(run.offset + run.count, index.max_offset)
        if begin >= end:
            continue
        entries = index.read(begin, end - begin)
        # After a start, elapsed time begins at wall-clock time.
        deadline_ms = run.deadline_ms - max(0, run.since_ms - now_ms)
        for offset, seq, size in zip(
            range(begin, end), entries["seq"].tolist(), entries["size"].tolist(), strict=True
        ):
            lease = Lease(
                seq, size, run.pop_ms, deadline_ms, run.since_ms, run.in_order, run.counts, run.times, run.nacked_ms,
                run.nack_reason,
            )  # fmt: skip
            (returned if run.pop_ms < 0 else in_flight)[offset] = lease
    ahead = {offset for part in parts for offset in part.acked_ahead if offset >= queue.next_offset}
    queue.restore(in_flight, returned, ahead, {part.part for part in parts})
    return queue
