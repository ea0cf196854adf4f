"""The reading methods of a client: consume as a member of a group, or browse by offset.

`Timeball` inherits the methods from `Reader`. The loop and the leases of consuming are in consumer.py, and the
positions of browsing in browser.py.

In the examples below `endpoint` is a broker's address, as in "http://127.0.0.1:7480".
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from timeball.client.consumer import ConsumeLoop, Consumer, Start, make_filter
from timeball.client.http_calls import HttpCalls
from timeball.client.http_codec import commit_offsets, read_offsets
from timeball.client.messages import Leased, Message
from timeball.client.network import run
from timeball.io.clock import Clock
from timeball.model.errors import RequestError
from timeball.model.time_parsing import After

if TYPE_CHECKING:
    import pyarrow as pa

    from timeball.client.browser import Browser
    from timeball.client.calls import Calls

T = TypeVar("T")

# ---- the methods of `Timeball` --------------------------------------------------------------------------------


ONLY_FLIGHT = (
    '{}: only over Flight; name its address, as in Timeball("http://host:7480", flight="grpc://host:7400"), and '
    "install the extra `arrow`"
)
ONLY_HTTP = (
    "{} is an address of Flight, which serves columns only. Operations go over HTTP: use an endpoint such as "
    "http://host:7480, and this address as flight="
)


class Reader:
    """The reading methods, which `Timeball` inherits. Thread safe."""

    def __init__(self, http: HttpCalls | None, flight: Calls | None, clock: Clock) -> None:
        """Read by `http`, the calls of operations, and by `flight`, the calls for columns. One of them may be None."""
        self._http, self._flight = http, flight
        self._clock = clock
        self._group_member = None if http is None else Consumer(http, clock)
        self._browser: Browser | None = None
        if flight is not None:
            from timeball.client.browser import Browser  # needs pyarrow

            self._browser = Browser(flight, lambda: self._operations, clock)

    @property
    def _operations(self) -> HttpCalls:
        """The calls over HTTP. Raises RequestError for a client that has only the address of Flight."""
        if self._http is None:
            assert self._flight is not None
            raise RequestError(ONLY_HTTP.format(self._flight.endpoint))
        return self._http

    def _drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of operations, as `network.driven` does."""
        return self._operations.network.drive(coroutine)

    def _columns(self, method: str) -> Calls:
        """The calls over Flight. Raises RequestError for a client that has no address of Flight."""
        if self._flight is None:
            raise RequestError(ONLY_FLIGHT.format(method))
        return self._flight

    def _check(self) -> None:
        """Raise RequestError if no call can be made: the client is closed."""
        for calls in (self._http, self._flight):
            if calls is not None:
                calls.check()
                return

    @property
    def _consumer(self) -> Consumer:
        """The consumer of this client, for any group. Raises RequestError as `_operations`."""
        return self._group_member or Consumer(self._operations, self._clock)

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

    def ack(self, messages: Leased | Iterable[Leased]) -> int:
        """Acknowledge messages. They are not delivered to the group again.

        Args:
            messages: One message, or several messages.

        Returns:
            The number of messages whose lease had not ended. The others are delivered again, or were answered before.

        Raises:
            RequestError: A message was browsed and has no lease.
        """
        return self._consumer.ack([messages] if isinstance(messages, Leased) else messages)

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

        The broker sends messages as they become visible, up to `max_messages` that are not acknowledged.

        The loop renews the leases of messages that it has not handed out yet. If a single message needs longer than
        `lease`, call its `extend`.

        Args:
            topic: The topic.
            group: The name of the consumer group. The first call of a group creates it.
            max_messages: The largest number of messages that the loop holds, from 1 to 65,536. More than 10,000 count
                as 10,000.
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
            OverLimit: The broker has reached a limit. Try again later.
            Unavailable: The broker is away for longer than the attempts of a call. The loop ends, and a new loop
                continues the group. A `Worker` goes on trying instead.

        >>> from timeball import Timeball
        >>> with Timeball(endpoint) as ball:
        ...     summary = ball.send_many([{"body": "a"}, {"body": "b", "after": "50ms"}], topic="steps")
        ...     sorted(m.body for m in ball.consume("steps", "walkers", until_idle="2s"))
        [b'a', b'b']
        """
        consumer = self._consumer
        feed = consumer.prepare_feed(topic, group, max_messages, start, lease, make_filter(tag, sql))
        loop = ConsumeLoop(consumer, self._clock, feed, lease=lease, idle=until_idle, stop=stop)
        try:
            while (message := loop.next()) is not None or not loop.is_over:
                if message is None:
                    run(loop.work())
                else:
                    yield message
        finally:
            run(loop.end())

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
        return self._browser_of("browse").read(topic, group, max_messages, wait, start)

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
        return self._browser_of("browse_batch").read_batch(topic, group, max_messages, wait, start)

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
            self._browser_of("commit").commit(topic, group, None if offsets is None else dict(offsets))
        else:
            self._operations.run(commit_offsets(topic, group, dict(offsets)))

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        """Read the offsets that a group has committed in a topic, by queue. Queues without a commit are left out."""
        return self._operations.run(read_offsets(topic, group))

    def _browser_of(self, method: str) -> Browser:
        self._columns(method)
        assert self._browser is not None
        return self._browser
