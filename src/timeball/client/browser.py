"""Browsing: reading queues by offset, with a position per queue that moves with each read.

Browsing leases nothing and shares nothing out, so every browser gets every message. The client keeps the position. If a
group is named, `commit` stores the position at the broker, and the next browser of the group begins there.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa

from timeball.client.calls import Calls
from timeball.client.consumer import Start, check_start
from timeball.client.dialing import check_process
from timeball.client.messages import Message, view
from timeball.io.clock import Clock
from timeball.model import limits, wire
from timeball.model.errors import NotFound, RequestError
from timeball.model.time_parsing import After, delay_ms
from timeball.model.wire import QueueRange


class Positions:
    """The next offset of each queue of one topic, for one group."""

    def __init__(self, calls: Calls, topic: str, group: str, start: Start) -> None:
        self._calls = calls
        self._topic = topic
        self._group = group
        self._start = start
        self.next: dict[int, int] = {}  # by queue; empty until the queues were looked up
        self.committed: dict[int, int] = {}  # by queue, as far as the broker is known to have them

    def refresh(self) -> None:
        """Add queues that are not known yet.

        They begin at the group's committed offset, else at the requested start.
        """
        ranges = queues(self._calls, self._topic)
        if ranges.keys() <= self.next.keys():
            return
        known = offsets(self._calls, self._group, self._topic) if self._group else {}
        self.committed = {**known, **self.committed}
        for queue, span in ranges.items():
            first = span.min if self._start == "earliest" else span.max
            self.next.setdefault(queue, self.committed.get(queue, first))

    def came_first(self) -> None:
        """Read from the earliest offset: the topic was created while the call waited, so all its messages are new."""
        self._start = "earliest"

    def move(self, batch: pa.RecordBatch) -> None:
        """Advance each queue's position past its last row in the batch."""
        queue_ids = batch.column("queue_id").to_numpy(zero_copy_only=False)
        queue_offsets = batch.column("queue_offset").to_numpy(zero_copy_only=False)
        for queue in np.unique(queue_ids):
            self.next[int(queue)] = int(queue_offsets[queue_ids == queue].max()) + 1

    def commit(self, wanted: dict[int, int]) -> None:
        """Commit the offsets that differ from those already committed."""
        changed = {queue: offset for queue, offset in wanted.items() if self.committed.get(queue) != offset}
        if changed:
            commit(self._calls, self._group, self._topic, changed)
            self.committed.update(changed)


class Browser:
    """Reads by offset. Thread safe; two threads of one group share one position."""

    def __init__(self, calls: Calls, clock: Clock) -> None:
        self._calls = calls
        self._clock = clock
        self._lock = threading.Lock()
        # by topic and group; the lock makes reads take turns
        self._positions: dict[tuple[str, str], tuple[threading.Lock, Positions]] = {}

    def read_batch(self, topic: str, group: str, rows: int, wait: After, start: Start) -> pa.RecordBatch:
        """Read up to `rows` rows in READ_SCHEMA after the position, and advance the position."""
        if not 0 < rows <= limits.PULL_ROWS_MAX:
            raise RequestError(f"max_messages={rows}: between 1 and {limits.PULL_ROWS_MAX}")
        wait_ms = min(delay_ms(wait, "wait"), limits.PULL_WAIT_MS_MAX)
        check_start(start)
        lock, positions = self._position(topic, group, start)
        with lock:
            if not positions.next:
                nothing = self._begin(topic, positions, rows, wait_ms)
                if nothing is not None:
                    return nothing
            batch = self._pull(topic, positions.next, rows, wait_ms)
            if batch.num_rows:
                positions.move(batch)
            else:
                positions.refresh()  # no messages came, so there is time to look for added queues
            return batch

    def read(self, topic: str, group: str, rows: int, wait: After, start: Start) -> list[Message]:
        """Read the same rows as `read_batch`, as messages."""
        return view(self.read_batch(topic, group, rows, wait, start), self._clock.wall_ms())

    def commit(self, topic: str, group: str, wanted: dict[int, int] | None) -> None:
        """Commit the positions, or the given offsets."""
        lock, positions = self._position(topic, group, "earliest")
        with lock:
            positions.commit(dict(positions.next) if wanted is None else wanted)

    def _position(self, topic: str, group: str, start: Start) -> tuple[threading.Lock, Positions]:
        check_process()
        with self._lock:
            found = self._positions.get((topic, group))
            if found is None:
                found = threading.Lock(), Positions(self._calls, topic, group, start)
                self._positions[topic, group] = found
            return found

    def _begin(self, topic: str, positions: Positions, rows: int, wait_ms: int) -> pa.RecordBatch | None:
        """Look up the queues. Returns an empty batch if the topic still does not exist, else None.

        A consumer that is ready to wait may start before the first message is sent, and so before its topic exists.
        """
        try:
            positions.refresh()
        except NotFound:
            if wait_ms == 0:
                raise
            # Wait for the message that creates the topic. Where messages create no topics, this raises NotFound.
            nothing = self._pull(topic, {0: 0}, rows, wait_ms)
            positions.came_first()
            try:
                positions.refresh()
            except NotFound:
                return nothing
        return None

    def _pull(self, topic: str, wanted: dict[int, int], rows: int, wait_ms: int) -> pa.RecordBatch:
        ticket = wire.Pull(topic=topic, offsets=dict(wanted), rows=rows, wait_ms=wait_ms)
        return self._calls.rows(ticket, wait_ms)


def queues(calls: Calls, topic: str) -> dict[int, QueueRange]:
    """List the first and the next offset of each queue of a topic. Raises NotFound for an unknown topic."""
    found = calls.action("queues", wire.Queues(topic=topic), dict[str, dict[int, QueueRange]])
    return found["queues"]


def offsets(calls: Calls, group: str, topic: str) -> dict[int, int]:
    """Read the offsets that a group has committed."""
    found = calls.action("offsets", wire.GetOffsets(group=group, topic=topic), dict[str, dict[int, int]])
    return found["offsets"]


def commit(calls: Calls, group: str, topic: str, wanted: dict[int, int]) -> None:
    """Store these offsets of a group at the broker."""
    body = wire.Commit(group=group, topic=topic, offsets=dict(wanted))
    calls.action("commit", body, dict[str, Any])
