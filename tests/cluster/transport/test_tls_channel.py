"""TLS between nodes: both ends show a certificate of the cluster's authority before any data passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.certificates import Certificate, certificate

from timeball.cluster.transport.connections import TlsChannel
from timeball.io.security import load_peer_tls
from timeball.model.errors import PeerError, SetupError


def channels(server: Certificate, client: Certificate, roots: str = "") -> tuple[TlsChannel, TlsChannel]:
    """Return the channels of both ends of a connection. `roots`: the authority that the server accepts."""
    accepts, _ = load_peer_tls(roots or server.roots, server.cert, server.key)
    _, dials = load_peer_tls(server.roots, client.cert, client.key)
    return TlsChannel(accepts, None), TlsChannel(dials, "127.0.0.1")


def pump(server: TlsChannel, client: TlsChannel) -> tuple[bytes, bytes]:
    """Carry bytes until neither end has any. Return the data that the server and the client received."""
    server_data, client_data = b"", b""
    while True:
        to_server, to_client = client.outgoing(), server.outgoing()
        if not to_server and not to_client:
            return server_data, client_data
        server_data += server.receive(to_server) if to_server else b""
        client_data += client.receive(to_client) if to_client else b""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Return a certificate of the cluster's authority."""
    return certificate(tmp_path_factory.mktemp("ours"))


def test_data_sent_before_the_handshake_arrives_after_it(ours: Certificate) -> None:
    server, client = channels(ours, ours)
    client.begin()
    client.send(b"hello")
    assert pump(server, client) == (b"hello", b"")
    assert server.is_open and client.is_open
    server.send(bytes(3_000_000))
    server_data, client_data = pump(server, client)
    assert (server_data, len(client_data)) == (b"", 3_000_000)


def test_sent_bytes_are_encrypted(ours: Certificate) -> None:
    server, client = channels(ours, ours)
    client.begin()
    pump(server, client)
    client.send(b"a promise")
    assert b"a promise" not in client.outgoing()


def test_a_certificate_of_another_authority_is_refused(ours: Certificate, tmp_path: Path) -> None:
    theirs = certificate(tmp_path / "theirs")
    server, client = channels(ours, theirs)
    client.begin()
    client.send(b"hello")
    with pytest.raises(PeerError, match="TLS"):
        pump(server, client)
    assert not server.is_open


def test_plain_bytes_in_place_of_a_handshake_are_refused(ours: Certificate) -> None:
    server, _ = channels(ours, ours)
    with pytest.raises(PeerError, match="TLS"):
        server.receive(b"TBR1" + bytes(60))


def test_roots_without_a_certificate_are_refused(ours: Certificate) -> None:
    with pytest.raises(SetupError, match="--tls-cert"):
        load_peer_tls(ours.roots, "", "")
