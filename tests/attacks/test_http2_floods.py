"""Known HTTP/2 floods from clients without an account, beside a steady stream whose calls must not fail.

Each flood is a sequence of frames with an end, sent repeatedly over new connections while the stream continues. The
bounds that stop them are those of src/timeball/edges/http2/connection.py.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import pytest
from tests.attacks.beside import AttackedBroker, attacked_broker, steady_stream
from tests.edges.http2.raw_client import RawClient, fields
from tests.rounds import rounds

from timeball.edges.http2 import frames
from timeball.edges.http2.connection import CALLS_PER_CONNECTION_MAX
from timeball.edges.http2.frames import Fault, frame

pytestmark = [pytest.mark.slow, pytest.mark.siege]

ENDS = frames.END_HEADERS | frames.END_STREAM
ATTACKERS = 2
FRAMES = 6_000  # of one kind over one connection: more than any bound of ours


def _calls(client: RawClient, count: int, flags: int, after: Callable[[int], bytes] = lambda _: b"") -> None:
    """Open `count` streams, each with the frames of `after` behind its headers."""
    client.headers(headers=fields("/nothing"), ends=True)
    block = client.block(fields())
    numbers = range(client._next, client._next + 2 * count, 2)
    client._next = numbers.stop
    for begin in range(0, count, 500):
        client.send(
            b"".join(
                frame(frames.HEADERS, flags, number, block) + after(number)
                for number in numbers[begin : begin + 500]
            )
        )


def rapid_reset(client: RawClient) -> None:
    """Reset each call at once."""
    _calls(client, FRAMES, frames.END_HEADERS, lambda number: frames.rst_stream(number, Fault.NO_ERROR))


def settings(client: RawClient) -> None:
    """Put as many settings into a frame as fit. Each changes the windows of all open streams."""
    _calls(client, CALLS_PER_CONNECTION_MAX - 1, frames.END_HEADERS)
    changes = [frames.settings({frames.INITIAL_WINDOW: size})[frames.HEAD.size :] for size in (0, 60_000)]
    flood = frame(frames.SETTINGS, 0, 0, b"".join(changes) * 1_365)
    for _ in range(300):
        client.send(flood)


def pings(client: RawClient) -> None:
    """Send PINGs, each of which needs an answer."""
    client.send(FRAMES * frame(frames.PING, 0, 0, bytes(8)))


def ping_answers(client: RawClient) -> None:
    """Send answers to PINGs that were never sent."""
    client.send(FRAMES * frame(frames.PING, frames.ACK, 0, bytes(8)))


def empty_data(client: RawClient) -> None:
    """Send empty DATA frames of one call."""
    number = client.headers()
    client.send(FRAMES * frame(frames.DATA, 0, number))


def continuations(client: RawClient) -> None:
    """Send empty CONTINUATION frames of one block of headers."""
    client.send(frame(frames.HEADERS, 0, 1, client.block(fields())))
    client.send(FRAMES * frame(frames.CONTINUATION, 0, 1, b""))


def window_updates(client: RawClient) -> None:
    """Open all calls, and change the windows of one and of the connection."""
    _calls(client, CALLS_PER_CONNECTION_MAX - 1, frames.END_HEADERS)
    client.send(FRAMES * (frames.window_update(1_001, 1) + frames.window_update(0, 1)))


def small_headers(client: RawClient) -> None:
    """Begin calls with as many fields as a block has room for."""
    block = client.block([*fields("/nothing"), *(("a", "") for _ in range(4_000))])
    for number in range(1, 401, 2):
        client.send(frame(frames.HEADERS, ENDS, number, block[: frames.FRAME_BYTES_MAX]))


def slow_read(client: RawClient) -> None:
    """Begin calls that are refused, and never read the answers."""
    client.socket.settimeout(0.5)
    _calls(client, 20_000, ENDS)


FLOODS = (
    rapid_reset, settings, pings, ping_answers, empty_data, continuations, window_updates, small_headers, slow_read,
)  # fmt: skip


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedBroker]:
    """Run one broker for all floods."""
    with attacked_broker(tmp_path_factory.mktemp("floods")) as running:
        yield running


def _attack(port: int, flood: Callable[[RawClient], None], stop: Event) -> None:
    """Flood a port over one connection after the other, in a separate process, so that the stream is not delayed."""
    while not stop.is_set():
        try:
            with RawClient(None, port=port) as client:  # type: ignore[arg-type]
                flood(client)
                client.socket.settimeout(0.2)
                while flood is not slow_read and client.socket.recv(1 << 20) and not stop.is_set():
                    pass
        except OSError:
            continue  # the broker has closed the connection, as expected, or sends nothing


@contextmanager
def attackers(address: str, flood: Callable[[RawClient], None]) -> Iterator[None]:
    """Flood this address for the length of a block."""
    context = multiprocessing.get_context("spawn")
    port, stop = int(address.rpartition(":")[2]), context.Event()
    processes = [context.Process(target=_attack, args=(port, flood, stop)) for _ in range(ATTACKERS)]
    for process in processes:
        process.start()
    try:
        yield
        assert all(process.is_alive() for process in processes), "an attacker has failed"
    finally:
        stop.set()
        for process in processes:
            process.join()


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.__name__)
def test_a_flood_fails_no_call_of_another_client(
    broker: AttackedBroker, flood: Callable[[RawClient], None]
) -> None:
    with steady_stream(broker) as figures, attackers(broker.grpc, flood):
        figures.wait_rounds(rounds(10, 40))
    print(f"{flood.__name__}: {figures}")
    figures.check(peak_mib_max=600)


def test_the_same_floods_over_flight(broker: AttackedBroker) -> None:
    address = broker.endpoint.partition("://")[2]
    for flood in (settings, rapid_reset, slow_read):
        with steady_stream(broker) as figures, attackers(address, flood):
            figures.wait_rounds(rounds(10, 40))
        print(f"{flood.__name__} over Flight: {figures}")
        figures.check(peak_mib_max=600)
