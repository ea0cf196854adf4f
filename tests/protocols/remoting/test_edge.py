"""The two ports: opened, refused, bounded, closed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.node_fixture import RunningNode, running_node
from tests.protocols.remoting.wire import Wire

from timeball.errors import SetupError


def test_a_taken_port_names_its_option_and_leaves_nothing_open(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("name_server_port", "remoting_port"):
            running = RunningNode(tmp_path / option, **{option: port})
            with pytest.raises(SetupError, match=f"--{option.replace('_', '-')} {port}"):
                running.start()
            again = RunningNode(tmp_path / option)
            again.start()  # the folder is free
            again.stop()


def test_minus_one_is_no_port(tmp_path: Path) -> None:
    with running_node(tmp_path, name_server_port=-1, remoting_port=-1) as node:
        assert (node.node.name_server_port, node.node.remoting_port) == (-1, -1)


def test_stopping_closes_connections(tmp_path: Path) -> None:
    running = RunningNode(tmp_path)
    running.start()
    wire = Wire.to(running)
    assert wire.ask(105, topic="TBW102").code == 0
    running.stop()
    assert wire.is_closed()
    wire.close()
