"""Coroutines that blocking sockets run to their end, and methods that return a result or the coroutine."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from timeball.client.loop_network import LoopNetwork
from timeball.client.network import BLOCKING, BlockingStream, driven, run


class Doubling:
    def __init__(self, network: Any) -> None:
        self.network = network

    async def double_async(self, number: int) -> int:
        return 2 * number

    double = driven(double_async)


def test_a_driven_method_returns_its_result_or_a_coroutine() -> None:
    assert Doubling(BLOCKING).double(4) == 8
    assert asyncio.run(Doubling(LoopNetwork(1)).double(4)) == 8  # type: ignore[arg-type]


def test_an_error_of_a_coroutine_is_raised_and_an_await_that_suspends_is_a_fault() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(fail())
    with pytest.raises(AssertionError, match="suspended"):
        run(asyncio.sleep(0))


def test_a_blocking_stream_waits_for_bytes_and_for_the_end() -> None:
    here, there = socket.socketpair()
    stream = BlockingStream(here)
    assert not stream.is_readable and run(stream.wait(0)) is False
    with pytest.raises(TimeoutError):
        run(stream.receive(0.001))
    there.sendall(b"x")
    assert run(stream.wait(1)) and run(stream.receive(1)) == b"x"
    assert stream.end() and there.recv(1) == b""
    there.close()
    assert stream.is_readable and run(stream.receive(1)) == b""
    stream.close()


def test_a_socket_with_tls_has_no_end_of_one_direction() -> None:
    """Bytes that TLS has decoded already are no bytes of the socket."""
    with_tls = SimpleNamespace(pending=lambda: 3)
    stream = BlockingStream(with_tls)  # type: ignore[arg-type]
    assert not stream.end() and stream.is_readable
