"""Gates: never more inside than allowed; and messages of requests: how many are received at once, for how long."""

import queue
import threading
from collections.abc import Iterator

import pytest

from timeball.clock import ManualClock
from timeball.errors import InvalidMessage, OverLimit
from timeball.protocols.flight.gate import READ_MS_MAX, Gate, RequestReads


def test_a_gate_refuses_at_its_limit_and_says_so() -> None:
    gate = Gate("calls", 2)
    with gate.enter():
        with gate.enter(), pytest.raises(OverLimit, match="2 calls are open"), gate.enter():
            pass
        with gate.enter():
            assert gate.inside == 2


def test_an_error_inside_gives_the_place_back() -> None:
    gate = Gate("calls", 1)
    with pytest.raises(ValueError, match="inside"), gate.enter():
        raise ValueError("inside")
    assert gate.inside == 0


class Client:
    """What grpcio gives a handler of a client: its messages, and a way to end the call."""

    def __init__(self, *messages: bytes) -> None:
        self.sent: queue.Queue[bytes | None] = queue.Queue()
        for message in messages:
            self.sent.put(message)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.sent.get, None)

    def cancel(self) -> None:
        self.sent.put(None)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def reads(clock: ManualClock) -> Iterator[RequestReads]:
    closing = threading.Event()
    yield RequestReads(clock, closing, reads_max=1)
    closing.set()


def test_a_message_is_read_and_decoded(reads: RequestReads) -> None:
    client = Client(b"17")
    assert reads.read(iter(client), client, int) == 17
    with pytest.raises(ValueError, match="invalid literal"):  # and the place is free again
        reads.read(iter(Client(b"x")), client, int)
    assert reads.read(iter(Client(b"18")), client, int) == 18


def test_one_more_than_there_are_places_is_told_so(
    reads: RequestReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timeball.protocols.flight.gate.WAIT_S", 0.01)
    slow, got = Client(), list[int]()
    first = threading.Thread(target=lambda: got.append(reads.read(iter(slow), slow, int)))
    first.start()
    while not reads._under_way:
        pass
    with pytest.raises(OverLimit, match="on their way"):
        reads.read(iter(Client(b"1")), slow, int)
    slow.sent.put(b"2")
    first.join()
    assert got == [2]
    assert reads.read(iter(Client(b"3")), slow, int) == 3


def test_a_message_that_takes_too_long_loses_its_call(reads: RequestReads, clock: ManualClock) -> None:
    slow, failed = Client(), list[BaseException]()

    def read() -> None:
        try:
            reads.read(iter(slow), slow, int)
        except InvalidMessage as error:
            failed.append(error)

    waiting = threading.Thread(target=read)
    waiting.start()
    while not reads._under_way:
        pass
    clock.advance(READ_MS_MAX)
    assert reads.cut_slow() == 0  # not yet
    clock.advance(1)
    reads.cut_slow()
    waiting.join()
    assert "too long" in str(failed[0])
    assert reads.read(iter(Client(b"4")), slow, int) == 4
