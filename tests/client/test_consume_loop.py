"""The loop behind `consume`, step by step: `next` never waits, `work` runs the tasks due before the next message."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from timeball.client.consumer import ConsumeLoop
from timeball.client.network import run
from timeball.io.clock import ManualClock


class Message:
    """A message of which the loop reads no attribute."""


class RecordingConsumer:
    """Records the answers that the loop would send to the broker. The leases of messages in `lost` have ended."""

    def __init__(self) -> None:
        self.acknowledged: list[Message] = []
        self.given_back: list[tuple[Message, bool]] = []  # each with whether the attempt counts
        self.renewed: list[Message] = []
        self.lost: set[Message] = set()

    async def ack_async(self, messages: list[Message]) -> None:
        self.acknowledged += messages

    async def give_back_async(self, messages: list[Message]) -> None:
        self.given_back += [(message, False) for message in messages]

    async def change_async(self, messages: list[Message], lease_ms: int, *, counts: bool) -> list[bool]:
        """Record renewals, and messages that are given back with `lease_ms` 0. Returns which leases had not ended."""
        if lease_ms == 0:
            self.given_back += [(message, counts) for message in messages]
        else:
            self.renewed += messages
        return [message not in self.lost for message in messages]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000_000)


class Feed:
    """A feed whose n-th read returns the n-th list of `reads`. `close` returns the messages in `unread`.

    A read without messages takes its whole wait by the clock.
    """

    def __init__(self, clock: ManualClock, reads: list[list[Message]], ack_rows: int) -> None:
        self._clock, self._reads, self.ack_rows = clock, reads, ack_rows
        self.unread: list[Message] = []
        self.waits_ms: list[int] = []

    async def read(self, wait_ms: int) -> list[Message]:
        """Return the next messages. Records the wait, which an empty read uses up."""
        self.waits_ms.append(wait_ms)
        messages = self._reads.pop(0) if self._reads else []
        if not messages:
            self._clock.advance(wait_ms)
        return messages

    async def close(self) -> list[Message]:
        unread, self.unread = self.unread, []
        return unread


def make_loop(
    clock: ManualClock, consumer: RecordingConsumer, reads: list[list[Message]], **options: Any
) -> ConsumeLoop:
    """A loop over these reads, with a credit so large that it never makes the loop acknowledge."""
    feed = Feed(clock, reads, 256)
    return ConsumeLoop(consumer, clock, feed, **{"lease": "60s", **options})  # type: ignore[arg-type]


def test_a_message_is_acknowledged_after_the_program_has_asked_for_the_next_one(clock: ManualClock) -> None:
    first, second = Message(), Message()
    consumer = RecordingConsumer()
    loop = make_loop(clock, consumer, [[first, second]])
    assert loop.next() is None, "no message is queued, and `next` does not ask the broker"
    run(loop.work())
    assert loop.next() is first and consumer.acknowledged == []
    assert loop.next() is second and consumer.acknowledged == []
    assert loop.next() is None
    run(loop.work())  # waits for ACK_PAUSE_MS for further messages
    assert consumer.acknowledged == []
    run(loop.work())
    assert consumer.acknowledged == [first, second]


def test_processed_messages_are_acknowledged_once_a_second_while_others_are_queued(
    clock: ManualClock,
) -> None:
    messages = [Message() for _ in range(4)]
    consumer = RecordingConsumer()
    loop = make_loop(clock, consumer, [list(messages)])
    run(loop.work())
    assert loop.next() is messages[0]
    clock.advance(1_000)
    assert loop.next() is None, "the loop must acknowledge first"
    run(loop.work())
    assert consumer.acknowledged == messages[:1] and loop.next() is messages[1]


def test_leases_of_queued_messages_are_renewed_at_half_time_and_lost_messages_are_skipped(
    clock: ManualClock,
) -> None:
    first, lost, third = Message(), Message(), Message()
    consumer = RecordingConsumer()
    consumer.lost.add(lost)
    loop = make_loop(clock, consumer, [[first, lost, third]])
    run(loop.work())
    assert loop.next() is first
    clock.advance(30_000)
    assert loop.next() is None
    run(loop.work())
    assert consumer.renewed == [lost, third] and loop.next() is third


def test_the_end_gives_back_the_current_message_with_an_attempt_and_the_others_without(
    clock: ManualClock,
) -> None:
    first, second, third = Message(), Message(), Message()
    consumer = RecordingConsumer()
    loop = make_loop(clock, consumer, [[first, second, third]])
    run(loop.work())
    assert (loop.next(), loop.next()) == (first, second)
    for _ in range(2):  # the second call of `end` has nothing to answer
        run(loop.end())
        assert consumer.acknowledged == [first] and consumer.given_back == [(second, True), (third, False)]


def test_a_loop_is_over_after_its_idle_time(clock: ManualClock) -> None:
    loop = make_loop(clock, RecordingConsumer(), [[Message()]], idle="5s")
    turns = (
        0  # five: read a message, hand it out, wait for ACK_PAUSE_MS, wait for 5 s, and find the loop over
    )
    while not loop.is_over:
        if loop.next() is None:
            run(loop.work())
        turns += 1
    assert turns == 5


def test_a_loop_that_is_stopped_is_over_and_hands_out_no_queued_message(clock: ManualClock) -> None:
    stop = threading.Event()
    loop = make_loop(clock, RecordingConsumer(), [[Message()]], stop=stop)
    run(loop.work())
    stop.set()
    assert loop.is_over and loop.next() is None


def make_loop_over(clock: ManualClock, consumer: RecordingConsumer, feed: Feed) -> ConsumeLoop:
    """A loop over this feed, with leases of 60 s."""
    return ConsumeLoop(consumer, clock, feed, lease="60s")  # type: ignore[arg-type]


def test_messages_are_acknowledged_when_half_of_the_credit_is_used(clock: ManualClock) -> None:
    messages = [Message() for _ in range(5)]
    consumer, feed = RecordingConsumer(), Feed(clock, [list(messages)], ack_rows=2)
    loop = make_loop_over(clock, consumer, feed)
    run(loop.work())
    assert [loop.next(), loop.next()] == messages[:2] and consumer.acknowledged == []
    assert loop.next() is None, (
        "two messages are processed, which is `ack_rows`, so the loop must acknowledge"
    )
    run(loop.work())
    assert consumer.acknowledged == messages[:2] and loop.next() is messages[2]


def test_messages_that_come_one_by_one_are_acknowledged_together_after_a_pause(clock: ManualClock) -> None:
    first, second = Message(), Message()
    consumer, feed = RecordingConsumer(), Feed(clock, [[first], [second]], ack_rows=8)
    loop = make_loop_over(clock, consumer, feed)
    for message in (first, second):
        run(loop.work())
        assert loop.next() is message
        assert loop.next() is None and consumer.acknowledged == []
    run(loop.work())  # waits for ACK_PAUSE_MS for further messages
    assert consumer.acknowledged == [] and feed.waits_ms[-1] < 1_000
    run(loop.work())
    assert consumer.acknowledged == [first, second] and feed.waits_ms[-1] == 10_000


def test_the_end_gives_back_messages_that_the_stream_had_sent(clock: ManualClock) -> None:
    first, unread = Message(), Message()
    consumer, feed = RecordingConsumer(), Feed(clock, [[first]], ack_rows=8)
    loop = make_loop_over(clock, consumer, feed)
    run(loop.work())
    assert loop.next() is first
    feed.unread.append(unread)
    run(loop.end())
    assert consumer.given_back == [(first, True), (unread, False)]


def test_a_message_that_waited_in_the_stream_is_renewed_before_it_is_handed_out(clock: ManualClock) -> None:
    """A slow handler leaves the next messages in the stream, where their leases run."""
    first, second = Message(), Message()
    consumer, feed = RecordingConsumer(), Feed(clock, [[first], [second]], ack_rows=8)
    loop = make_loop_over(clock, consumer, feed)
    run(loop.work())
    assert loop.next() is first
    clock.advance(30_000)  # half of a lease: the second message may be as old as this
    assert loop.next() is None
    while (message := loop.next()) is None:
        run(loop.work())
    assert message is second and consumer.renewed == [second]


def test_after_an_empty_read_a_new_message_is_not_renewed(clock: ManualClock) -> None:
    message = Message()
    consumer, feed = RecordingConsumer(), Feed(clock, [[], [], [], [], [message]], ack_rows=8)
    loop = make_loop_over(clock, consumer, feed)
    for _ in range(5):
        run(loop.work())
    assert loop.next() is message and consumer.renewed == []


def test_an_acknowledgement_reads_the_stream_although_messages_are_queued(clock: ManualClock) -> None:
    """Unread messages would make the broker end the stream, and some would be lost until their leases end."""
    messages = [Message() for _ in range(4)]
    consumer, feed = RecordingConsumer(), Feed(clock, [messages[:2], messages[2:3], messages[3:]], ack_rows=8)
    loop = make_loop_over(clock, consumer, feed)
    run(loop.work())
    assert loop.next() is messages[0]
    clock.advance(1_000)
    assert loop.next() is None
    run(loop.work())
    assert consumer.acknowledged == messages[:1]
    run(loop.end())
    assert consumer.given_back == [(messages[1], False), (messages[2], False)]


def test_a_renewal_covers_all_messages_in_the_stream(clock: ManualClock) -> None:
    messages = [Message() for _ in range(4)]
    consumer, feed = (
        RecordingConsumer(),
        Feed(clock, [messages[:2], [messages[2]], [messages[3]]], ack_rows=8),
    )
    loop = make_loop_over(clock, consumer, feed)
    run(loop.work())
    assert loop.next() is messages[0]
    clock.advance(30_000)
    assert loop.next() is None
    run(loop.work())
    assert consumer.renewed == messages[1:]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_in_a_forked_child_a_loop_is_over_and_its_end_answers_for_no_message(clock: ManualClock) -> None:
    """The parent process still has the loop and processes its message, so a child must not answer for it."""
    first, second = Message(), Message()
    consumer = RecordingConsumer()
    loop = make_loop(clock, consumer, [[first, second]])
    run(loop.work())
    assert loop.next() is first and not loop.is_over
    if not (child := os.fork()):
        run(loop.end())
        os._exit(0 if loop.is_over and loop.next() is None and consumer.given_back == [] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not loop.is_over and loop.next() is second
