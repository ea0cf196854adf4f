"""kombu's transport over Timeball.

    a durable queue                a topic and a group of the same name
    a fanout or topic exchange     a topic. Temporary queues (auto_delete, exclusive) are live tails of it: remote
                                   control, events. A durable queue of a fanout exchange is a group of it
    a direct exchange              routes to the durable queues that this connection has declared. Transient messages
                                   for other queues (replies) go to the topic of the exchange, with the routing key as
                                   the tag
    ack, reject                    an acknowledgement; a nack with requeue, else a dead letter
    prefetch                       the credit of the streams

The virtual host, as in timeball://host/shop, is a prefix of all names: "shop-celery".

A priority is refused. The channel and its QoS belong to kombu's interface and run in the thread of the connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from queue import Empty
from typing import Any, Literal

import msgspec
from amqp.protocol import queue_declare_ok_t
from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.utils.url import url_to_parts
from kombu.utils.uuid import uuid

from timeball import __version__
from timeball.client.celery import messages
from timeball.client.celery.link import Answer, GroupSource, Link, Source, TailSource
from timeball.client.credentials import credentials, read_roots
from timeball.client.http_calls import HttpCalls
from timeball.client.http_codec import Operation, Page, path
from timeball.client.http_connection import DEFAULT_PORT, Request
from timeball.client.messages import Message
from timeball.client.schedules import Schedules
from timeball.client.timeball import Timeball
from timeball.io.clock import SystemClock
from timeball.model import limits
from timeball.model.answers import Verdict
from timeball.model.errors import GroupNotFound, NotFound, Unavailable

LEASE_MS = 30_000  # renewed every 10 s: the tasks of a dead worker run again after 20 to 30 s
TIMEOUT_MS = 10_000  # of a call
CREDIT = 256  # without a prefetch count
TURN_S = 0.005  # messages are handed over for this time before the event loop looks at its other sockets
FULL_S = 1.0  # after this time at the prefetch limit, messages that wait here go to other workers
CHECK_S, FULL_CHECK_S = 0.5, 0.05  # time between two checks for that, and while a consumer is at its limit
TRANSIENT = 1  # the delivery mode of replies and events

# (endpoint, topic, queue) -> where the replies to a temporary queue begin. Celery declares the queue of `rpc://` on one
# connection of a process, sends the task, and consumes the queue on another connection later.
_BEGINS: dict[tuple[str, str, str], str] = {}


class LeaseQoS(virtual.QoS):
    """The unacknowledged messages of a channel, and its prefetch count."""

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge a message."""
        self._answer(delivery_tag, "ack")

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Give a message back as a failed attempt, or make it a dead letter."""
        self._answer(delivery_tag, "nack" if requeue else "dead_letter")

    def restore_unacked(self) -> list[Any]:
        """Give all messages back that have no answer yet. No attempt is counted.

        Returns no errors, as kombu's method would: the link sends the answers later.
        """
        self._flush()  # removes the answered messages from `_delivered`
        for delivery_tag in list(self._delivered):
            self._answer(delivery_tag, "give_back")
        self._flush()
        return []

    def _answer(self, delivery_tag: str, answer: Answer) -> None:
        """Answer for a message at the broker, unless the channel is closed, and forget it here."""
        if (connection := self.channel.connection) is not None:
            connection.answer(delivery_tag, answer)
        self._quick_ack(delivery_tag)


class TopicChannel(virtual.Channel):
    """A channel of a connection. `connection` is the transport."""

    QoS = LeaseQoS
    supports_fanout = True

    # ---- declare ----------------------------------------------------------------------------------------

    def queue_declare(self, queue: str | None = None, passive: bool = False, **options: Any) -> Any:
        """Declare a queue. The number of its messages is looked up only for a passive declaration."""
        if passive:
            return super().queue_declare(queue, passive=True, **options)
        queue = queue or f"amq.gen-{uuid()}"
        self._new_queue(queue, **options)
        self.connection.begin_replies(queue)
        return queue_declare_ok_t(queue, 0, 0)

    def _new_queue(self, queue: str, **options: Any) -> None:
        self.connection.is_temporary[queue] = bool(options.get("auto_delete") or options.get("exclusive"))

    def _has_queue(self, queue: str, **options: Any) -> bool:
        has_queue: bool = self.connection.has_queue(queue)
        return has_queue

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        self.connection.bind(self.typeof(exchange).type, exchange, routing_key, pattern, queue)

    def _delete(self, queue: str, *arguments: Any, **options: Any) -> None:
        self.connection.delete(queue)

    # ---- publish ----------------------------------------------------------------------------------------

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **options: Any) -> None:
        """Send a message to each of its topics. It is on the broker's disk on return.

        Raises ChannelError if no queue is known, and the errors of `messages.fields_of` and `Timeball.send`.
        """
        self._inplace_augment_message(message, exchange, routing_key)
        # kombu repeats a failed publish with the same properties, so the id stays, by which the broker recognizes the
        # repetition. kombu draws a new delivery tag each time. It is replaced, because the repeated body must be equal.
        properties = message["properties"]
        properties["delivery_tag"] = properties.setdefault(messages.ID, uuid())
        for topic, tag in self._destinations(message, exchange, routing_key or ""):
            self.connection.send(topic, tag, message)

    def _destinations(
        self, message: Mapping[str, Any], exchange: str, routing_key: str
    ) -> list[tuple[str, str | None]]:
        """Find the topics of a message, each with its tag there. None means the tag of the task.

        Raises ChannelError if no queue is known for the routing key.
        """
        connection = self.connection
        is_transient = message["properties"].get("delivery_mode") == TRANSIENT
        kind = self.typeof(exchange).type if exchange else "direct"
        if kind == "fanout":
            return [(connection.exchange_topic(exchange), routing_key)]
        queues = self._lookup(exchange, routing_key) if exchange else [routing_key]
        durable = [queue for queue in queues if connection.is_temporary.get(queue) is False]
        if durable:
            return [(connection.topic(queue), None) for queue in durable]
        if is_transient or kind == "topic" or any(connection.is_temporary.get(queue) for queue in queues):
            return [(connection.exchange_topic(exchange), routing_key)]
        if not exchange:
            return [(connection.topic(routing_key), None)]
        raise ChannelError(
            f"no queue is known here for exchange {exchange!r} and routing key {routing_key!r}: name the queue, "
            "as in apply_async(queue=...), or declare it"
        )

    # ---- consume ----------------------------------------------------------------------------------------

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **options: Any
    ) -> None:
        """Begin to consume a queue."""
        super().basic_consume(queue, no_ack, callback, consumer_tag, **options)
        self.connection.consume(self, queue, no_ack)

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop a consumer. Messages that were not handed over are given back."""
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is not None and self.connection is not None:
            self.connection.stop_consuming(queue)

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Set the prefetch count."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self.connection.change_credit(self)

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        """Take one message, if one is there."""
        message = super().basic_get(queue, no_ack=no_ack, **options)
        if message is not None and no_ack:
            self.connection.answer(message.delivery_tag, "ack")
        return message

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        """Receive the payload of one message. Raises Empty without one. kombu passes a timeout, which is not used."""
        payload: dict[str, Any] | None = self.connection.get(queue)
        if payload is None:
            raise Empty
        return payload

    def _size(self, queue: str) -> int:
        size: int = self.connection.size(queue)
        return size

    def _purge(self, queue: str) -> int:
        purged: int = self.connection.purge(queue)
        return purged

    # ---- beyond kombu -----------------------------------------------------------------------------------

    def cancel(self, task_id: str) -> Verdict:
        """Cancel a pending task. Returns the verdict of the broker."""
        verdict: Verdict = self.connection.cancel(task_id)
        return verdict

    @property
    def schedules(self) -> Schedules:
        """The recurring schedules of the broker."""
        schedules: Schedules = self.connection.schedules
        return schedules


class _Consumer:
    """The consumer of a queue by a channel."""

    def __init__(self, channel: TopicChannel, no_ack: bool) -> None:
        self.channel, self.no_ack = channel, no_ack
        # Since when messages wait here, because the prefetch limit is reached.
        self.full_since_s: float | None = None
        self.is_paused = False  # it has no source, because its messages had waited for FULL_S

    @property
    def has_place(self) -> bool:
        """True if a further message may be handed over."""
        return self.no_ack or bool(self.channel.qos.can_consume())


class Transport(virtual.Transport):
    """A connection of kombu to a broker or cluster.

    Options in `broker_transport_options`: `lease_ms`, the time after which the tasks of a dead worker run again, and
    `timeout_ms`, the longest time for an answer.
    """

    Channel = TopicChannel
    driver_type = driver_name = "timeball"
    default_port = DEFAULT_PORT
    polling_interval = None
    connection_errors = (*virtual.Transport.connection_errors, Unavailable)
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = ()
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]), heartbeats=False
    )

    def __init__(self, client: Any, **options: Any) -> None:
        """Read the options of `client`, kombu's Connection. Raises RequestError for wrong options or certificates."""
        super().__init__(client, **options)
        settings = client.transport_options
        self._lease_ms = settings.get("lease_ms", LEASE_MS)
        timeout_ms = settings.get("timeout_ms", TIMEOUT_MS)
        endpoint, tls_roots = _endpoint_of(client), _tls_roots(client.ssl)
        access_key, secret_key = client.userid, client.password
        self._endpoint = endpoint
        self._ball = Timeball(
            endpoint, timeout_ms=timeout_ms, access_key=access_key, secret_key=secret_key, tls_roots=tls_roots
        )
        who = credentials(access_key, secret_key, tls_roots)
        self.link = Link(HttpCalls(endpoint, timeout_ms, who), self._lease_ms)
        self._prefix = messages.topic_prefix(client.virtual_host or "")
        self.is_temporary: dict[str, bool] = {}  # by declared queue
        self._sources: dict[str, list[Source]] = {}  # by queue
        self._groups: dict[str, str] = {}  # durable queues of fanout exchanges -> their topics
        self._consumers: dict[str, _Consumer] = {}
        self._unanswered: dict[str, Message] = {}  # by delivery tag
        self._clock = SystemClock()
        self._loop: Any = None  # of a worker with an event loop
        self._check: Any = None  # the timer of the next check in this loop

    @property
    def default_connection_params(self) -> dict[str, Any]:
        """The address of a broker on this machine."""
        return {"hostname": "127.0.0.1", "port": DEFAULT_PORT}

    def driver_version(self) -> str:
        """The version of Timeball."""
        return __version__

    def establish_connection(self) -> Transport:
        """Check that a broker answers. Raises Unavailable."""
        self._ball.status()
        super().establish_connection()
        return self

    def close_connection(self, connection: Any) -> None:
        """Close the channels, which gives their messages back, and end the thread of the link."""
        super().close_connection(connection)
        # In a child process after a fork, the poll object of the loop is shared with the parent.
        if self._loop is not None and not self.link.is_inherited:
            self._loop.remove(self.link.bell.descriptor)
            self._check.cancel()
            self._loop = None
        self.link.close()
        self.link.calls.close()
        self._ball.close()

    # ---- names ------------------------------------------------------------------------------------------

    def topic(self, queue: str) -> str:
        """Return the topic of a durable queue."""
        return self._prefix + messages.topic_name(queue)

    def exchange_topic(self, exchange: str) -> str:
        """Return the topic of an exchange. The default exchange has an empty name."""
        return f"{self._prefix}exchange-{messages.topic_name(exchange or 'default')}"

    # ---- publish and administer -------------------------------------------------------------------------

    @property
    def schedules(self) -> Schedules:
        """The recurring schedules of the broker."""
        return self._ball.schedules

    def send(self, topic: str, tag: str | None, message: Mapping[str, Any]) -> None:
        """Send a message, scheduled if it has an ETA."""
        fields = messages.fields_of(message)
        if tag is not None:
            fields["tag"] = tag or None
        self._ball.send(topic, retry=True, **fields)

    def cancel(self, task_id: str) -> Verdict:
        """Cancel a pending task of this virtual host. Returns the verdict of the message that was settled.

        The verdict is `not_found` if no message has the task's id as a key, and for an id that cannot be a key.
        """
        key, verdicts = messages.key_of(task_id), list[Verdict]()
        if key is None:
            return Verdict(task_id, "not_found", None, None)
        # The same id may be pending in another virtual host. Only the topics tell the messages apart.
        pending = self._pending(key) if self._prefix else {}
        own_ids = [id for id, topic in pending.items() if topic.startswith(self._prefix)]
        if own_ids:
            verdicts = self._ball.cancel(ids=own_ids)
        elif not pending:
            # Without a prefix, all messages with the key are meant. With one, none is pending in any virtual host, so
            # this cancels nothing, and only tells the outcome of an earlier message.
            verdicts = self._ball.cancel(key=key)
        last = verdicts[-1] if verdicts else None
        settled = next((verdict for verdict in verdicts if verdict.verdict == "cancelled"), last)
        if settled is None:
            return Verdict(task_id, "not_found", None, None)
        return msgspec.structs.replace(settled, subject=task_id)

    def _pending(self, key: str) -> dict[str, str]:
        """Find the pending messages with a key in all virtual hosts. Returns their topics by message id."""

        def page_after(page: str | None) -> Operation[Page[dict[str, Any]]]:
            target = path("messages", key=key, max=limits.LISTED_ROWS_MAX, page=page)
            return Operation(Request("GET", target), _page_of, is_repeatable=True)

        calls = self.link.calls
        listed = calls.network.drive(calls.read_pages(page_after))
        return {entry["id"]: entry["topic"] for entry in listed if entry.get("id")}

    def has_queue(self, queue: str) -> bool:
        """Check whether a durable queue exists, that is, whether the broker has its topic."""
        try:
            self._ball.queues(self.topic(queue))
        except NotFound:
            return False
        return True

    def size(self, queue: str) -> int:
        """Count the visible messages of a durable queue that were not acknowledged. Pending ones do not count."""
        return sum(self._lags(queue).values())

    def purge(self, queue: str) -> int:
        """Skip all messages of a durable queue. Pending tasks stay. Returns the number of skipped messages."""
        lags, (topic, group) = self._lags(queue), self._topic_and_group(queue)
        if lags:
            ends = {number: queue_range.max for number, queue_range in self._ball.queues(topic).items()}
            self._ball.commit(topic, group, ends)
        return sum(lags.values())

    def _lags(self, queue: str) -> dict[int, int]:
        """Count the messages after the group's offset in each queue of the topic. Empty without the topic."""
        topic, group = self._topic_and_group(queue)
        try:
            ranges, offsets = self._ball.queues(topic), self._ball.offsets(group, topic)
        except GroupNotFound:
            ranges, offsets = self._ball.queues(topic), {}
        except NotFound:
            return {}
        return {
            number: queue_range.max - max(queue_range.min, offsets.get(number, queue_range.min))
            for number, queue_range in ranges.items()
        }

    def _topic_and_group(self, queue: str) -> tuple[str, str]:
        """Find the topic and the group of a durable queue. Bound to a fanout exchange, it has the exchange's topic."""
        return self._groups.get(queue, self.topic(queue)), self.topic(queue)

    # ---- bindings and consumers -------------------------------------------------------------------------

    def bind(self, kind: str, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        """Bind a queue to an exchange, whose `kind` is direct, topic or fanout.

        A temporary queue receives the messages of the exchange from now on: by its routing key, by `pattern` (a regular
        expression for routing keys), or all. A durable queue is bound only to a fanout exchange. A direct exchange
        finds it by its name.
        """
        if self.is_temporary.get(queue):
            is_direct, key_pattern = kind == "direct", re.compile(pattern or "") if kind == "topic" else None
            source = TailSource(
                self.link.calls, self.exchange_topic(exchange), routing_key if is_direct else None,
                lambda key: key_pattern is None or key_pattern.match(key) is not None,
            )  # fmt: skip
            self._sources.setdefault(queue, []).append(source)
            if is_direct:
                self.link.subscribe(source)  # at once, because replies may come before the queue is consumed
        elif kind == "fanout":
            self._groups[queue] = self.exchange_topic(exchange)

    def consume(self, channel: TopicChannel, queue: str, no_ack: bool) -> None:
        """Begin to receive the messages of a queue."""
        if queue not in self._sources:
            if self.is_temporary.get(queue):
                self._sources[queue] = [self._reply_source(queue)]
            else:
                self._sources[queue] = [self._group_source(channel, queue)]
        self._consumers[queue] = _Consumer(channel, no_ack)
        for source in self._sources[queue]:
            self.link.subscribe(source)
        self.link.bell.ring()

    def _group_source(self, channel: TopicChannel, queue: str) -> GroupSource:
        """Create the source of a durable queue, with the prefetch count of the channel as its credit."""
        topic, group = self._topic_and_group(queue)
        # A new queue of a fanout exchange gets only later messages, as in other brokers.
        start: Literal["latest", "earliest"] = "latest" if queue in self._groups else "earliest"
        return GroupSource(self.link.calls, topic, group, _credit(channel), self._lease_ms, start)

    def begin_replies(self, queue: str) -> None:
        """Store the position at which the replies to a temporary queue begin, when it is first declared here."""
        if self.is_temporary.get(queue) and self._begin_key(queue) not in _BEGINS:
            source = self._reply_source(queue)
            source.read()
            source.close()
            _BEGINS[self._begin_key(queue)] = source.position

    def _reply_source(self, queue: str) -> TailSource:
        """Create the source of the messages that are sent to a temporary queue by its name."""
        topic, begin = self.exchange_topic(""), _BEGINS.get(self._begin_key(queue), "")
        return TailSource(self.link.calls, topic, queue, lambda _: True, begin)

    def _begin_key(self, queue: str) -> tuple[str, str, str]:
        return self._endpoint, self.exchange_topic(""), queue

    def stop_consuming(self, queue: str) -> None:
        """Receive no more messages of a queue. Messages that wait here are given back."""
        self._consumers.pop(queue, None)
        for source in self._sources.get(queue, ()):
            self.link.unsubscribe(source)
            if isinstance(source, TailSource) and source.topic == self.exchange_topic(""):
                _BEGINS[self._begin_key(queue)] = source.position
        if not self.is_temporary.get(queue):
            self._sources.pop(queue, None)

    def delete(self, queue: str) -> None:
        """Delete a temporary queue, or purge a durable one."""
        if self.is_temporary.pop(queue, None):
            self.stop_consuming(queue)
            for source in self._sources.pop(queue, ()):
                self.link.unsubscribe(source)
        else:
            self.purge(queue)

    def change_credit(self, channel: TopicChannel) -> None:
        """Replace the sources of a channel whose prefetch count has changed, because a stream keeps its credit."""
        for queue, consumer in self._consumers.items():
            sources = self._sources.get(queue, [])
            is_changed = any(
                isinstance(source, GroupSource) and source.credit != _credit(channel) for source in sources
            )
            if consumer.channel is channel and is_changed:
                self._replace_sources(queue, [self._group_source(channel, queue)])

    def _replace_sources(self, queue: str, sources: list[Source]) -> None:
        """Receive a queue from these sources. Messages of the old ones that wait here are given back."""
        old, self._sources[queue] = self._sources.get(queue, []), sources
        self.link.replace(old, sources)

    # ---- hand messages over -----------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / 1e9

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Hand one message over to its callback. Raises TimeoutError if none comes within `timeout` seconds."""
        give_up_s = None if timeout is None else self._now_s() + timeout
        while True:
            self.link.bell.silence()
            if self._hand_over(1):
                return
            remaining_s = FULL_S if give_up_s is None else give_up_s - self._now_s()
            if remaining_s <= 0:
                raise TimeoutError
            self.link.bell.wait(min(remaining_s, FULL_S))
            self._check_places()

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Hand messages over in the turns of an event loop."""
        self._loop = loop
        loop.add_reader(self.link.bell.descriptor, self._on_readable)
        self._check = loop.call_later(CHECK_S, self._check_again)

    def _on_readable(self) -> None:
        """Hand messages over, because the link has received something. Called by the event loop."""
        self.link.bell.silence()
        self._hand_over(None)

    def _check_again(self) -> None:
        """Check the consumers regularly. Called by the event loop, and plans its next call."""
        if self._loop is not None:
            is_full = False
            try:
                is_full = self._check_places()
            finally:
                # Worker threads cannot wake the loop for an acknowledgement, so it looks often while it is full.
                self._check = self._loop.call_later(FULL_CHECK_S if is_full else CHECK_S, self._check_again)

    def _hand_over(self, messages_max: int | None) -> int:
        """Hand messages of all queues in turn over to their callbacks, for TURN_S at most. Returns their number.

        `messages_max`: stop after this many messages; None: no limit.
        """
        count, end_s, is_done = 0, self._now_s() + TURN_S, False
        while not is_done:
            is_done = True
            for queue, consumer in list(self._consumers.items()):
                payload = self._take(queue) if queue in self._callbacks and consumer.has_place else None
                if payload is None:
                    continue
                self._callbacks[queue](payload)
                if consumer.no_ack:
                    self.answer(payload["properties"]["delivery_tag"], "ack")
                count, is_done = count + 1, False
                if count == messages_max or self._now_s() > end_s:
                    self.link.bell.ring()  # there may be more
                    return count
        return count

    def get(self, queue: str) -> dict[str, Any] | None:
        """Take one message of a queue that has no consumer. Returns kombu's payload, or None if there is no message."""
        if self._sources.get(queue) or self.is_temporary.get(queue):
            return self._take(queue)
        topic, group = self._topic_and_group(queue)
        try:
            pulled = self._ball.pull(topic, group, max_messages=1, wait=0, lease=f"{self._lease_ms}ms")
        except NotFound:
            return None
        if not pulled:
            return None
        self.link.hold(pulled[0])
        return self._payload_of(pulled[0])

    def _take(self, queue: str) -> dict[str, Any] | None:
        """Take the next received message of a queue. Returns kombu's payload, or None if there is no message."""
        for source in self._sources.get(queue, ()):
            while source.received:
                item = source.received.popleft()
                payload = self._payload_of(item) if isinstance(item, Message) else item
                if payload is not None:
                    return payload
        return None

    def _payload_of(self, message: Message) -> dict[str, Any] | None:
        """Build kombu's payload of a leased message. None if it is none of kombu's: then it becomes a dead letter."""
        delivery_tag = uuid()  # a repeated delivery has its own
        payload = messages.leased_payload(message, delivery_tag)
        if payload is None:
            self.link.settle("dead_letter", message)
        else:
            self._unanswered[delivery_tag] = message
        return payload

    def answer(self, delivery_tag: str, answer: Answer) -> None:
        """Answer for a message. Messages of live tails need no answer."""
        message = self._unanswered.pop(delivery_tag, None)
        if message is not None:
            self.link.settle(answer, message)
        if any(source.received for sources in self._sources.values() for source in sources):
            self.link.bell.ring()  # received messages wait, and the answer may have made room for one of them

    def _check_places(self) -> bool:
        """Pause consumers whose messages have waited for FULL_S at the prefetch limit, and resume those below it.

        A pause gives the waiting messages back, so that other workers get them. Returns True if a consumer is at its
        limit.
        """
        now_s, is_full = self._now_s(), False
        for queue, consumer in list(self._consumers.items()):
            sources = self._sources.get(queue, [])
            if consumer.has_place:
                consumer.full_since_s = None
                if consumer.is_paused:
                    consumer.is_paused = False
                    self._replace_sources(queue, [self._group_source(consumer.channel, queue)])
                continue
            is_full = True
            is_waiting = any(isinstance(source, GroupSource) and source.received for source in sources)
            if is_waiting and consumer.full_since_s is None:
                consumer.full_since_s = now_s
            if is_waiting and consumer.full_since_s is not None and now_s - consumer.full_since_s >= FULL_S:
                consumer.is_paused = True
                self._replace_sources(queue, [])
        return is_full


def _credit(channel: TopicChannel) -> int:
    return min(channel.qos.prefetch_count or CREDIT, limits.CREDIT_ROWS_MAX)


def _page_of(data: bytes) -> Page[dict[str, Any]]:
    """Decode a page of pending messages."""
    listed = msgspec.json.decode(data)
    return listed["messages"], listed.get("next_page")


def _endpoint_of(client: Any) -> str:
    """Build the endpoint of kombu's Connection from all of its URLs, so that each node of a cluster can answer."""
    addresses = [
        f"{_bracketed(parts.hostname or '127.0.0.1')}:{parts.port or DEFAULT_PORT}"
        for parts in (url_to_parts(url) for url in client.alt)
    ] or [f"{_bracketed(client.hostname or '127.0.0.1')}:{client.port or DEFAULT_PORT}"]
    return f"{'https' if client.ssl else 'http'}://{','.join(addresses)}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _tls_roots(ssl: Any) -> bytes | None:
    """Read the certificates of `broker_use_ssl={"ca_certs": path}`. None for True: those of the system.

    Raises RequestError if the file cannot be read.
    """
    path = ssl.get("ca_certs") or ssl.get("ssl_ca_certs") if isinstance(ssl, Mapping) else None
    return None if path is None else read_roots(str(path), "ca_certs")
