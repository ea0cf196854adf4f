"""The slow network of test_partitions.py delays frames and loses some. Another network loses nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest
from tests.bounds import BOUND_S
from tests.cluster.namespaces import Network, Slow, network

pytestmark = pytest.mark.slow

HOLD_MS, LOSS, DATAGRAMS = 20, 0.1, 200
BLOCK = b"x" * 4_000
ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 7)) as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
    datagrams.bind((sys.argv[1], 7))
    print("ready", flush=True)
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
    while True:
        datagrams.sendto(*datagrams.recvfrom(65536))
"""


def exchanges(net: Network) -> tuple[list[float], int]:
    """Return how long round trips of a TCP connection took, in ms, and how many datagrams were not answered."""
    address = (net.addresses["a"], 7)
    command = [*net.within("a"), sys.executable, "-c", ECHO, address[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as echo:
        assert echo.stdout is not None and echo.stdout.readline() == "ready\n"
        try:
            return [*round_trips(address)], unanswered(address)
        finally:
            echo.kill()


def round_trips(address: tuple[str, int]) -> list[float]:
    """Return how long each of some round trips of a TCP connection took, in ms."""
    durations_ms = []
    with socket.create_connection(address, BOUND_S) as connection:
        for _ in range(5):
            begin_s, missing = time.monotonic(), len(BLOCK)
            connection.sendall(BLOCK)
            while missing:
                missing -= len(connection.recv(missing))
            durations_ms.append(1_000 * (time.monotonic() - begin_s))
    return durations_ms


def unanswered(address: tuple[str, int]) -> int:
    """Send datagrams, then repeat a last one until it is answered. Returns how many were lost."""
    answered: set[bytes] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.settimeout(0.2)
        for number in range(DATAGRAMS):
            datagrams.sendto(str(number).encode(), address)
        deadline_s = time.monotonic() + BOUND_S
        while b"last" not in answered:
            assert time.monotonic() < deadline_s
            try:
                answered.add(datagrams.recv(65_536))
            except TimeoutError:
                datagrams.sendto(b"last", address)
    return DATAGRAMS - len(answered - {b"last"})


def test_a_fast_network_loses_no_datagram() -> None:
    with network("a") as net:
        _, lost = exchanges(net)
    assert lost == 0 and net.frames == {}


def test_a_slow_network_delays_and_loses_datagrams() -> None:
    """The control: each round trip takes two holds, and some datagrams do not come back."""
    with network("a", Slow(HOLD_MS, LOSS, seed=1)) as net:
        durations_ms, lost = exchanges(net)
    assert min(durations_ms) >= 2 * HOLD_MS
    assert net.frames["lost"] >= lost > 0
    share = net.frames["lost"] / sum(net.frames.values())
    assert LOSS / 2 < share < 2 * LOSS, net.frames
