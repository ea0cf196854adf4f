"""A broker for Dramatiq 2: a delayed message waits in Timeball, and not in the memory of a worker.

    import dramatiq
    from timeball import Timeball
    from timeball.client.dramatiq import TimeballBroker

    dramatiq.set_broker(TimeballBroker(Timeball("http://127.0.0.1:7480")))

The queue `mail` is the topic `dramatiq-mail`, and its workers are the consumer group of the same name. Dramatiq's own
retries are messages with a delay. Messages that Dramatiq rejects are the dead letters of the group.

A worker renews the leases of its messages. After a crash, they are delivered again when their leases end, and the
attempt counts. So a message that kills each worker becomes a dead letter.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import msgspec
from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.errors import ConnectionClosed, DecodeError, QueueJoinTimeout, QueueNotFound
from dramatiq.message import Message

from timeball.client.http_codec import path
from timeball.client.http_connection import Request
from timeball.client.messages import Message as Received
from timeball.client.messages import reason_of
from timeball.client.timeball import Timeball
from timeball.model import limits
from timeball.model.errors import GroupNotFound, InvalidName, NotFound, OverLimit, Unavailable
from timeball.model.time_parsing import After, delay_ms

logger = logging.getLogger(__name__)


class TimeballBroker(Broker):
    """Sends and receives the messages of Dramatiq. Thread safe. Works in a child process after a fork."""

    def __init__(
        self, ball: Timeball, *, middleware: Any = None, prefix: str = "dramatiq-", lease: After = "60s"
    ) -> None:
        """Prepare a broker.

        Args:
            ball: The client, over HTTP. `close` closes it.
            middleware: The middleware in place of Dramatiq's default.
            prefix: The beginning of the names of topics and groups.
            lease: The time after which the messages of a worker that has died are delivered again.

        Raises:
            RequestError: The client has no address of HTTP.
        """
        super().__init__(middleware)
        self.ball, self._calls = ball, ball._operations
        self._prefix, self._lease = prefix, lease
        # Messages that workers of this process have leased, by queue. They are kept here and not in a consumer, because
        # Dramatiq may replace a consumer while actors run.
        self._held = defaultdict[str, set[Received]](set)

    def close(self) -> None:
        """Close the client."""
        self.ball.close()

    def topic(self, queue_name: str) -> str:
        """The topic of a queue, which is also the name of its consumer group. Raises QueueNotFound."""
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)
        return self._prefix + queue_name

    def declare_queue(self, queue_name: str) -> None:
        """Declare a queue. Its first message creates the topic. Raises InvalidName."""
        if queue_name not in self.queues:
            topic = self._prefix + queue_name
            if not limits.NAME.fullmatch(topic) or len(topic) > limits.GROUP_BYTES_MAX:
                raise InvalidName(
                    f"queue {queue_name!r}: {topic!r} needs 1 to {limits.GROUP_BYTES_MAX} letters, digits, % | _ or -"
                )
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = None
            self.emit_after("declare_queue", queue_name)

    def enqueue(self, message: Any, *, delay: float | None = None) -> Any:
        """Send a message, to be delivered after `delay` milliseconds. A negative delay counts as 0.

        The message is on the broker's disk on return. It has its id as a key, so
        `ball.cancel(key=message.message_id)` cancels it.

        Raises ConnectionClosed if the broker cannot be reached, if the answer was lost, or if the broker has reached a
        limit, and RequestError if it refuses the message.
        """
        self.declare_queue(message.queue_name)
        self.emit_before("enqueue", message, delay)
        after = None if delay is None else timedelta(milliseconds=max(delay, 0))
        try:
            self.ball.send(
                self.topic(message.queue_name),
                message.encode(),
                after=after,
                keys=message.message_id,
                retry=True,
            )
        except Exception as error:
            # Of any kind: Dramatiq logs it, and acknowledges the message whose retry it was.
            if isinstance(message, LeasedMessage):
                message.is_lost = True
            if isinstance(error, (Unavailable, OverLimit)):
                raise ConnectionClosed(error) from error
            raise
        self.emit_after("enqueue", message, delay)
        return message

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30_000) -> LeasedMessages:
        """Receive the messages of a queue. Workers hold at most `prefetch` of them. A wait takes up to `timeout` ms."""
        held = self._held[queue_name]
        return LeasedMessages(self.ball, self.topic(queue_name), held, prefetch, timeout, self._lease)

    def flush(self, queue_name: str) -> None:
        """Cancel the scheduled messages of a queue, and acknowledge visible ones that no worker has.

        Raises QueueNotFound for a queue that was not declared.
        """
        topic, page = self.topic(queue_name), None
        try:
            while page != "":
                target = path("messages", topic=topic, max=limits.LISTED_ROWS_MAX, page=page)
                listed = self._calls.ask(Request("GET", target), msgspec.json.decode, is_repeatable=True)
                self.ball.cancel(ids=[message["id"] for message in listed["messages"]])
                page = listed.get("next_page", "")
            while messages := self.ball.pull(topic, topic, wait=0):
                self.ball.ack(messages)
        except NotFound:
            return  # the first message creates the topic

    def flush_all(self) -> None:
        """Flush all declared queues."""
        for queue_name in self.get_declared_queues():
            self.flush(queue_name)

    def join(self, queue_name: str, *, interval: int = 100, timeout: int | None = None) -> None:
        """Wait until all due messages of a queue have been processed, `timeout` ms at most. Raises QueueJoinTimeout."""
        topic, clock, pause = self.topic(queue_name), self.ball._clock, threading.Event()
        end_ns = None if timeout is None else clock.monotonic_ns() + timeout * 1_000_000
        while not self._is_processed(topic):
            if end_ns is not None and clock.monotonic_ns() >= end_ns:
                raise QueueJoinTimeout(queue_name)
            pause.wait(interval / 1000)

    def _is_processed(self, topic: str) -> bool:
        """Check whether the group of a queue has acknowledged all visible messages."""
        try:
            (group,) = self.ball.groups(topic)
            return group.lag == group.in_flight == 0
        except GroupNotFound:  # no worker has received anything yet
            return topic not in self.ball.topics()


class LeasedMessage(MessageProxy):
    """A message of Dramatiq, and the received message that carries it.

    `is_lost`: the retry of the message could not be sent, so the message itself is delivered again.
    """

    def __init__(self, message: Any, received: Received) -> None:
        super().__init__(message)
        self.received, self.is_lost = received, False


class LeasedMessages(Consumer):
    """The messages of a queue for the workers of a process, as Dramatiq's Consumer."""

    def __init__(
        self, ball: Timeball, topic: str, held: set[Received], prefetch: int, timeout_ms: int, lease: After
    ) -> None:
        """Begin. `held`: the messages that workers of this process have leased, which this object changes."""
        self._ball, self._topic, self._prefetch = ball, topic, prefetch
        self._wait, self._lease = timedelta(milliseconds=timeout_ms), timedelta(milliseconds=delay_ms(lease))
        self._changed = threading.Condition()  # guards `_held`, and is notified when it gets smaller
        self._held = held
        self._ready: deque[Received] = deque()  # received, and not handed out; also in `_held`
        self._renew_ns = 0  # the next renewal: at once, because an earlier consumer may have leased messages

    def __next__(self) -> LeasedMessage | None:
        """Return the next message. None if none came in time, if no broker answers, or if it was none of Dramatiq's.

        The last kind becomes a dead letter. Raises ConnectionClosed if that fails.
        """
        try:
            self._renew()
            if not self._ready:
                self._receive()
        except (Unavailable, OverLimit) as error:
            logger.warning("broker not reached, trying again topic=%s reason=%s", self._topic, error)
            with self._changed:
                self._changed.wait(self._wait.total_seconds())
        if not self._ready:
            return None
        received = self._ready.popleft()
        try:
            return LeasedMessage(Message.decode(received.body), received)
        except (DecodeError, TypeError) as error:  # not a message of Dramatiq
            reason = reason_of(error)
            self._answer(received, lambda: received.dead_letter(reason=reason))
            return None

    def _renew(self) -> None:
        """Renew the leases when half of their time has passed. Raises Unavailable and OverLimit.

        Each renewal counts as an attempt, so a message that kills each of its workers becomes a dead letter.
        """
        now_ns, lease_ms = self._ball._clock.monotonic_ns(), delay_ms(self._lease)
        if now_ns >= self._renew_ns:
            with self._changed:
                held = list(self._held)
            self._ball._consumer.change(held, lease_ms, counts=True)
            self._renew_ns = now_ns + lease_ms * 500_000  # half a lease

    def _receive(self) -> None:
        """Lease as many messages as may still be prefetched. While none may, wait until an actor has finished.

        Returns without messages after the time of a wait. Raises Unavailable and OverLimit.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._held) < self._prefetch, self._wait.total_seconds())
            free, topic = self._prefetch - len(self._held), self._topic
        if free > 0:
            messages = self._ball.pull(topic, topic, max_messages=free, wait=self._wait, lease=self._lease)
            self._ready.extend(messages)
            with self._changed:
                self._held.update(messages)

    def ack(self, message: LeasedMessage) -> None:
        """Acknowledge a message, or give it back if its retry could not be sent. Raises ConnectionClosed."""
        received = message.received
        self._answer(received, received.nack if message.is_lost else received.ack)

    def nack(self, message: LeasedMessage) -> None:
        """Move a message to the dead letters, with its exception as the reason. Raises ConnectionClosed."""
        reason = "rejected" if message._exception is None else reason_of(message._exception)
        self._answer(message.received, lambda: message.received.dead_letter(reason=reason))

    def _answer(self, received: Received, answer: Callable[[], bool]) -> None:
        """Make a call that answers for a message, which is not held any more then. Raises ConnectionClosed."""
        try:
            is_leased = answer()
        except (Unavailable, OverLimit) as error:
            raise ConnectionClosed(error) from error  # Dramatiq repeats the call
        with self._changed:
            self._held.discard(received)
            self._changed.notify_all()
        if not is_leased:
            logger.warning("lease had ended id=%s topic=%s", received.id, self._topic)

    def requeue(self, messages: Iterable[LeasedMessage]) -> None:
        """Give messages back that no actor has seen. Other workers get them at once. Raises ConnectionClosed."""
        received = [message.received for message in messages]
        with self._changed:
            self._held.difference_update(received)
        try:
            self._ball._consumer.give_back(received)
        except (Unavailable, OverLimit) as error:  # they are delivered again when their leases end
            raise ConnectionClosed(error) from error

    def close(self) -> None:
        """Give back the messages that were not handed out. Raises ConnectionClosed."""
        self.requeue([LeasedMessage(None, received) for received in self._ready])
        self._ready.clear()
