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
    ports = dict(zip((HTTP, "flight"), free_ports(2), strict=True))
    forwarding = Gateway("127.0.0.1", ports, address, http)
    await forwarding.start()
    try:
        yield ports
    finally:
        await forwarding.close()


async def said(port: int, sent: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """Send one thing and return the first line of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    writer.write(sent)
    line = await reader.readline()
    writer.close()
    return line


def run(scenario: Awaitable[None]) -> None:
    async def within() -> None:
        await scenario

    asyncio.run(within())


def test_a_gateway_forwards_all_requests_but_those_about_the_node() -> None:
    async def scenario() -> None:
        async with leader() as there, gateway(lambda edge: there, Http(LOCAL)) as ports:
            assert await said(ports["flight"], b"GET /health/live\n") == b"evil/htlaeh/ TEG\n"
            assert await said(ports[HTTP], b"GET /v1 HTTP/1.1\r\n\r\n") == b"1.1/PTTH 1v/ TEG\n"
            assert (
                await said(ports[HTTP], b"GET /leader/g1 HTTP/1.1\r\n\r\n")
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
            known = Leaders(first)
            (port,) = free_ports(1)
            forwarding = Gateway("127.0.0.1", {"flight": port}, known)
            await forwarding.start()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"abc\n")
            assert await reader.readline() == b"cba\n"
            known.address = None  # no node leads: the first one may go on
            forwarding.leader_changed()
            known.address = first
            forwarding.leader_changed()
            writer.write(b"def\n")
            assert await reader.readline() == b"fed\n"
            known.address = second
            forwarding.leader_changed()
            assert await reader.read() == b"", "the first leader never closes it"
            writer.close()
            assert await said(port, b"ghi\n") == b"ihg\n"
            await forwarding.close()

    run(scenario())


class Asked:
    """The leader's address, with a count of the questions for it."""

    def __init__(self, address: Address | None = None) -> None:
        self.address, self.times = address, 0

    def __call__(self, edge: str) -> Address | None:
        self.times += 1
        return self.address

    async def often(self) -> None:
        """Wait until it was asked some more times."""
        until = self.times + 3
        while self.times < until:
            await asyncio.sleep(0.01)


def test_a_forwarded_connection_waits_for_a_leader() -> None:
    async def scenario() -> None:
        known = Asked()
        async with leader() as there, gateway(known) as ports:
            asked = asyncio.create_task(said(ports["flight"], b"abc\n"))
            await known.often()
            assert not asked.done()
            known.address = there
            assert await asked == b"cba\n"

    run(scenario())


def test_under_tls_a_gateway_answers_http_and_checks_the_leader_s_certificate(tmp_path: Path) -> None:
    made = certificate(tmp_path)
    ours = load_tls(made.cert, made.key)
    client = load_client_tls(made.roots, "", "")
    other = certificate(tmp_path / "other")

    async def scenario() -> None:
        http = Http(LOCAL, ours.http, client)
        async with leader(ours.http) as there, gateway(lambda edge: there, http) as ports:
            assert (await said(ports[HTTP], b"GET /health/live HTTP/1.1\r\n\r\n", client)).startswith(
                b"HTTP/1.1 200"
            )
            assert await said(ports[HTTP], b"GET /x HTTP/1.1\r\n\r\n", client) == b"1.1/PTTH x/ TEG\n"
        stranger = Http(LOCAL, ours.http, load_client_tls(other.roots, "", ""))
        async with leader(ours.http) as there:
            known = Asked(there)
            async with gateway(known, stranger) as ports:
                asked = asyncio.create_task(said(ports[HTTP], b"GET /x HTTP/1.1\r\n\r\n", client))
                await known.often()
                assert not asked.done(), "a leader that cannot be checked gets nothing"
                asked.cancel()

    run(scenario())


def test_a_port_in_use_is_named_in_the_error() -> None:
    async def scenario() -> None:
        async with leader() as there:
            with pytest.raises(SetupError, match=f"{there[1]} .flight"):
                await Gateway("127.0.0.1", {"flight": there[1]}, lambda edge: None).start()

    run(scenario())
