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
    """An object with a coroutine method, and the method that `driven` makes of it."""

    def __init__(self, network: Any) -> None:
        self.network = network

    async def double_async(self, number: int) -> int:
        return 2 * number

    double = driven(double_async)


def test_a_driven_method_returns_its_result_or_a_coroutine_by_its_network() -> None:
    assert Doubling(BLOCKING).double(4) == 8
    assert asyncio.run(Doubling(LoopNetwork(1)).double(4)) == 8  # type: ignore[arg-type]


def test_run_raises_the_error_of_a_coroutine_and_refuses_one_that_suspends() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(fail())
    with pytest.raises(AssertionError, match="suspended"):
        run(asyncio.sleep(0))


def test_a_blocking_stream_is_readable_after_bytes_and_after_the_end() -> None:
    client, peer = socket.socketpair()
    stream = BlockingStream(client)
    assert not stream.is_readable and run(stream.wait(0)) is False
    with pytest.raises(TimeoutError):
        run(stream.receive(0.001))
    peer.sendall(b"x")
    assert run(stream.wait(1)) and run(stream.receive(1)) == b"x"
    assert stream.end_sending() and peer.recv(1) == b""
    peer.close()
    assert stream.is_readable and run(stream.receive(1)) == b""
    stream.close()


def test_a_stream_with_tls_cannot_end_sending_and_is_readable_with_decrypted_bytes() -> None:
    """Bytes that TLS has decrypted are not in the socket, so a poll would not see them."""
    with_tls = SimpleNamespace(pending=lambda: 3)
    stream = BlockingStream(with_tls)  # type: ignore[arg-type]
    assert not stream.end_sending() and stream.is_readable
