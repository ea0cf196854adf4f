"""The edges of a node: either all listen, or none."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.node_fixture import running_node

from timeball.model.errors import SetupError


def test_each_edge_listens_on_a_port_of_its_own(tmp_path: Path) -> None:
    ports_by_name = dict.fromkeys(("name_server_port", "remoting_port", "grpc_port", "http_port"), 0)
    with running_node(tmp_path, **ports_by_name) as node:
        assert node.node.edges is not None
        ports = node.node.edges.ports
        assert set(ports) == {"flight", "name_server", "remoting", "grpc", "http"}
        assert len(set(ports.values())) == len(ports)
        for port in ports.values():
            socket.create_connection(("127.0.0.1", port)).close()


def test_if_one_port_is_taken_no_edge_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        flight_port = free.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        remoting_port = taken.getsockname()[1]
        with (
            pytest.raises(SetupError, match=str(remoting_port)),
            running_node(tmp_path, port=flight_port, remoting_port=remoting_port),
        ):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", flight_port))
