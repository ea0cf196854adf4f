"""The reading methods of a client: consume as a member of a group, or browse by offset.

`Timeball` inherits the methods from `Reader`. The loop and the leases of consuming are in consumer.py, and the
positions of browsing in browser.py.

In the examples below `endpoint` is a broker's address, as in "grpc://127.0.0.1:7400".
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from timeball.client import positions
from timeball.client.consumer import ConsumeLoop, Consumer, Receiver, Start, make_filter, receive_request
from timeball.client.messages import Leased, Message
from timeball.io.clock import Clock
from timeball.model.errors import RequestError
from timeball.model.time_parsing import After

if TYPE_CHECKING:
    import pyarrow as pa

    from timeball.client.browser import Browser
    from timeball.client.calls import Calls

# ---- the methods of `Timeball` --------------------------------------------------------------------------------


ONLY_FLIGHT = "{}: only over Flight; use an endpoint such as grpc://host:7400, with the extra `arrow`"


class Reader:
    """The reading methods, which `Timeball` inherits. Thread safe."""

    def __init__(self, calls: Receiver, columns: Calls | None, clock: Clock) -> None:
        """Prepare. `columns` are the calls over Flight, or None for a client of the HTTP API."""
        self._calls, self._columns = calls, columns
        self._clock = clock
        self._consumer = Consumer(calls, clock)
        self._browser: Browser | None = None
        if columns is not None:
            from timeball.client.browser import Browser  # needs pyarrow

            self._browser = Browser(columns, clock)

    def _flight(self, method: str) -> Calls:
        """The calls over Flight. Raises RequestError for a client of the HTTP API."""
        if self._columns is None:
            raise RequestError(ONLY_FLIGHT.format(method))
        return self._columns

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
        request = receive_request(topic, group, max_messages, wait, start, lease, make_filter(tag, sql))
        return self._flight("pull_batch").rows(request, request.wait_ms)

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
        a second, before it waits for further ones, and when it ends. A loop that you leave in the middle gives back its
        last message as a failed attempt, and the messages not yet handed out without counting an attempt.

        Over HTTP the broker sends messages as they become visible, up to `max_messages` that are not acknowledged.

        The loop renews the leases of messages that it has not handed out yet. If a single message needs longer than
        `lease`, call its `extend`.

        Args:
            topic: The topic.
            group: The name of the consumer group. The first call of a group creates it.
            max_messages: The largest number of messages that the loop holds, from 1 to 65,536: the credit of its
                stream over HTTP (at most 10,000), or the number in one pull over Flight (at most 1,024).
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
        feed = self._consumer.open_feed(topic, group, max_messages, start, lease, make_filter(tag, sql))
        loop = ConsumeLoop(self._consumer, self._clock, feed, lease=lease, idle=until_idle, stop=stop)
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
        return self._browse().read(topic, group, max_messages, wait, start)

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
        return self._browse().read_batch(topic, group, max_messages, wait, start)

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
        if offsets is None or self._browser is not None:
            self._browse().commit(topic, group, None if offsets is None else dict(offsets))
        else:
            positions.commit(self._calls, group, topic, dict(offsets))

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        """Read the offsets that a group has committed in a topic, by queue. Queues without a commit are left out."""
        return positions.offsets(self._calls, group, topic)

    def _browse(self) -> Browser:
        if self._browser is None:
            raise RequestError(ONLY_FLIGHT.format("browse"))
        return self._browser
