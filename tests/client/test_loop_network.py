"""Connections of an event loop: large bodies, peers that are slow or gone, names, and slots."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.bounds import BOUND_S

from timeball.client.loop_network import BUFFER_BYTES, LoopNetwork, LoopStream
from timeball.client.network import Stream


@asynccontextmanager
async def connected(host: str = "127.0.0.1") -> AsyncIterator[tuple[Stream, socket.socket]]:
    """The two ends of a connection: the client's stream, and the peer's socket."""
    network = LoopNetwork(1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stream = await network.connect(host, listening.getsockname()[1], None, "", BOUND_S)
        peer, _ = listening.accept()
    with peer:
        yield stream, peer
        await network.close()


def test_more_bytes_than_the_buffers_hold_are_received_and_sent() -> None:
    data = bytes(range(256)) * 4 * (BUFFER_BYTES // 256)

    async def main() -> None:
        async with connected() as (stream, peer):
            peer.settimeout(BOUND_S)
            sending = asyncio.get_running_loop().run_in_executor(None, peer.sendall, data)
            received = b""
            while len(received) < len(data):
                received += await stream.receive(BOUND_S)
            assert received == data
            await sending
            receiving = asyncio.get_running_loop().run_in_executor(None, read_all, peer, len(data))
            await stream.send(data, BOUND_S)
            assert await receiving == data

    asyncio.run(main())


def read_all(peer: socket.socket, size: int) -> bytes:
    """Receive this many bytes."""
    received = b""
    while len(received) < size:
        received += peer.recv(65_536)
    return received


def test_a_send_to_a_peer_that_reads_nothing_and_a_receive_time_out() -> None:
    async def main() -> None:
        async with connected() as (stream, _):
            with pytest.raises(TimeoutError, match="timed out"):
                await stream.send(bytes(64 * BUFFER_BYTES), 0.05)
            with pytest.raises(TimeoutError, match="timed out"):
                await stream.receive(0.001)

    asyncio.run(main())


def test_after_an_interruption_the_last_bytes_are_received_and_sends_fail() -> None:
    async def main() -> None:
        async with connected() as (stream, peer):
            stream.interrupt()
            assert await asyncio.to_thread(peer.recv, 1) == b"", "the client has ended its direction"
            peer.sendall(b"the last")
            peer.close()
            with pytest.raises(BrokenPipeError):
                await stream.send(b"a request", BOUND_S)
            assert await stream.receive(BOUND_S) == b"the last"
            assert await stream.receive(BOUND_S) == b"" and not stream.end_sending()

    asyncio.run(main())


def test_a_receive_raises_the_reset_of_its_connection() -> None:
    async def main() -> None:
        async with connected() as (stream, peer):
            # Linger is on, with 0 s: the close resets the connection.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            peer.close()
            with pytest.raises(ConnectionResetError):
                await stream.receive(BOUND_S)

    asyncio.run(main())


def test_a_host_name_is_resolved_and_an_unknown_one_raises_oserror() -> None:
    async def main() -> None:
        async with connected("localhost") as (stream, _):
            assert isinstance(stream, LoopStream) and not stream.is_readable
        with pytest.raises(OSError):
            await LoopNetwork(1).connect("nowhere.invalid", 1, None, "", BOUND_S)

    asyncio.run(main())


def test_no_more_calls_run_than_there_are_slots() -> None:
    network, running = LoopNetwork(2), list[int]()

    async def call() -> int:
        """Take a slot for one turn of the loop. Returns the number of calls that run then."""
        async with network.slot():
            running.append(1)
            await asyncio.sleep(0)
            running_calls = len(running)
            running.pop()
            return running_calls

    async def main() -> None:
        calls = asyncio.gather(*(call() for _ in range(10)))
        await asyncio.sleep(0)
        await network.wait_for_calls()
        assert max(await calls) == 2

    for _ in range(2):  # the second event loop finds the slots free
        asyncio.run(main())


def test_a_cancelled_wait_for_calls_releases_its_slots() -> None:
    async def main() -> None:
        network = LoopNetwork(2)
        async with network.slot():
            waiting = asyncio.create_task(network.wait_for_calls())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        async with asyncio.timeout(BOUND_S), network.slot(), network.slot():
            pass

    asyncio.run(main())
