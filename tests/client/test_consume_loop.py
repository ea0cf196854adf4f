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
    """The part of a message that the loop reads: nothing."""


class Group:
    """Records the calls of a group member to the broker."""

    def __init__(self) -> None:
        self.acked: list[Message] = []
        self.back: list[tuple[Message, bool]] = []
        self.renewed: list[Message] = []
        self.lost: set[Message] = set()

    async def ack_async(self, messages: list[Message]) -> None:
        self.acked += messages

    async def give_back_async(self, messages: list[Message]) -> None:
        self.back += [(message, False) for message in messages]

    async def change_async(self, messages: list[Message], lease_ms: int, *, counts: bool) -> list[bool]:
        if lease_ms == 0:
            self.back += [(message, counts) for message in messages]
        else:
            self.renewed += messages
        return [message not in self.lost for message in messages]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000_000)


class Feed:
    """Messages that arrive read by read. An empty read takes its whole wait. `unread` are returned at the end."""

    def __init__(self, clock: ManualClock, reads: list[list[Message]], ack_rows: int) -> None:
        self._clock, self._reads, self.ack_rows = clock, reads, ack_rows
        self.unread: list[Message] = []
        self.waits_ms: list[int] = []

    async def read(self, wait_ms: int) -> list[Message]:
        self.waits_ms.append(wait_ms)
        found = self._reads.pop(0) if self._reads else []
        if not found:
            self._clock.advance(wait_ms)
        return found

    async def close(self) -> list[Message]:
        unread, self.unread = self.unread, []
        return unread


def loop_over(clock: ManualClock, group: Group, reads: list[list[Message]], **options: Any) -> ConsumeLoop:
    feed = Feed(clock, reads, 256)
    return ConsumeLoop(group, clock, feed, **{"lease": "60s", **options})  # type: ignore[arg-type]


def test_a_message_is_dealt_with_when_the_next_one_is_asked_for(clock: ManualClock) -> None:
    first, second = Message(), Message()
    group = Group()
    loop = loop_over(clock, group, [[first, second]])
    assert loop.next() is None, "nothing is there, and next asks no broker"
    run(loop.work())
    assert loop.next() is first and group.acked == []
    assert loop.next() is second and group.acked == []
    assert loop.next() is None
    run(loop.work())  # waits a moment for another one
    assert group.acked == []
    run(loop.work())
    assert group.acked == [first, second]


def test_it_acknowledges_once_a_second_while_messages_wait(clock: ManualClock) -> None:
    messages = [Message() for _ in range(4)]
    group = Group()
    loop = loop_over(clock, group, [list(messages)])
    run(loop.work())
    assert loop.next() is messages[0]
    clock.advance(1_000)
    assert loop.next() is None, "it is time to acknowledge"
    run(loop.work())
    assert group.acked == messages[:1] and loop.next() is messages[1]


def test_leases_are_renewed_at_half_their_time_and_what_was_lost_is_not_handed_out(
    clock: ManualClock,
) -> None:
    first, lost, kept = Message(), Message(), Message()
    group = Group()
    group.lost.add(lost)
    loop = loop_over(clock, group, [[first, lost, kept]])
    run(loop.work())
    assert loop.next() is first
    clock.advance(30_000)
    assert loop.next() is None
    run(loop.work())
    assert group.renewed == [lost, kept] and loop.next() is kept


def test_the_end_gives_back_the_last_message_counted_and_the_others_uncounted(clock: ManualClock) -> None:
    first, second, third = Message(), Message(), Message()
    group = Group()
    loop = loop_over(clock, group, [[first, second, third]])
    run(loop.work())
    assert (loop.next(), loop.next()) == (first, second)
    for _ in range(2):  # the second end finds nothing left
        run(loop.end())
        assert group.acked == [first] and group.back == [(second, True), (third, False)]


def test_it_is_over_when_nothing_has_come_for_so_long_or_it_was_stopped(clock: ManualClock) -> None:
    loop = loop_over(clock, Group(), [[Message()]], idle="5s")
    turns = 0
    while not loop.is_over:
        if loop.next() is None:
            run(loop.work())
        turns += 1
    assert turns == 5  # reads one, hands it out, waits a moment, waits five seconds, is over
    stop = threading.Event()
    stopped = loop_over(clock, Group(), [[Message()]], stop=stop)
    run(stopped.work())
    stop.set()
    assert stopped.is_over and stopped.next() is None


def stream_over(clock: ManualClock, group: Group, feed: Feed) -> ConsumeLoop:
    return ConsumeLoop(group, clock, feed, lease="60s")  # type: ignore[arg-type]


def test_a_stream_gets_credit_when_half_of_it_is_used(clock: ManualClock) -> None:
    messages = [Message() for _ in range(5)]
    group, feed = Group(), Feed(clock, [list(messages)], ack_rows=2)
    loop = stream_over(clock, group, feed)
    run(loop.work())
    assert [loop.next(), loop.next()] == messages[:2] and group.acked == []
    assert loop.next() is None, "two are dealt with, so it is time to acknowledge"
    run(loop.work())
    assert group.acked == messages[:2] and loop.next() is messages[2]


def test_while_a_stream_flows_messages_are_acknowledged_together(clock: ManualClock) -> None:
    first, second = Message(), Message()
    group, feed = Group(), Feed(clock, [[first], [second]], ack_rows=8)
    loop = stream_over(clock, group, feed)
    for message in (first, second):
        run(loop.work())
        assert loop.next() is message
        assert loop.next() is None and group.acked == []
    run(loop.work())  # waits a moment for another one
    assert group.acked == [] and feed.waits_ms[-1] < 1_000
    run(loop.work())
    assert group.acked == [first, second] and feed.waits_ms[-1] == 10_000


def test_the_end_gives_back_what_a_stream_had_sent(clock: ManualClock) -> None:
    first, unread = Message(), Message()
    group, feed = Group(), Feed(clock, [[first]], ack_rows=8)
    loop = stream_over(clock, group, feed)
    run(loop.work())
    assert loop.next() is first
    feed.unread.append(unread)
    run(loop.end())
    assert group.back == [(first, True), (unread, False)]


def test_leases_of_a_stream_count_from_before_its_messages_are_read(clock: ManualClock) -> None:
    """A slow handler leaves the next messages in the stream, where their leases run."""
    first, second = Message(), Message()
    group, feed = Group(), Feed(clock, [[first], [second]], ack_rows=8)
    loop = stream_over(clock, group, feed)
    run(loop.work())
    assert loop.next() is first
    clock.advance(30_000)  # the second one may have arrived at the beginning
    assert loop.next() is None
    while (message := loop.next()) is None:
        run(loop.work())
    assert message is second and group.renewed == [second]


def test_an_empty_read_of_a_stream_shows_that_no_lease_runs(clock: ManualClock) -> None:
    message = Message()
    group, feed = Group(), Feed(clock, [[], [], [], [], [message]], ack_rows=8)
    loop = stream_over(clock, group, feed)
    for _ in range(5):
        run(loop.work())
    assert loop.next() is message and group.renewed == []


def test_a_stream_is_read_while_its_messages_are_handled(clock: ManualClock) -> None:
    """Unread messages would make the broker end the stream, and some would be lost until their leases end."""
    messages = [Message() for _ in range(4)]
    group, feed = Group(), Feed(clock, [messages[:2], messages[2:3], messages[3:]], ack_rows=8)
    loop = stream_over(clock, group, feed)
    run(loop.work())
    assert loop.next() is messages[0]
    clock.advance(1_000)
    assert loop.next() is None
    run(loop.work())
    assert group.acked == messages[:1]
    run(loop.end())
    assert group.back == [(messages[1], False), (messages[2], False)]


def test_a_renewal_reads_a_stream_until_it_is_empty(clock: ManualClock) -> None:
    messages = [Message() for _ in range(4)]
    group, feed = Group(), Feed(clock, [[message] for message in messages], ack_rows=8)
    feed._reads[0] = messages[:2]
    del feed._reads[1]
    loop = stream_over(clock, group, feed)
    run(loop.work())
    assert loop.next() is messages[0]
    clock.advance(30_000)
    assert loop.next() is None
    run(loop.work())
    assert group.renewed == messages[1:]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_loop_is_over_in_a_child_process_and_answers_for_nothing(clock: ManualClock) -> None:
    """The parent process still has the loop, and the message that it processes."""
    first, second = Message(), Message()
    group = Group()
    loop = loop_over(clock, group, [[first, second]])
    run(loop.work())
    assert loop.next() is first and not loop.is_over
    if not (child := os.fork()):
        run(loop.end())
        os._exit(0 if loop.is_over and loop.next() is None and group.back == [] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not loop.is_over and loop.next() is second
