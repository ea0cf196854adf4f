"""A node that does not lead forwards connections on its ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from tests.bounds import BOUND_S
from tests.ports import free_ports

from timeball.cluster.transport import gateway as module
from timeball.cluster.transport.connections import Address
from timeball.cluster.transport.gateway import Gateway
from timeball.model.errors import SetupError

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BYTES = bytes(range(256)) * 40_000  # 10 MB: more than sockets hold


class World:
    """A gateway and a leader that echoes, each on a port of its own."""

    def __init__(self) -> None:
        self.port, self.leader_port = free_ports(2)
        self.leader: Address | None = None
        self.gateway = Gateway("127.0.0.1", {"flight": self.port}, self.address)
        self.edges: list[str] = []
        self.leader_server: asyncio.Server | None = None
        self.leader_peers: list[Peer] = []

    def address(self, edge: str) -> Address | None:
        """Return the leader's address, and record the edge."""
        self.edges.append(edge)
        return self.leader

    async def lead(self) -> None:
        """Start the leader."""
        self.leader_server = await asyncio.start_server(self._echo, "127.0.0.1", self.leader_port)
        self.leader = ("127.0.0.1", self.leader_port)

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.leader_peers.append((reader, writer))
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
            writer.write(b"end")
            writer.write_eof()
            await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def dial(self) -> Peer:
        """Connect to the gateway."""
        return await asyncio.open_connection("127.0.0.1", self.port)


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    """Run a scenario with a gateway."""

    async def within() -> None:
        world = World()
        await world.gateway.start()
        try:
            await scenario(world)
        finally:
            await world.gateway.close()
            if world.leader_server is not None:
                world.leader_server.close()
            for _, writer in world.leader_peers:
                writer.close()
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(within(), BOUND_S))


async def echo(peer: Peer, sent: bytes) -> bytes:
    """Send all and the end of the stream. Returns all bytes until the other end has closed."""
    reader, writer = peer

    async def send() -> None:
        writer.write(sent)
        await writer.drain()
        writer.write_eof()

    _, received = await asyncio.gather(send(), reader.read())
    writer.close()
    return received


def test_all_bytes_and_the_end_of_each_stream_go_both_ways() -> None:
    async def scenario(world: World) -> None:
        await world.lead()
        peers = [await world.dial() for _ in range(4)]
        answers = await asyncio.gather(
            *(echo(peer, BYTES + bytes([number])) for number, peer in enumerate(peers))
        )
        assert answers == [BYTES + bytes([number]) + b"end" for number in range(4)]
        assert set(world.edges) == {"flight"}

    run(scenario)


def test_a_connection_waits_for_a_leader() -> None:
    async def scenario(world: World) -> None:
        answer = asyncio.create_task(echo(await world.dial(), b"early"))
        while len(world.edges) < 3:
            await asyncio.sleep(0)
        assert not answer.done()
        await world.lead()
        assert await answer == b"earlyend"

    run(scenario)


def test_a_leader_that_does_not_listen_yet_is_tried_again() -> None:
    async def scenario(world: World) -> None:
        world.leader = ("127.0.0.1", world.leader_port)
        answer = asyncio.create_task(echo(await world.dial(), b"early"))
        while len(world.edges) < 3:
            await asyncio.sleep(0)
        await world.lead()
        assert await answer == b"earlyend"

    run(scenario)


def test_a_leader_that_changes_while_it_is_dialed_gets_no_connection() -> None:
    """A leader that hangs never ends the connection, and the change was reported before the connection."""

    async def scenario(world: World) -> None:
        with socket.create_server(("127.0.0.1", 0)) as hanging:
            await world.lead()
            new_leader, world.leader = world.leader, hanging.getsockname()
            answer = asyncio.create_task(echo(await world.dial(), b"early"))
            while not world.edges:
                await asyncio.sleep(0)
            world.leader = new_leader
            world.gateway.leader_changed()
            assert await answer == b"earlyend"

    run(scenario)


def test_a_connection_to_an_earlier_leader_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_ANSWERS_S", 0.0)

    async def scenario(world: World) -> None:
        with socket.create_server(("127.0.0.1", 0)) as hanging:
            world.leader = hanging.getsockname()
            reader, writer = await world.dial()
            while not world.gateway._leaders:
                await asyncio.sleep(0)
            await world.lead()
            world.gateway.leader_changed()
            world.gateway.leader_changed()
            assert await reader.read() == b""
            writer.close()

    run(scenario)


def test_a_connection_ends_when_no_node_leads_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.05)

    async def scenario(world: World) -> None:
        reader, writer = await world.dial()
        assert await reader.read() == b""
        writer.close()

    run(scenario)


def test_a_connection_that_the_leader_aborts_ends_at_the_client() -> None:
    async def scenario(world: World) -> None:
        await world.lead()
        reader, writer = await world.dial()
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        world.leader_peers[0][1].transport.abort()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()

    run(scenario)


def test_a_connection_that_the_client_aborts_ends_at_the_leader() -> None:
    async def scenario(world: World) -> None:
        await world.lead()
        reader, writer = await world.dial()
        writer.write(b"x")
        await reader.readexactly(1)
        writer.transport.abort()
        leader_reader, _ = world.leader_peers[0]
        while not leader_reader.at_eof() and leader_reader.exception() is None:
            await asyncio.sleep(0.001)

    run(scenario)


def test_a_drain_frees_the_port_at_once_and_forwards_the_last_answers() -> None:
    async def scenario(world: World) -> None:
        await world.lead()
        reader, writer = await world.dial()
        writer.write(b"x")
        await reader.readexactly(1)
        draining = asyncio.create_task(world.gateway.drain())
        await asyncio.sleep(0)
        (await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", world.port)).close()
        # Sent while this node begins to lead, and answered.
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"
        writer.write_eof()
        assert await reader.read() == b"end"
        await draining
        writer.close()

    run(scenario)


def test_a_drain_closes_connections_that_do_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_ANSWERS_S", 0.01)

    async def scenario(world: World) -> None:
        await world.lead()
        reader, writer = await world.dial()
        writer.write(b"x")
        await reader.readexactly(1)
        await world.gateway.drain()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()

    run(scenario)


def test_connections_that_wait_for_a_leader_are_closed_when_this_node_leads() -> None:
    async def scenario(world: World) -> None:
        reader, writer = await world.dial()
        while not world.edges:
            await asyncio.sleep(0)
        world.gateway.stop_listening()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()

    run(scenario)


def test_close_ends_all_connections_and_frees_the_port() -> None:
    async def scenario(world: World) -> None:
        await world.lead()
        reader, writer = await world.dial()
        writer.write(b"x")
        await reader.readexactly(1)
        waiting_reader, waiting_writer = await world.dial()
        await world.gateway.close()
        for ended in (reader, waiting_reader):
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await ended.readexactly(1)
        (await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", world.port)).close()
        writer.close()
        waiting_writer.close()

    run(scenario)


def test_a_port_in_use_is_named_and_the_other_ports_are_freed() -> None:
    async def scenario(world: World) -> None:
        free = free_ports(1)[0]
        second = Gateway("127.0.0.1", {"http": free, "flight": world.port}, world.address)
        with pytest.raises(SetupError, match=f"{world.port} .flight."):
            await second.start()
        (await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", free)).close()

    run(scenario)
