"""The reading methods of a client: consume as a member of a group, or browse by offset.

`Timeball` inherits the methods from `Reader`. The loop and the leases of consuming are in consumer.py. The positions of
browsing are in this file.

In the examples below `endpoint` is a broker's address, as in "grpc://127.0.0.1:7400".
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from timeball.client.calls import Calls
from timeball.client.consumer import ConsumeLoop, Consumer, Start, check_start, make_filter
from timeball.client.dialing import check_process
from timeball.client.messages import Leased, Message, view
from timeball.io.clock import Clock
from timeball.model import limits, wire
from timeball.model.errors import NotFound, RequestError
from timeball.model.time_parsing import After, delay_ms
from timeball.model.wire import QueueRange

# ---- the methods of `Timeball` --------------------------------------------------------------------------------


class Reader:
    """The reading methods, which `Timeball` inherits. Thread safe."""

    def __init__(self, calls: Calls, clock: Clock) -> None:
        self._calls = calls
        self._clock = clock
        self._consumer = Consumer(calls, clock)
        self._browser = Browser(calls, clock)

    # ---- consuming --------------------------------------------------------------------------------------

    def pull(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 256,
        wait: After = "10s",
        start: Start = "earliest",
        lease: After = "60s",
        tag: str | None = None,
        sql: str | None = None,
    ) -> list[Message]:
        """Receive the next messages of a topic as a member of a group. Waits up to `wait` for the first message.

        The members of a group share the messages out, and each message is leased to the member that received it. A
        message that is not acknowledged before its lease ends is delivered again, and the attempt counts. After the
        group's last attempt the message goes to the dead letters, `%DLQ%<group>`.

        If the topic does not exist, the call waits for the message that creates it. With `wait=0`, or where messages
        create no topics, it raises NotFound instead.

        `tag` and `sql` select messages. The group skips all other messages for good, so all its members should use the
        same filter. Give one of the two at most.

        Args:
            topic: The topic.
            group: The name of the consumer group. The first call of a group creates it.
            max_messages: The largest number of messages, from 1 to 65,536. One call returns at most 1,024.
            wait: The longest time to wait, as a timedelta or text such as "10s". A longer time than a minute counts as
                a minute.
            start: Where a new group begins: "earliest" at the first messages kept, "latest" after the last one.
            lease: The time until the message is delivered again, from 1 ms to 12 h.
            tag: Receive only messages with this tag, or with one of several, as in "paid || refunded".
            sql: Receive only messages whose properties match this condition, as in "region = 'eu' AND total > 100"
                (docs/filters.md).

        Returns:
            The messages, each with its lease. Empty if none came in time.

        Raises:
            NotFound: The topic does not exist, as described above.
            InvalidFilter: The filter cannot be read.
            RequestError: An argument is out of range, or both `tag` and `sql` are given.

        >>> from timeball import Timeball
        >>> with Timeball(endpoint) as ball:
        ...     _ = ball.send("mail", "now")
        ...     _ = ball.send("mail", "soon", after="50ms")
        ...     bodies = []
        ...     while len(bodies) < 2:
        ...         for message in ball.pull("mail", "readers"):
        ...             bodies.append(message.body)
        ...             _ = message.ack()
        >>> bodies
        [b'now', b'soon']
        """
        return self._consumer.pull(topic, group, max_messages, wait, start, lease, make_filter(tag, sql))

    def pull_batch(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 1_024,
        wait: After = "10s",
        start: Start = "earliest",
        lease: After = "60s",
        tag: str | None = None,
        sql: str | None = None,
    ) -> pa.RecordBatch:
        """Receive the next messages as columns: message.READ_SCHEMA and a column `receipt`.

        Arguments and errors are those of `pull`. The batch is empty if no message came in time.
        """
        message_filter = make_filter(tag, sql)
        return self._consumer.pull_batch(topic, group, max_messages, wait, start, lease, message_filter)

    def ack(self, messages: Leased | Iterable[Leased] | pa.RecordBatch, group: str | None = None) -> int:
        """Acknowledge messages. They are not delivered to the group again.

        Args:
            messages: One message, several messages, or a batch that `pull_batch` returned.
            group: The group that received the batch. Only needed for a batch.

        Returns:
            The number of messages whose lease had not ended. The others are delivered again, or were answered before.

        Raises:
            RequestError: A message was browsed and has no lease, or the group of a batch is missing.
        """
        return self._consumer.ack([messages] if isinstance(messages, Leased) else messages, group)

    def consume(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 256,
        until_idle: After | None = None,
        stop: threading.Event | None = None,
        start: Start = "earliest",
        lease: After = "60s",
        tag: str | None = None,
        sql: str | None = None,
    ) -> Iterator[Message]:
        """Yield messages as they become visible. Without `until_idle` and `stop` the loop never ends.

        A message counts as processed when you ask for the next one. The loop acknowledges processed messages about once
        a second, before each pull, and when it ends. A loop that you leave in the middle gives back its last message as
        a failed attempt, and the messages not yet handed out without counting an attempt.

        The loop renews the leases of messages that it has not handed out yet. If a single message needs longer than
        `lease`, call its `extend`.

        Args:
            topic: The topic.
            group: The name of the consumer group. The first call of a group creates it.
            max_messages: The largest number of messages in one pull, from 1 to 65,536. One pull returns at most 1,024.
            until_idle: End the loop when no message has come for this time.
            stop: An event that ends the loop when it is set. The loop looks at it at least once a second.
            start: Where a new group begins, as for `pull`.
            lease: The time until a message is delivered again, as for `pull`.
            tag: Receive only messages with this tag, as for `pull`.
            sql: Receive only messages that match this condition, as for `pull`.

        Yields:
            The messages, one at a time.

        Raises:
            NotFound: Messages create no topics at this broker, and the topic does not exist.
            RequestError: An argument is out of range, or both `tag` and `sql` are given.

        >>> from timeball import Timeball
        >>> with Timeball(endpoint) as ball:
        ...     summary = ball.send_many([{"body": "a"}, {"body": "b", "after": "50ms"}], topic="steps")
        ...     sorted(m.body for m in ball.consume("steps", "walkers", until_idle="500ms"))
        [b'a', b'b']
        """
        message_filter = make_filter(tag, sql)

        def pull(wait_ms: int) -> list[Message]:
            return self._consumer.pull(
                topic, group, max_messages, f"{wait_ms}ms", start, lease, message_filter
            )

        loop = ConsumeLoop(self._consumer, self._clock, pull, lease=lease, idle=until_idle, stop=stop)
        try:
            while not loop.is_over:
                message = loop.next()
                if message is None:
                    loop.work()
                else:
                    yield message
        finally:
            loop.end()

    # ---- browsing ---------------------------------------------------------------------------------------

    def browse(
        self,
        topic: str,
        group: str = "",
        *,
        max_messages: int = 256,
        wait: After = 0,
        start: Start = "earliest",
    ) -> list[Message]:
        """Read the next visible messages of all queues by offset.

        Nothing is leased, and every reader gets all messages.

        Each call goes on where the last call of this client ended for the same topic and group. The first call begins
        at the offsets that `group` has committed, or at `start`.

        Args:
            topic: The topic.
            group: The group whose committed offsets are the beginning. "" means no group.
            max_messages: The largest number of messages, from 1 to 65,536.
            wait: The longest time to wait for the first message, at most a minute. 0 means no waiting.
            start: Where queues without a committed offset begin: "earliest" or "latest".

        Returns:
            The messages. They have no lease, so they cannot be acknowledged. Empty if none came in time.

        Raises:
            OutOfRange: Retention has removed the messages at the position.
            NotFound: The topic does not exist, as for `pull`.
        """
        return self._browser.read(topic, group, max_messages, wait, start)

    def browse_batch(
        self,
        topic: str,
        group: str = "",
        *,
        max_messages: int = 8_192,
        wait: After = 0,
        start: Start = "earliest",
    ) -> pa.RecordBatch:
        """Read the next messages as columns, in message.READ_SCHEMA. The batch is empty if no message came in time.

        Arguments and errors are those of `browse`.
        """
        return self._browser.read_batch(topic, group, max_messages, wait, start)

    def commit(self, topic: str, group: str, offsets: Mapping[int, int] | None = None) -> None:
        """Store the group's offsets at the broker. They are on disk within about a second.

        Members of the group that pull go on from there too.

        Args:
            topic: The topic.
            group: The name of the group.
            offsets: The next offset of each queue. The default is the position after all messages that this client has
                browsed.

        Raises:
            OutOfRange: An offset lies beyond the end of its queue.
        """
        self._browser.commit(topic, group, None if offsets is None else dict(offsets))

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        """Read the offsets that a group has committed in a topic, by queue. Queues without a commit are left out."""
        return offsets(self._calls, group, topic)


# ---- positions of browsing ------------------------------------------------------------------------------------
# The client keeps the next offset of each queue, which advances with each read. For a group, `commit` stores the
# offsets at the broker, and the next browser of the group begins there.


class Positions:
    """The next offset of each queue of one topic, for one group."""

    def __init__(self, calls: Calls, topic: str, group: str, start: Start) -> None:
        self._calls = calls
        self._topic = topic
        self._group = group
        self._start = start
        self.next: dict[int, int] = {}  # by queue; empty until the queues are looked up
        self.committed: dict[int, int] = {}  # by queue; the offsets that the broker is known to have

    def refresh(self) -> None:
        """Add the queues that are not known yet.

        They begin at the group's committed offset, or else at the requested start.
        """
        ranges = queues(self._calls, self._topic)
        if ranges.keys() <= self.next.keys():
            return
        committed = offsets(self._calls, self._group, self._topic) if self._group else {}
        self.committed = {**committed, **self.committed}
        for queue, queue_range in ranges.items():
            first = queue_range.min if self._start == "earliest" else queue_range.max
            self.next.setdefault(queue, self.committed.get(queue, first))

    def start_at_earliest(self) -> None:
        """Let all queues begin at their earliest offset.

        Used if the topic was created while a read waited: all its messages came after the requested start.
        """
        self._start = "earliest"

    def move(self, batch: pa.RecordBatch) -> None:
        """Advance each queue's position past its last row in the batch."""
        queue_ids = batch.column("queue_id").to_numpy(zero_copy_only=False)
        queue_offsets = batch.column("queue_offset").to_numpy(zero_copy_only=False)
        for queue in np.unique(queue_ids):
            self.next[int(queue)] = int(queue_offsets[queue_ids == queue].max()) + 1

    def commit(self, next_offsets: dict[int, int]) -> None:
        """Commit the offsets that are not committed yet."""
        changed = {
            queue: offset for queue, offset in next_offsets.items() if self.committed.get(queue) != offset
        }
        if changed:
            commit(self._calls, self._group, self._topic, changed)
            self.committed.update(changed)


class Browser:
    """Reads by offset. Thread safe. Threads that read the same topic for the same group share a position."""

    def __init__(self, calls: Calls, clock: Clock) -> None:
        self._calls = calls
        self._clock = clock
        self._lock = threading.Lock()
        # By topic and group. The lock serialises the reads of a position.
        self._positions: dict[tuple[str, str], tuple[threading.Lock, Positions]] = {}

    def read_batch(self, topic: str, group: str, rows: int, wait: After, start: Start) -> pa.RecordBatch:
        """Read up to `rows` rows in READ_SCHEMA from the position on, and advance the position."""
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
                positions.refresh()  # no messages came, so there is time to look for added queues
            return batch

    def read(self, topic: str, group: str, rows: int, wait: After, start: Start) -> list[Message]:
        """Read the same rows as `read_batch`, as messages."""
        return view(self.read_batch(topic, group, rows, wait, start), self._clock.wall_ms())

    def commit(self, topic: str, group: str, next_offsets: dict[int, int] | None) -> None:
        """Commit these offsets, by default the current positions."""
        lock, positions = self._position(topic, group, "earliest")
        with lock:
            positions.commit(dict(positions.next) if next_offsets is None else next_offsets)

    def _position(self, topic: str, group: str, start: Start) -> tuple[threading.Lock, Positions]:
        check_process()
        with self._lock:
            entry = self._positions.get((topic, group))
            if entry is None:
                entry = threading.Lock(), Positions(self._calls, topic, group, start)
                self._positions[topic, group] = entry
            return entry

    def _look_up_queues(
        self, topic: str, positions: Positions, rows: int, wait_ms: int
    ) -> pa.RecordBatch | None:
        """Look up the queues. If the topic does not exist, wait for it.

        Returns None if the queues are known, or an empty batch if the topic still does not exist. A browser may start
        before the first message is sent, and so before its topic exists.
        """
        try:
            positions.refresh()
        except NotFound:
            if wait_ms == 0:
                raise
            # Wait for the message that creates the topic. Where messages create no topics, this raises NotFound.
            empty_batch = self._pull(topic, {0: 0}, rows, wait_ms)
            positions.start_at_earliest()
            try:
                positions.refresh()
            except NotFound:
                return empty_batch
        return None

    def _pull(self, topic: str, next_offsets: dict[int, int], rows: int, wait_ms: int) -> pa.RecordBatch:
        ticket = wire.Pull(topic=topic, offsets=dict(next_offsets), rows=rows, wait_ms=wait_ms)
        return self._calls.rows(ticket, wait_ms)


# ---- calls about queues and offsets ---------------------------------------------------------------------------


def queues(calls: Calls, topic: str) -> dict[int, QueueRange]:
    """List the first and the next offset of each queue of a topic. Raises NotFound for an unknown topic."""
    answer = calls.action("queues", wire.Queues(topic=topic), dict[str, dict[int, QueueRange]])
    return answer["queues"]


def offsets(calls: Calls, group: str, topic: str) -> dict[int, int]:
    """Read the offsets that a group has committed in a topic, by queue."""
    answer = calls.action("offsets", wire.GetOffsets(group=group, topic=topic), dict[str, dict[int, int]])
    return answer["offsets"]


def commit(calls: Calls, group: str, topic: str, next_offsets: dict[int, int]) -> None:
    """Store these offsets of a group at the broker, by queue."""
    body = wire.Commit(group=group, topic=topic, offsets=dict(next_offsets))
    calls.action("commit", body, dict[str, Any])
