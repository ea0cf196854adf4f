"""Connections that a follower forwards, and those that it answers itself."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.certificates import certificate
from tests.ports import free_ports

from timeball.cluster.transport.connections import Address
from timeball.cluster.transport.gateway import HTTP, Gateway, Http, LocalAnswers
from timeball.io.security import load_client_tls, load_tls
from timeball.model.errors import SetupError
from timeball.monitoring.figures import ReplicaFigures

FOLLOWER = ReplicaFigures("g1", "b/1", "follower", "a")
LOCAL = LocalAnswers(lambda: FOLLOWER, lambda _: None, lambda *_: None)


@asynccontextmanager
async def leader(tls: ssl.SSLContext | None = None) -> AsyncIterator[Address]:
    """A server that answers each line with itself, reversed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line.strip()[::-1] + b"\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        server.close()


@asynccontextmanager
async def gateway(
    address: Callable[[str], Address | None], http: Http | None = None
) -> AsyncIterator[dict[str, int]]:
    """Run a gateway, and yield its port at each edge."""
    ports = dict(zip((HTTP, "flight"), free_ports(2), strict=True))
    forwarding = Gateway("127.0.0.1", ports, address, http)
    await forwarding.start()
    try:
        yield ports
    finally:
        await forwarding.close()


async def exchange(port: int, request: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """Send a request to a port and return the first line of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    writer.write(request)
    line = await reader.readline()
    writer.close()
    return line


def run(scenario: Awaitable[None]) -> None:
    async def within() -> None:
        await scenario

    asyncio.run(within())


def test_a_gateway_forwards_all_requests_but_those_about_the_node() -> None:
    async def scenario() -> None:
        async with leader() as address, gateway(lambda edge: address, Http(LOCAL)) as ports:
            assert await exchange(ports["flight"], b"GET /health/live\n") == b"evil/htlaeh/ TEG\n"
            assert await exchange(ports[HTTP], b"GET /v1 HTTP/1.1\r\n\r\n") == b"1.1/PTTH 1v/ TEG\n"
            assert (
                await exchange(ports[HTTP], b"GET /leader/g1 HTTP/1.1\r\n\r\n")
                == b"HTTP/1.1 503 Service Unavailable\r\n"
            )

    run(scenario())


class Leaders:
    """A gateway's view of the leader, which a test changes."""

    def __init__(self, address: Address) -> None:
        self.address: Address | None = address

    def __call__(self, edge: str) -> Address | None:
        return self.address


def test_connections_to_an_earlier_leader_are_closed() -> None:
    async def scenario() -> None:
        async with leader() as first, leader() as second:
            leaders = Leaders(first)
            (port,) = free_ports(1)
            forwarding = Gateway("127.0.0.1", {"flight": port}, leaders)
            await forwarding.start()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"abc\n")
            assert await reader.readline() == b"cba\n"
            leaders.address = None  # no node leads: connections to the first leader stay
            forwarding.leader_changed()
            leaders.address = first
            forwarding.leader_changed()
            writer.write(b"def\n")
            assert await reader.readline() == b"fed\n"
            leaders.address = second
            forwarding.leader_changed()
            assert await reader.read() == b"", "the first leader never closes it"
            writer.close()
            assert await exchange(port, b"ghi\n") == b"ihg\n"
            await forwarding.close()

    run(scenario())


class CountedAddress:
    """The leader's address, with a count of the calls for it."""

    def __init__(self, address: Address | None = None) -> None:
        self.address, self.calls = address, 0

    def __call__(self, edge: str) -> Address | None:
        self.calls += 1
        return self.address

    async def wait_for_calls(self) -> None:
        """Wait until the gateway has asked three more times."""
        until = self.calls + 3
        while self.calls < until:
            await asyncio.sleep(0.01)


def test_a_forwarded_connection_waits_for_a_leader() -> None:
    async def scenario() -> None:
        leaders = CountedAddress()
        async with leader() as address, gateway(leaders) as ports:
            answer = asyncio.create_task(exchange(ports["flight"], b"abc\n"))
            await leaders.wait_for_calls()
            assert not answer.done()
            leaders.address = address
            assert await answer == b"cba\n"

    run(scenario())


def test_under_tls_a_gateway_answers_http_and_checks_the_leader_s_certificate(tmp_path: Path) -> None:
    issued = certificate(tmp_path)
    ours = load_tls(issued.cert, issued.key)
    client = load_client_tls(issued.roots, "", "")
    other = certificate(tmp_path / "other")

    async def scenario() -> None:
        http = Http(LOCAL, ours.http, client)
        async with leader(ours.http) as address, gateway(lambda edge: address, http) as ports:
            assert (await exchange(ports[HTTP], b"GET /health/live HTTP/1.1\r\n\r\n", client)).startswith(
                b"HTTP/1.1 200"
            )
            assert await exchange(ports[HTTP], b"GET /x HTTP/1.1\r\n\r\n", client) == b"1.1/PTTH x/ TEG\n"
        stranger = Http(LOCAL, ours.http, load_client_tls(other.roots, "", ""))
        async with leader(ours.http) as address:
            leaders = CountedAddress(address)
            async with gateway(leaders, stranger) as ports:
                answer = asyncio.create_task(exchange(ports[HTTP], b"GET /x HTTP/1.1\r\n\r\n", client))
                await leaders.wait_for_calls()
                assert not answer.done(), "a leader that cannot be checked gets nothing"
                answer.cancel()

    run(scenario())


def test_a_port_in_use_is_named_in_the_error() -> None:
    async def scenario() -> None:
        async with leader() as address:
            with pytest.raises(SetupError, match=f"{address[1]} .flight"):
                await Gateway("127.0.0.1", {"flight": address[1]}, lambda edge: None).start()

    run(scenario())
