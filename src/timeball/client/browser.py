"""Browsing: reads of visible messages by offset, as columns over Flight.

The client keeps the next offset of each queue, which advances with each read. For a group, `commit` stores the offsets
at the broker, and the next browser of the group begins there. A group's offsets are read and committed over HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from timeball.client.calls import Calls
from timeball.client.consumer import Start, check_start
from timeball.client.http_calls import HttpCalls
from timeball.client.http_codec import commit_offsets, read_offsets
from timeball.client.messages import Message
from timeball.io.clock import Clock
from timeball.model import limits, wire
from timeball.model.answers import QueueRange
from timeball.model.bodies import readable_body
from timeball.model.errors import NotFound, RequestError
from timeball.model.message import decode_properties, lateness_ms
from timeball.model.time_parsing import After, delay_ms


class Positions:
    """The next offset of each queue of one topic, for one group, or for none if `group` is ""."""

    def __init__(
        self, columns: Calls, operations: Callable[[], HttpCalls], topic: str, group: str, start: Start
    ) -> None:
        """Begin without queues. `start`: where queues without a committed offset begin. For the others, see Browser."""
        self._columns, self._operations = columns, operations
        self._topic = topic
        self._group = group
        self._start = start
        self.next: dict[int, int] = {}  # by queue; empty until the queues are looked up
        self.committed: dict[int, int] = {}  # by queue; the offsets that the broker is known to have

    def refresh(self) -> None:
        """Look up the queues of the topic, and add the new ones.

        They begin at the group's committed offset, or else at `start`. Raises NotFound if the topic does not exist.
        """
        answer_type = dict[str, dict[int, QueueRange]]
        ranges = self._columns.action("queues", wire.Queues(topic=self._topic), answer_type)["queues"]
        if ranges.keys() <= self.next.keys():
            return
        committed = {}
        if self._group:
            committed = self._operations().run(read_offsets(self._topic, self._group))
        self.committed = {**committed, **self.committed}
        for queue, queue_range in ranges.items():
            first = queue_range.min if self._start == "earliest" else queue_range.max
            self.next.setdefault(queue, self.committed.get(queue, first))

    def start_at_earliest(self) -> None:
        """Let queues begin at their earliest offset.

        For a topic that was created while a read waited: all of its messages came later than the read.
        """
        self._start = "earliest"

    def move(self, batch: pa.RecordBatch) -> None:
        """Advance the position of each queue to the offset after its last row in the batch."""
        queue_ids = batch.column("queue_id").to_numpy(zero_copy_only=False)
        queue_offsets = batch.column("queue_offset").to_numpy(zero_copy_only=False)
        for queue in np.unique(queue_ids):
            self.next[int(queue)] = int(queue_offsets[queue_ids == queue].max()) + 1

    def commit(self, next_offsets: dict[int, int]) -> None:
        """Commit these offsets by queue, without those that the broker has already."""
        changed = {
            queue: offset for queue, offset in next_offsets.items() if self.committed.get(queue) != offset
        }
        if changed:
            self._operations().run(commit_offsets(self._topic, self._group, changed))
            self.committed.update(changed)


class Browser:
    """Reads by offset. Thread safe. Threads that read the same topic for the same group share a position."""

    def __init__(self, columns: Calls, operations: Callable[[], HttpCalls], clock: Clock) -> None:
        """Read by `columns`, over Flight. `operations` returns the calls over HTTP, or raises RequestError."""
        self._columns, self._operations = columns, operations
        self._clock = clock
        self._lock = threading.Lock()
        # By topic and group. The lock serialises the reads of a position.
        self._positions: dict[tuple[str, str], tuple[threading.Lock, Positions]] = {}

    def read_batch(self, topic: str, group: str, rows: int, wait: After, start: Start) -> pa.RecordBatch:
        """Read up to `rows` rows in READ_SCHEMA from the position on, and advance the position.

        Waits up to `wait` for the first row. Reader.browse documents the arguments and the errors.
        """
        if not 0 < rows <= limits.PULL_ROWS_MAX:
            raise RequestError(f"max_messages={rows}: between 1 and {limits.PULL_ROWS_MAX}")
        wait_ms = min(delay_ms(wait, "wait"), limits.PULL_WAIT_MS_MAX)
        check_start(start)
        lock, positions = self._position(topic, group, start)
        with lock:
            if not positions.next:
                empty_batch = self._look_up_queues(topic, positions, rows, wait_ms)
                if empty_batch is not None:
                    return empty_batch
            batch = self._pull(topic, positions.next, rows, wait_ms)
            if batch.num_rows:
                positions.move(batch)
            else:
                positions.refresh()  # no messages came, so there is time to look for new queues
            return batch

    def read(self, topic: str, group: str, rows: int, wait: After, start: Start) -> list[Message]:
        """Read the same rows as `read_batch`, as messages."""
        return as_messages(self.read_batch(topic, group, rows, wait, start), self._clock.wall_ms())

    def commit(self, topic: str, group: str, next_offsets: dict[int, int] | None) -> None:
        """Commit offsets of the group by queue. None as `next_offsets` means the current positions of this client."""
        lock, positions = self._position(topic, group, "earliest")
        with lock:
            positions.commit(dict(positions.next) if next_offsets is None else next_offsets)

    def _position(self, topic: str, group: str, start: Start) -> tuple[threading.Lock, Positions]:
        """Find the positions of a group in a topic, and their lock. New ones begin at `start`."""
        self._columns.check()
        with self._lock:
            entry = self._positions.get((topic, group))
            if entry is None:
                entry = threading.Lock(), Positions(self._columns, self._operations, topic, group, start)
                self._positions[topic, group] = entry
            return entry

    def _look_up_queues(
        self, topic: str, positions: Positions, rows: int, wait_ms: int
    ) -> pa.RecordBatch | None:
        """Look up the queues before the first read. If the topic does not exist, wait up to `wait_ms` for it.

        A browser may start before the first message is sent, which creates the topic. Returns None if the queues are
        found, or the empty batch of the read if the topic still does not exist. Raises NotFound without a wait, or if
        messages create no topics at this broker.
        """
        try:
            positions.refresh()
        except NotFound:
            if wait_ms == 0:
                raise
            # A read of queue 0 waits for the message that creates the topic.
            empty_batch = self._pull(topic, {0: 0}, rows, wait_ms)
            positions.start_at_earliest()
            try:
                positions.refresh()
            except NotFound:
                return empty_batch
        return None

    def _pull(self, topic: str, next_offsets: dict[int, int], rows: int, wait_ms: int) -> pa.RecordBatch:
        """Read up to `rows` rows from these offsets by queue on. Waits up to `wait_ms` for the first one."""
        ticket = wire.Pull(topic=topic, offsets=dict(next_offsets), rows=rows, wait_ms=wait_ms)
        return self._columns.rows(ticket)


# ---- rows as messages --------------------------------------------------------------------------------------


class BatchRow:
    """One row of a batch in READ_SCHEMA, as the ReceivedRow of a message. A value is decoded when it is read."""

    __slots__ = ("_batch", "_row")

    receipt = ""  # a browsed message has no lease

    def __init__(self, batch: pa.RecordBatch, row: int) -> None:
        self._batch, self._row = batch, row

    def _value(self, column: str) -> Any:
        return self._batch.column(column)[self._row].as_py()

    @property
    def topic(self) -> str:
        return str(self._value("topic"))

    @property
    def body(self) -> bytes:
        return readable_body(self._value("body") or b"", self._value("sys_flag"))

    @property
    def tag(self) -> str | None:
        tag: str | None = self._value("tag")
        return tag

    @property
    def keys(self) -> list[str]:
        return (self._value("keys") or "").split()

    @property
    def properties(self) -> dict[str, str]:
        return decode_properties(self._value("properties") or "")

    @property
    def id(self) -> str | None:
        key: str | None = self._value("unique_key")
        return key

    @property
    def seq(self) -> int:
        return int(self._value("seq"))

    @property
    def scheduled_seq(self) -> int | None:
        seq: int | None = self._value("source_seq")
        return seq

    @property
    def queue_id(self) -> int:
        return int(self._value("queue_id"))

    @property
    def queue_offset(self) -> int:
        return int(self._value("queue_offset"))

    @property
    def born_ms(self) -> int | None:
        born_ms: int | None = self._value("born_ms")
        return born_ms

    @property
    def store_ms(self) -> int:
        return int(self._value("store_ms"))

    @property
    def due_ms(self) -> int | None:
        due_ms: int | None = self._value("due_ms")
        return due_ms

    @property
    def lateness_ms(self) -> int | None:
        due_ms = self.due_ms
        return None if due_ms is None else lateness_ms(due_ms, self._value("accepted_ms"), self.store_ms)

    @property
    def attempts(self) -> int:
        return int(self._value("reconsume_times") or 0)


def as_messages(batch: pa.RecordBatch, received_ms: int) -> list[Message]:
    """Wrap each row of a batch in READ_SCHEMA as a message without a lease."""
    return [Message(BatchRow(batch, row), received_ms) for row in range(batch.num_rows)]
