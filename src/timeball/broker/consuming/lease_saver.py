"""Save the leases of consumer groups in the log, and restore them at a start.

A lease is state in memory: nothing is written before a message is handed out or after it was acknowledged. The state
follows in META rows within `ack_save_ms`, in one frame with the offsets of the same groups. After a crash or a change
of leader, the groups continue with the last rows: messages that were acknowledged later are handed out again when their
leases end, and messages that were received later are handed out again at once (G4). With `ack_save_ms` 0, the rows are
durable before the answer.

A save joins a commit of releases if half of `ack_save_ms` has passed, because a commit of its own costs more.

A row covers PART_POSITIONS positions of one queue. It lists the open positions: all others before its `next_offset` are
done. Only parts that have changed are written. A part without open positions has no row, unless it is the last one of a
queue: its row contains the newest `next_offset`. A queue whose stored offset is its `next_offset` has no rows.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from timeball.broker.consuming.leases import PART_POSITIONS, Key, Lease, Leases, OpenCount, QueueLeases
from timeball.broker.registry.meta import Change, MetaTable, combined
from timeball.broker.registry.tables import LeaseRun, SavedPart, Tables
from timeball.broker.registry.topics import Topic
from timeball.io.clock import SchedulerClock
from timeball.log.row_encoder import build
from timeball.log.writer import LogWriter

# Saved in one slice, which takes about two milliseconds.
QUEUES_AT_ONCE, POSITIONS_AT_ONCE = 64, 2_048
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
        """`save_ms`: the setting `ack_save_ms`. `on_failure` gets an error of the timer."""
        self._leases, self._clock, self._writer, self._tables = leases, clock, writer, tables
        self.save_ms, self._on_failure = save_ms, on_failure
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._changed_s = 0.0  # when the timer began, on the loop's clock
        # Contains `join` while there are changes to save. The delivery calls its entries after an append of releases.
        self.append_callbacks: list[Callable[[], None]] = []
        self._last_save: asyncio.Future[int] = self._loop.create_future()  # the last save by the timer
        self._last_save.set_result(0)
        leases.count.on_change = self._on_change

    def close(self) -> None:
        """End the timer. `save` still works."""
        self._leases.count.on_change = lambda: None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def save_and_wait(self, queues: Iterable[QueueLeases] | None = None) -> None:
        """Save the changes of these queues (None: of all), durably. Raises OverLimit when the disk is full."""
        self._writer.check_admission()
        self._append(self.build_change(list(self._leases.count.changed if queues is None else queues)))
        await self._writer.flushed()

    def save(self) -> None:
        """Append all changes of leases and of the offsets of groups. Does not wait for the disk."""
        self._append(self.build_change(list(self._leases.count.changed), all_offsets=True))

    def save_new_groups(self, queues: Iterable[QueueLeases]) -> asyncio.Future[int] | None:
        """Append the first offsets of new groups, and the changes of these queues. Raises OverLimit on a full disk.

        Returns a future that is done when they are durable, or None if there is nothing to save.
        """
        self._writer.check_admission()
        return self._append(self.build_change(list(queues), all_offsets=True))

    async def save_in_slices(self) -> None:
        """Append the same changes as `save`, in slices, so that the event loop is not held for long."""
        while len(self._leases.count.changed) > QUEUES_AT_ONCE:
            self._append(self.build_change(self._slice()))
            await asyncio.sleep(0)
        self.save()

    def build_change(self, queues: Sequence[QueueLeases], *, all_offsets: bool = False) -> Change:
        """Build the rows that save these queues, and delete the rows of orphaned parts.

        The rows also save the changed offsets of the same groups and topics or, with `all_offsets`, of all groups.
        Forgets queues whose stored offset was changed elsewhere.
        """
        # (group, topic) of each queue and of each orphaned part
        units = {_key_of(queue)[:2] for queue in queues} | {key[:2] for key in self._leases.orphaned_parts}
        # An offset that was changed elsewhere ends the leases of its queue, in the same frame.
        moved_units = self._tables.offsets.moved()
        for group, topic in moved_units if all_offsets else units & moved_units:
            self._leases.forget_moved(group, topic)
        forgotten_queues = [queue for queue in queues if self._leases.get(*_key_of(queue)) is not queue]
        queues = [queue for queue in queues if self._leases.get(*_key_of(queue)) is queue]
        values: dict[str, SavedPart | None] = {}  # by the name of the row, None to delete it
        orphaned = dict(self._leases.orphaned_parts)
        for key, numbers in orphaned.items():
            values |= {_row_name(key, number): None for number in numbers}
        saved_parts: dict[QueueLeases, set[int]] = {}
        now_ms, wall_shift_ms = self._clock.now_ms(), self._clock.as_wall(0)
        for queue in queues:
            parts = self._parts_of(queue, now_ms, wall_shift_ms)
            values |= {_row_name(_key_of(queue), number): part for number, part in parts.items()}
            unchanged = queue.saved_parts - parts.keys()
            saved_parts[queue] = unchanged | {number for number, part in parts.items() if part is not None}
        changed = combined(
            self._tables.leases.build_change(values.items()),
            self._tables.offsets.build_change(None if all_offsets else units),
        )

        def apply() -> None:
            """Record in memory that the rows are appended."""
            changed.apply()
            for queue, numbers in saved_parts.items():
                queue.saved_parts = numbers
                queue.changed_parts.clear()
                self._leases.count.changed.pop(queue, None)
            for queue in forgotten_queues:
                self._leases.count.changed.pop(queue, None)
            for key in orphaned:
                del self._leases.orphaned_parts[key]

        return changed._replace(apply=apply)

    # -- the timer ---------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Save now if half of `save_ms` has passed. Called after an append of releases: the save shares its commit."""
        if self._timer is not None and self._loop.time() - self._changed_s >= self.save_ms / 2_000:
            self._timer.cancel()
            self._save_slice()

    def _on_change(self) -> None:
        """Start the timer with the first change after a save."""
        if self._timer is None and self.save_ms:
            self._changed_s = self._loop.time()
            self.append_callbacks[:] = [self.join]
            self._timer = self._loop.call_later(self.save_ms / 1_000, self._save_slice)

    def _save_slice(self) -> None:
        """Save a slice of the changed queues. If more remain, save them in the next turns of the event loop."""
        self._timer = None
        self.append_callbacks.clear()
        if self._writer.failed is not None:
            return
        try:
            # Not from the space that is reserved for releases, and not faster than the disk writes.
            if self._writer.no_room or not self._last_save.done():
                pause_ms = AGAIN_MS if self._writer.no_room else self.save_ms
                self._timer = self._loop.call_later(pause_ms / 1_000, self._save_slice)
                return
            durable = self._append(self.build_change(self._slice()))
            if self._leases.count.changed:
                self._timer = self._loop.call_soon(self._save_slice)
            elif durable is not None:
                self._last_save = durable
        except Exception as error:  # no caller waits for the timer, so an error must stop the broker
            self._on_failure(error)

    def _slice(self) -> list[QueueLeases]:
        """Choose changed queues that are saved in about two milliseconds."""
        queues: list[QueueLeases] = []
        open_rows = 0
        for queue in self._leases.count.changed:
            open_rows += queue.open_rows
            if queues and (len(queues) == QUEUES_AT_ONCE or open_rows > POSITIONS_AT_ONCE):
                break
            queues.append(queue)
        return queues

    def _append(self, change: Change) -> asyncio.Future[int] | None:
        """Append a change. Returns a future that is done when it is durable, or None if the change is empty."""
        # As values, because the columns of a few rows cost ten times as much.
        durable = self._writer.append(build(change.log_rows))[1] if change.pairs else None
        change.apply()
        return durable

    # -- the saved form ----------------------------------------------------------------------------------------

    def _parts_of(self, queue: QueueLeases, now_ms: int, wall_shift_ms: int) -> dict[int, SavedPart | None]:
        """Build the changed parts of a queue, by number. None for a part whose row is to be deleted.

        `wall_shift_ms`: the wall clock's time minus the elapsed time.
        """
        # The stored offset of the group contains the whole state, so no rows are needed.
        if queue.stored_offset == queue.next_offset and queue.is_idle:
            return dict.fromkeys(queue.saved_parts)
        last = max(queue.next_offset - 1, 0) // PART_POSITIONS
        # Includes the previous last part: if its row only contained `next_offset`, it is deleted.
        numbers = queue.changed_parts | {last} | ({max(queue.saved_parts)} if queue.saved_parts else set())
        ahead = defaultdict[int, list[int]](list)
        for offset in sorted(queue.acked_ahead):
            ahead[offset // PART_POSITIONS].append(offset)
        parts: dict[int, SavedPart | None] = dict.fromkeys(numbers)
        for number in numbers:
            offsets = _open_offsets(queue, number)
            if offsets or number == last or ahead[number]:
                parts[number] = SavedPart(
                    queue.group, queue.topic, queue.queue_id, number, queue.next_offset,
                    _runs(queue, offsets, now_ms, wall_shift_ms), ahead[number], queue.last_pop_ms,
                    queue.attempt_id,
                )  # fmt: skip
        return parts


def _runs(queue: QueueLeases, offsets: list[int], now_ms: int, wall_shift_ms: int) -> list[LeaseRun]:
    """Join the open positions at `offsets` (ascending) to runs with equal leases."""
    runs: list[LeaseRun] = []
    previous_state: tuple[object, ...] = ()
    for offset in offsets:
        lease = queue.in_flight.get(offset) or queue.returned.get(offset) or queue.parked[offset]
        # Only a position in flight has its slot after a restart. The others take one when they are leased again.
        slot_key = lease.key if offset in queue.in_flight else ""
        state = (
            lease.pop_ms, lease.deadline_ms, lease.since_ms, lease.in_order, lease.counts, lease.times,
            lease.nacked_ms, lease.nack_reason, slot_key,
        )  # fmt: skip
        if runs and state == previous_state and offset == runs[-1].offset + runs[-1].count:
            runs[-1].count += 1
        else:
            previous_state = state
            runs.append(
                # `lease.since_ms` is after `now_ms` if the clock was set back. The saved deadline is by the new time.
                LeaseRun(
                    offset, 1, lease.pop_ms, lease.deadline_ms + wall_shift_ms, min(lease.since_ms, now_ms),
                    lease.in_order, lease.counts, lease.times, lease.nacked_ms, lease.nack_reason, slot_key,
                )
            )  # fmt: skip
    return runs


def _open_offsets(queue: QueueLeases, part: int) -> list[int]:
    """List the open positions of a part, ascending. A position whose message is written again is not open any more."""
    begin, end = part * PART_POSITIONS, (part + 1) * PART_POSITIONS
    in_flight, returned, parked = queue.in_flight, queue.returned, queue.parked
    # Walk over all positions of the part, or over all open ones of the queue: whichever are fewer.
    offsets = (
        range(begin, end) if queue.open_rows > PART_POSITIONS else sorted([*in_flight, *returned, *parked])
    )
    return [
        offset
        for offset in offsets
        if begin <= offset < end
        and (
            offset in returned
            or offset in parked
            or (offset in in_flight and not in_flight[offset].is_written)
        )
    ]


def _key_of(queue: QueueLeases) -> Key:
    return queue.group, queue.topic, queue.queue_id


def _row_name(key: Key, part: int) -> str:
    """Build the name of the META row of a part, without its prefix."""
    group, topic, queue_id = key
    return f"{group}@{topic}@{queue_id}@{part}"


# ---- a start -------------------------------------------------------------------------------------------------


def restored_queues(
    saved: MetaTable[SavedPart],
    find_topic: Callable[[str], Topic | None],
    find_offset: Callable[[str, str, int], int | None],
    count: OpenCount,
    now_ms: int,
) -> tuple[list[QueueLeases], dict[Key, set[int]]]:
    """Build the queues whose leases the log contains. Also returns the parts of deleted topics and groups, by key.

    A lease ends when it would have ended without the restart: elapsed time continues from the wall clock's. If the wall
    clock was set back meanwhile, it ends within its whole invisible time from now on.
    """
    by_queue = defaultdict[Key, list[SavedPart]](list)
    for part in saved.values.values():
        by_queue[part.group, part.topic, part.queue_id].append(part)
    queues: list[QueueLeases] = []
    orphaned_parts: dict[Key, set[int]] = {}
    for key, parts in by_queue.items():
        topic, stored = find_topic(key[1]), find_offset(*key)
        if topic is None or stored is None or key[2] >= len(topic.queues):
            orphaned_parts[key] = {part.part for part in parts}
        else:
            queues.append(_restored(topic, parts, stored, count, now_ms))
    return queues, orphaned_parts


def _restored(
    topic: Topic, parts: list[SavedPart], stored_offset: int, count: OpenCount, now_ms: int
) -> QueueLeases:
    """Build the leases of one queue from its saved parts."""
    newest = max(parts, key=lambda part: part.next_offset)
    last_leased = max(parts, key=lambda part: part.last_pop_ms)
    index = topic.queues[newest.queue_id].index
    # The stored offset may be newer than these rows. Retention may have removed the first messages.
    first, end = max(stored_offset, index.min_offset), index.max_offset
    next_offset = min(max(newest.next_offset, first), end)
    queue = QueueLeases(
        newest.group, newest.topic, newest.queue_id, index, next_offset, stored_offset, count,
        last_pop_ms=last_leased.last_pop_ms, attempt_id=last_leased.attempt_id,
    )  # fmt: skip
    in_flight: dict[int, Lease] = {}
    returned: dict[int, Lease] = {}
    for part in parts:
        part_first = max(first, part.part * PART_POSITIONS)
        part_end = min(end, (part.part + 1) * PART_POSITIONS)
        if part_first >= part_end:
            continue
        entries = index.read(part_first, part_end - part_first)
        seqs, sizes_bytes = entries["seq"].tolist(), entries["size"].tolist()
        for run in part.runs:
            # At a start, the elapsed time equals the wall clock's, so no shift is needed. If the wall clock was set
            # back, the deadline moves back with it.
            deadline_ms = run.deadline_ms - max(0, run.since_ms - now_ms)
            open_offsets = in_flight if run.pop_ms >= 0 else returned
            for offset in range(max(run.offset, part_first), min(run.offset + run.count, part_end)):
                index_in_part = offset - part_first
                open_offsets[offset] = Lease(
                    seqs[index_in_part], sizes_bytes[index_in_part], run.pop_ms, deadline_ms, run.since_ms,
                    run.in_order, run.counts, run.times, run.nacked_ms, run.nack_reason, key=run.key,
                )  # fmt: skip
    ahead = {offset for part in parts for offset in part.acked_ahead if offset >= queue.next_offset}
    queue.restore(in_flight, returned, ahead, {part.part for part in parts})
    return queue
