"""`timeball serve --cluster`: what keeps a node from starting, said in one line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.cli.in_process import run_here
from tests.cluster.written_log import opened
from tests.ports import free_ports

from timeball.cli.output import ExitCode
from timeball.io.files import RealFiles
from timeball.node.data_folder import write_format

EDGES = ("port", "http-port", "name-server-port", "remoting-port", "grpc-port", "replication-port")


def command(data: Path, **ports: int) -> list[str]:
    chosen = dict(zip(EDGES, free_ports(len(EDGES)), strict=True)) | ports
    options = [word for name, port in chosen.items() for word in (f"--{name}", str(port))]
    # No etcd is needed to find these out.
    etcd = f"http://127.0.0.1:{free_ports(1)[0]}"
    return ["serve", "--cluster", "c", "--node", "a", "--etcd", etcd, "--data", str(data), *options]


@pytest.mark.parametrize("edge", ["replication-port", "port", "grpc-port"])
def test_a_port_that_is_taken_is_named(tmp_path: Path, edge: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        ended = run_here(*command(tmp_path / "d", **{edge: port}))
    assert ended.returncode == ExitCode.SETUP
    assert str(port) in ended.stderr and len(ended.stderr.splitlines()) == 1
    # The folder is free again.
    assert RealFiles(tmp_path / "d").list_dir("log")


def test_the_folder_of_another_node_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    files = RealFiles(tmp_path / "d")
    write_format(files)
    opened(files)
    ended = run_here(*command(tmp_path / "d"))
    assert ended.returncode == ExitCode.SETUP
    assert "belongs to replica b/" in ended.stderr and "--data" in ended.stderr


@pytest.mark.parametrize("left_out", ["--node", "--etcd"])
def test_what_a_node_needs_is_asked_for(tmp_path: Path, left_out: str) -> None:
    words = command(tmp_path / "d")
    at = words.index(left_out)
    ended = run_here(*words[:at], *words[at + 2 :])
    assert ended.returncode != 0 and left_out in ended.stderr
