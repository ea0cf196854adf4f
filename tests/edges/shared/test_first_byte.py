"""One port for TLS and plain text: the first byte decides, and silent connections are limited."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.certificates import Certificate, certificate

from timeball.edges.shared import first_byte
from timeball.edges.shared.first_byte import FirstByteServer, PlainFrom
from timeball.io.security import load_tls


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@asynccontextmanager
async def run_echo_server(issued: Certificate, *, plain_from: PlainFrom = "all") -> AsyncIterator[int]:
    """Run an echo server with a certificate during a block. Yields its port."""
    context = load_tls(issued.cert, issued.key).context
    server = FirstByteServer(Echo, context, edge="grpc", plain_from=plain_from)
    await server.listen("127.0.0.1", 0, 100)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def answer(port: int, data: bytes, roots: str = "") -> bytes:
    """Return the first bytes of the answer, none if the connection ends. Raises ConnectionError if it is reset."""
    context = ssl.create_default_context(cafile=roots) if roots else None
    reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port, ssl=context), BOUND_S)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(100), BOUND_S)
    finally:
        writer.close()


def run_check(tmp_path: Path, check: Callable[[Certificate], object]) -> None:
    """Run a check with a new certificate."""
    asyncio.run(check(certificate(tmp_path / "tls")))  # type: ignore[arg-type]


def test_tls_and_plain_text_are_served_on_one_port(tmp_path: Path) -> None:
    async def check(issued: Certificate) -> None:
        async with run_echo_server(issued) as port:
            answers = await asyncio.gather(
                *(answer(port, b"PRI", issued.roots if n % 2 else "") for n in range(10)),
                answer(port, b"\x16nonsense"),
            )
        assert answers[:10] == [b"PRI"] * 10
        assert b"nonsense" not in answers[10]

    run_check(tmp_path, check)


def test_plain_text_from_another_machine_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_byte, "is_loopback", lambda peer: False)

    async def check(issued: Certificate) -> None:
        async with run_echo_server(issued, plain_from="this machine") as port:
            assert await answer(port, b"PRI") == b""
            assert await answer(port, b"PRI", issued.roots) == b"PRI"
        async with run_echo_server(issued) as port:
            assert await answer(port, b"PRI") == b"PRI"

    run_check(tmp_path, check)


def test_silent_connections_are_limited_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_byte, "SILENT_MAX", 2)
    monkeypatch.setattr(first_byte, "FIRST_BYTE_S", 0.5)

    async def check(issued: Certificate) -> None:
        async with run_echo_server(issued) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            # The limit closes two of them at once, and FIRST_BYTE_S the other two.
            for reader, _ in silent:
                assert await asyncio.wait_for(reader.read(), BOUND_S) == b""
            assert await answer(port, b"PRI") == b"PRI"
            for _, writer in silent:
                writer.close()

    run_check(tmp_path, check)
