"""The thread of a transport: it receives messages, answers for them, and renews their leases.

The transport's own thread may run a task for hours (the solo pool), and must not wait for a broker that restarts. So
all calls of consuming are made here. The two threads exchange messages by deques, and wake each other by a byte in a
socket, which an event loop can watch.

    sources      streams of groups and live tails; messages wait in `received` until the transport takes them
    answers      of the transport, collected by `settle` and sent together
    renewals     LEASE_PARTS in the time of a lease

While no broker answers, sources are opened again and answers are repeated every RETRY_S. Leases are in the broker's
log, so a task that runs meanwhile is acknowledged afterwards and does not run twice.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal

import msgspec

from timeball.client.celery.messages import payload_of, requeue_delay_ms
from timeball.client.consumer import Consumer, Start, build_request
from timeball.client.http_calls import HttpCalls, MessageStream
from timeball.client.http_codec import create_topic, path
from timeball.client.http_connection import Connection, Request
from timeball.client.messages import Member, Message
from timeball.io.clock import SystemClock
from timeball.model.errors import NotFound, OverLimit, TimeballError, Unavailable

logger = logging.getLogger(__name__)

LEASE_PARTS = 3  # leases are renewed after a third of their time
RETRY_S = 1.0
CLOSED_S = 0.1  # after this time a source that has ended is opened again
SILENCE_S = 60.0  # after this time a silent tail has ended: the broker writes a comment every 15 s
BEGIN_S = 10.0  # longest wait for the first event of a live tail, which has its position
END_S = 10.0  # longest wait for the last answers

Answer = Literal["ack", "nack", "dead_letter", "give_back"]
Item = Message | dict[str, Any]  # a leased message, or the payload of one from a live tail


# ---- sources --------------------------------------------------------------------------------------------------


class GroupSource:
    """The messages of a topic for a group. At most `credit` of them are leased at a time."""

    def __init__(
        self, calls: HttpCalls, topic: str, group: str, credit: int, lease_ms: int, start: Start = "earliest"
    ) -> None:
        """Build the request of a stream, which is opened later. A new group begins at `start`.

        Raises RequestError for a wrong lease.
        """
        request = build_request(topic, group, 1, 0, start, f"{lease_ms}ms")
        self.credit, self.received = credit, deque[Item]()
        self._stream = MessageStream(calls, request, credit, None)
        self._member, self._clock = Member(calls, topic, group), SystemClock()

    @property
    def descriptor(self) -> int | None:
        """The file descriptor of the socket, for a poll. None while the stream is not open."""
        return self._stream.descriptor

    def read(self) -> Sequence[Item]:
        """Return the messages that have come, without waiting. Opens the stream if needed. Raises TimeballError."""
        return self._messages(self._stream.read(0))

    def close(self) -> list[Message]:
        """End the stream. Returns the messages that came after the last read."""
        return self._messages(self._stream.close())

    def _messages(self, rows: Iterable[Any]) -> list[Message]:
        now_ms = self._clock.wall_ms()
        return [Message(row, now_ms, self._member) for row in rows]


class _Event(msgspec.Struct):
    """The data of an event of a live tail: a visible message. Other fields are ignored."""

    id: str | None = None
    body: str | None = None
    properties: dict[str, str] = {}


class TailSource:
    """The messages that become visible in a topic from now on, as server-sent events. Each reader gets all of them.

    Nothing is leased. After an interruption, reading continues after the last event.
    """

    def __init__(
        self,
        calls: HttpCalls,
        topic: str,
        tag: str | None,
        is_wanted: Callable[[str], bool],
        position: str = "",
    ) -> None:
        """Select messages by their tag, and by `is_wanted`, a function of the routing key.

        `position` is the id of the event after which to begin, or "" for the end of the topic.
        """
        self.received = deque[Item]()
        self._calls, self.topic, self._is_wanted = calls, topic, is_wanted
        self._target = path("topics", topic, "events", tag=tag)
        self._clock = SystemClock()
        self._connection: Connection | None = None
        self.position = position  # the id of the last event
        self._partial_event = b""  # the bytes after the last complete event
        self._received_ns = 0  # when the last bytes came

    @property
    def descriptor(self) -> int | None:
        """The file descriptor of the socket, for a poll. None while the tail is not open."""
        return None if self._connection is None else self._connection.descriptor

    def read(self) -> Sequence[Item]:
        """Return kombu's payloads that have come. Opens the tail if it has ended. Raises TimeballError.

        The first read waits up to BEGIN_S for an event, which contains the position.
        """
        if self._connection is None:
            self._open()
        payloads: list[dict[str, Any]] = []
        wait_s = 0.0 if self.position else BEGIN_S
        while (data := self._read(wait_s)) is not None:
            payloads += self._take_events(data)
            wait_s = 0.0
        return payloads

    def close(self) -> list[Message]:
        """End the tail. Returns no messages, because nothing is leased."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        return []

    def _open(self) -> None:
        """Open the tail after its position. Creates the topic if it does not exist. Raises TimeballError."""
        headers = (("last-event-id", self.position),) if self.position else ()
        request = Request("GET", self._target, headers=headers)
        try:
            self._connection = self._calls.open(request, None)
        except NotFound:  # a message creates a topic, and a reader does not
            self._calls.run(create_topic(self.topic, 1))
            self._connection = self._calls.open(request, None)
        self._partial_event, self._received_ns = b"", self._clock.monotonic_ns()

    def _read(self, wait_s: float) -> bytes | None:
        """Read bytes. Returns None if none come within `wait_s`, or if the tail has ended, which is then closed."""
        assert self._connection is not None
        try:
            data = self._connection.read(wait_s)
        except Unavailable:
            data = None
        now_ns = self._clock.monotonic_ns()
        if data:
            self._received_ns = now_ns
            return data
        if data is None or now_ns - self._received_ns > SILENCE_S * 1e9:
            self.close()
        return None

    def _take_events(self, data: bytes) -> list[dict[str, Any]]:
        """Decode the complete events of `data` and of the bytes before it. Returns the payloads that are wanted."""
        *events, self._partial_event = (self._partial_event + data).split(b"\n\n")
        payloads = []
        for event in events:
            fields = dict(line.split(b": ", 1) for line in event.split(b"\n") if b": " in line)
            if b"id" in fields:
                self.position = fields[b"id"].decode()
            message = msgspec.json.decode(fields[b"data"], type=_Event) if b"data" in fields else _Event()
            if message.body is None:
                continue
            payload = payload_of(message.body.encode(), message.id, message.properties)
            if payload is None:
                continue
            info = payload["properties"].get("delivery_info") or {}
            if self._is_wanted(str(info.get("routing_key", ""))):
                payloads.append(payload)
        return payloads


Source = GroupSource | TailSource


# ---- the thread -----------------------------------------------------------------------------------------------


class Link:
    """The thread of a transport. The methods without an underscore are called by the transport's own thread.

    In a child process after a fork they do nothing, because the sources and the leases belong to the parent.
    """

    def __init__(self, calls: HttpCalls, lease_ms: int) -> None:
        self.calls, self.lease_ms = calls, lease_ms
        self._clock, self._pid = SystemClock(), os.getpid()
        self._consumer = Consumer(calls, self._clock)
        self._to_transport: _Bell | None = None  # by which this thread wakes the transport
        self._to_thread: _Bell | None = None  # by which the transport wakes this thread
        self._is_closed = False
        self._commands: deque[Callable[[], None]] = deque()  # for the thread to run
        self._answers: deque[tuple[Answer, Message]] = deque()  # for the thread to send
        self._thread: threading.Thread | None = None
        # Used by the thread alone:
        self._sources: list[Source] = []
        self._held: set[Message] = set()  # leased, and not answered
        self._renew_ns = 0  # when the leases of `_held` must be renewed
        self._retry_ns = 0  # no call to the broker is made before this time
        self._is_over = False

    # ---- for the transport ------------------------------------------------------------------------------

    @property
    def is_inherited(self) -> bool:
        """True in a child process after a fork."""
        return self._pid != os.getpid()

    @property
    def bell(self) -> _Bell:
        """The bell that rings for the transport when a source has received something."""
        if self._to_transport is None:
            self._to_transport = _Bell()
        return self._to_transport

    def subscribe(self, source: Source) -> None:
        """Begin to receive from a source. Raises the error of the first try, after which the thread goes on trying."""
        self._run_in_thread(lambda: self._add(source))

    def replace(self, old: Sequence[Source], new: Sequence[Source]) -> None:
        """Let the thread receive from `new` instead of `old`. The transport must not take messages of `old` any more.

        Returns at once and raises no errors: running tasks, during which this is called, must outlive an outage.
        """
        self._add_command(lambda: self._replace(old, new))

    def unsubscribe(self, source: Source) -> None:
        """Stop receiving from a source, and give back the messages that the transport has not taken."""
        self._run_in_thread(lambda: self._remove(source))

    def hold(self, message: Message) -> None:
        """Renew the lease of a message that did not come from a source, until it is answered."""
        self._add_command(lambda: self._held.add(message))

    def settle(self, answer: Answer, message: Message) -> None:
        """Let the thread answer for a message."""
        self._answers.append((answer, message))
        self._add_command(None)

    def close(self) -> None:
        """Send the answers, give back all other messages, and end the thread.

        Raises Unavailable if the thread does not do this within the time limit of a call and END_S.
        """
        if self._thread is not None and not self.is_inherited:
            self._run_in_thread(self._finish)
            self._thread.join(END_S)
        self._is_closed = True
        for bell in (self._to_transport, self._to_thread):
            if bell is not None:
                bell.close()

    def _run_in_thread(self, command: Callable[[], None]) -> None:
        """Run a command in the thread, and wait for its end. Raises its error, and Unavailable if it takes too long.

        Does nothing in a child process after a fork, or if the link is closed.
        """
        if self.is_inherited or self._is_closed:
            return
        done: Future[None] = Future()

        def run() -> None:
            """Run the command in the thread, and pass its end or its error to the caller."""
            try:
                command()
                done.set_result(None)
            except Exception as error:  # the caller raises it
                done.set_exception(error)

        self._add_command(run)
        try:
            done.result(self.calls.timeout_ms / 1000 + END_S)
        except TimeoutError:
            raise Unavailable(f"{self.calls.endpoint} did not answer in time") from None

    def _add_command(self, command: Callable[[], None] | None) -> None:
        """Add a command for the thread, and wake it. None only wakes it. The first call starts the thread."""
        if self.is_inherited or self._is_closed:
            return
        if self._to_thread is None:
            self._to_thread = _Bell()
            self._thread = threading.Thread(
                target=self._run, args=(self._to_thread,), name="timeball-celery", daemon=True
            )
            self._thread.start()
        if command is not None:
            self._commands.append(command)
        self._to_thread.ring()

    # ---- the thread -------------------------------------------------------------------------------------

    def _run(self, bell: _Bell) -> None:
        """Run commands, send answers, renew leases and read sources, until `_finish`."""
        while not self._is_over:
            self._wait_for_work(bell)
            bell.silence()
            try:
                while self._commands:
                    self._commands.popleft()()
                if self._clock.monotonic_ns() >= self._retry_ns:
                    self._send_answers()
                    self._renew()
                    self._read()
            except (Unavailable, OverLimit) as error:
                logger.warning("broker not reached, trying again reason=%s", error)
                self._pause()
            except Exception:  # without this thread no lease would be renewed
                logger.exception("fault in the thread of the transport, trying again")
                self._pause()

    def _pause(self) -> None:
        """Make no call to the broker for RETRY_S."""
        self._retry_ns = self._clock.monotonic_ns() + int(RETRY_S * 1e9)

    def _wait_for_work(self, bell: _Bell) -> None:
        """Wait for the bell, for bytes of a source, or until the next renewal or retry."""
        now_ns = self._clock.monotonic_ns()
        poll = select.poll()
        poll.register(bell.descriptor, select.POLLIN)
        times_ns = [self._renew_ns] if self._held else []
        if self._retry_ns > now_ns:
            # The sources are not watched during a pause: bytes in them would end each poll at once.
            times_ns = [self._retry_ns]
        else:
            for source in self._sources:
                if source.descriptor is None:
                    times_ns.append(now_ns + int(CLOSED_S * 1e9))
                else:
                    poll.register(source.descriptor, select.POLLIN)
        poll.poll(max(0, min(times_ns) - now_ns) / 1e6 if times_ns else SILENCE_S * 1000)

    def _send_answers(self) -> None:
        """Send the queued answers, oldest first: consecutive acks, or consecutive give-backs, in one request.

        An answer that the broker refuses is logged and dropped. Raises Unavailable and OverLimit: the answers that are
        not sent stay queued.
        """
        while self._answers:
            answer, message = self._answers[0]
            messages = [message]
            for next_answer, next_message in list(self._answers)[1:]:
                if answer not in ("ack", "give_back") or next_answer != answer:
                    break
                messages.append(next_message)
            try:
                self._send_answer(answer, messages)
            except (Unavailable, OverLimit):
                raise
            except TimeballError as error:
                logger.warning("answer refused answer=%s messages=%d reason=%s", answer, len(messages), error)
            for message in messages:
                self._answers.popleft()
                self._held.discard(message)

    def _send_answer(self, answer: Answer, messages: list[Message]) -> None:
        """Send an answer: "ack" and "give_back" for several messages, the others for one. Raises TimeballError."""
        if answer == "ack":
            if (late := len(messages) - self._consumer.ack(messages)) > 0:
                logger.warning("tasks acknowledged after their leases, they run again tasks=%d", late)
        elif answer == "give_back":
            self._consumer.give_back(messages)
        elif answer == "nack":
            after_ms = requeue_delay_ms(messages[0].attempts)
            messages[0].nack(f"{after_ms}ms", reason="rejected with requeue")
        else:
            messages[0].dead_letter(reason="rejected")

    def _renew(self) -> None:
        """Renew the leases of all messages without an answer, if it is time. Raises TimeballError.

        A message whose lease has ended is no longer held. It is removed from its source, if it still waits there.
        """
        if not self._held or self._clock.monotonic_ns() < self._renew_ns:
            return
        held = list(self._held)
        self._consumer.change(held, self.lease_ms, counts=True)
        lost = [message for message in held if not message.is_leased]
        if lost:
            logger.warning("leases lost, the tasks run again tasks=%d", len(lost))
            self._held.difference_update(lost)
            for source in self._sources:
                for message in lost:
                    with suppress(ValueError):  # the transport may have taken it
                        source.received.remove(message)
        self._plan_renewal()

    def _plan_renewal(self) -> None:
        """Set the time of the next renewal."""
        self._renew_ns = self._clock.monotonic_ns() + self.lease_ms * 1_000_000 // LEASE_PARTS

    def _read(self) -> None:
        """Read the received bytes of all sources. Raises Unavailable if a source cannot be opened."""
        for source in self._sources:
            self._read_source(source)

    def _read_source(self, source: Source) -> None:
        """Read a source until it has no more bytes. Raises Unavailable and OverLimit, and logs other errors."""
        try:
            while items := source.read():
                self._take(source, items)
                if source.descriptor is None:
                    break  # it has ended, and is opened in the next turn
        except (Unavailable, OverLimit):
            raise
        except TimeballError as error:
            logger.error("not received, trying again reason=%s", error)
            self._pause()

    def _add(self, source: Source) -> None:
        """Begin to receive from a source. Raises the error of its first read."""
        if source in self._sources:
            return
        # Before the first try: kombu counts a consumer as begun even if this raises, and never begins it again.
        self._sources.append(source)
        self._take(source, source.read())

    def _replace(self, old: Sequence[Source], new: Sequence[Source]) -> None:
        self._sources.extend(new)  # opened in the next turn, like a source that has ended
        for source in old:
            self._remove(source)

    def _take(self, source: Source, items: Sequence[Item]) -> None:
        """Let the transport find the received items, and hold those that are leased."""
        if not self._held:
            self._plan_renewal()
        self._held.update(item for item in items if isinstance(item, Message))
        source.received.extend(items)
        self.bell.ring()

    def _remove(self, source: Source) -> None:
        """Stop receiving from a source, and collect the give-back of its messages as answers."""
        if source in self._sources:
            self._sources.remove(source)
            waiting = [item for item in source.received if isinstance(item, Message)]
            source.received.clear()
            self._answers.extend(("give_back", message) for message in [*waiting, *source.close()])

    def _finish(self) -> None:
        """End the sources, send the answers, and give back all other messages. Logs the error if that fails."""
        self._is_over = True
        for source in list(self._sources):
            self._remove(source)
        try:
            self._send_answers()
            self._consumer.give_back(self._held)
        except TimeballError as error:
            logger.warning("messages not given back, their leases end reason=%s", error)


class _Bell:
    """A byte in a socket, by which a thread wakes another one that waits in a poll."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    @property
    def descriptor(self) -> int:
        """The file descriptor that is readable after `ring`."""
        return self._receiver.fileno()

    def ring(self) -> None:
        """Wake the other thread."""
        try:
            self._sender.send(b"\0")
        except OSError:
            pass  # it rings already, or is closed

    def silence(self) -> None:
        """Make the descriptor unreadable until the next `ring`."""
        try:
            while self._receiver.recv(4096):
                pass
        except OSError:
            pass  # there are no more bytes, or the bell is closed

    def wait(self, timeout_s: float) -> None:
        """Wait for a ring."""
        poll = select.poll()
        poll.register(self._receiver, select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1000)

    def close(self) -> None:
        """Close both sockets."""
        self._receiver.close()
        self._sender.close()
