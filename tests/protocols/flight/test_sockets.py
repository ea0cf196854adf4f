"""A taken port is noticed; connections of a port, and only those, can be cut."""

import socket

import pytest
from tests.bounds import BOUND_S

from timeball.errors import SetupError
from timeball.protocols.flight.sockets import check_free, cut_connections


def listening() -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def test_a_taken_port_is_a_setup_error() -> None:
    with listening() as server:
        port = server.getsockname()[1]
        with pytest.raises(SetupError, match=f"--port {port}"):
            check_free("127.0.0.1", port)
    check_free("127.0.0.1", port)
    check_free("127.0.0.1", 0)


def test_an_address_of_others_is_a_setup_error() -> None:
    with pytest.raises(SetupError, match="--host"):
        check_free("no such host.invalid", 7400)
    with pytest.raises(SetupError, match="cannot be used"):
        check_free("192.0.2.1", 7400)


def test_connections_of_one_port_are_cut_and_no_others() -> None:
    with listening() as cut, listening() as kept:
        clients = [socket.create_connection(server.getsockname(), timeout=BOUND_S) for server in (cut, kept)]
        accepted = [server.accept()[0] for server in (cut, kept)]
        assert cut_connections(cut.getsockname()[1]) == 1
        assert clients[0].recv(1) == b""
        accepted[1].sendall(b"x")
        assert clients[1].recv(1) == b"x"
        with socket.create_connection(cut.getsockname(), timeout=BOUND_S):  # it still listens
            pass
        for connection in [*clients, *accepted]:
            connection.close()
