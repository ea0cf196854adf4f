"""The reading half of a client: as a member of a group, which shares messages out, or by offset, which does not.

In the examples below `endpoint` is a broker's address, as in "grpc://127.0.0.1:7400".
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa

from timeball.client import browser
from timeball.client.browser import Browser
from timeball.client.calls import Calls
from timeball.client.consume_loop import ConsumeLoop
from timeball.client.consumer import Consumer, Start, wanted
from timeball.client.messages import Leased, Message
from timeball.clock import Clock
from timeball.instants import After


class Reader:
    """The verbs for those who read. Thread safe."""

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
        """The next messages of a topic for a member of a group; waits up to `wait` (at most a minute) for the first.

        The members share the messages out; each is leased to the one that got it. One that is not acknowledged within
        `lease` is handed out again, counted, and after the group's last attempt it goes to `%DLQ%<group>`. A group
        that is new begins at the `start` of the queues. At most 1,024 come at once. A topic that does not exist is
        waited for, as its first message may make it; with wait=0, or where messages make none, it is NotFound.

        `tag`: only messages with this tag, or with one of several ("paid || refunded"). `sql`: only those whose
        properties match a condition ("region = 'eu' AND total > 100", docs/filters.md). The group has passed the others
        by, so all its members should ask for the same.

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
        return self._consumer.pull(topic, group, max_messages, wait, start, lease, wanted(tag, sql))

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
        """The same as columns: message.READ_SCHEMA and `receipt`; empty when nothing came in time."""
        only = wanted(tag, sql)
        return self._consumer.pull_batch(topic, group, max_messages, wait, start, lease, only)

    def ack(self, messages: Leased | Iterable[Leased] | pa.RecordBatch, group: str | None = None) -> int:
        """Say that these are dealt with; returns how many of their leases had not ended before.

        `group`: of a batch of `pull_batch`; messages know theirs.
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
        """Messages as they become visible, without end, or until none has come for `until_idle`, or `stop` is set.

        A message counts as dealt with when the next one is asked for; that is acknowledged about once a second, after
        each pull, and when the loop ends. A loop that is left in the middle gives back its last message, as an attempt
        that failed, and what it had not come to. The lease of what it has not come to is renewed; a message that takes
        longer than `lease` by itself needs `extend`. `tag` and `sql` as for `pull`.

        >>> from timeball import Timeball
        >>> with Timeball(endpoint) as ball:
        ...     summary = ball.send_many([{"body": "a"}, {"body": "b", "after": "50ms"}], topic="steps")
        ...     sorted(m.body for m in ball.consume("steps", "walkers", until_idle="500ms"))
        [b'a', b'b']
        """
        only = wanted(tag, sql)

        def pull(wait_ms: int) -> list[Message]:
            return self._consumer.pull(topic, group, max_messages, f"{wait_ms}ms", start, lease, only)

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
        """The next visible messages of all queues, by offset: nothing is leased, and every reader gets them all.

        Each call goes on where the last one of this client ended, the first one where `group` has committed, or at the
        `start` of the queues. Raises OutOfRange when retention has passed that place; otherwise as `pull`.
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
        """The same as columns, in message.READ_SCHEMA; empty when nothing came in time."""
        return self._browser.read_batch(topic, group, max_messages, wait, start)

    def commit(self, topic: str, group: str, offsets: Mapping[int, int] | None = None) -> None:
        """Have the broker remember where the group goes on: behind all that was browsed, or at `offsets` by queue.

        Members that pull go on from there too.
        """
        self._browser.commit(topic, group, None if offsets is None else dict(offsets))

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        """Return the offsets that a group has committed, by queue."""
        return browser.offsets(self._calls, group, topic)
