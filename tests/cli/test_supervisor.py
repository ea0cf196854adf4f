"""`timeball serve --group g1,g2`: a process for each group, started again when it ends, and ended with this one."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.bounds import BOUND_S
from tests.cli.supervised import Supervised, blocks_of_ports, run_cluster
from tests.cluster.etcd_cluster import EtcdCluster, need_etcd
from tests.ports import free_ports

from timeball.cli.output import ExitCode
from timeball.cli.serve import PORTS, PORTS_APART, build_command, build_options, parse_group_names
from timeball.model.config import Settings
from timeball.model.errors import SetupError

SETTINGS = replace(
    Settings(), cluster="c", node="a", group="g1,g2", etcd="http://127.0.0.1:1", data=Path("d")
)


def test_a_group_has_a_name_a_folder_and_ports_of_its_own() -> None:
    first, second = (build_options(SETTINGS, group, index) for index, group in enumerate(["g1", "g2"]))
    assert (first["node"], first["data"]) == ("a.g1", "d/g1")
    assert (second["node"], second["data"], second["group"]) == ("a.g2", "d/g2", "g2")
    assert first["port"] == str(SETTINGS.port)
    for name in PORTS:
        assert int(second[name]) == int(first[name]) + PORTS_APART
    # The name server answers for all groups, and is not theirs.
    assert {first["name_server_port"], second["name_server_port"]} == {"-1"}


def test_an_edge_that_is_left_out_stays_out() -> None:
    options = build_options(replace(SETTINGS, grpc_port=-1), "g2", 1)
    assert options["grpc_port"] == "-1"


@pytest.mark.parametrize(
    ("given", "second"),
    [("", ""), ("host", "host"), ("host:10911", "host:11011"), ("::1", "::1"), ("[::1]:9", "[::1]:109")],
)
def test_the_address_for_clients_moves_with_its_port(given: str, second: str) -> None:
    assert build_options(replace(SETTINGS, advertise=given), "g2", 1)["advertise"] == second


def test_ports_beyond_the_last_are_refused() -> None:
    with pytest.raises(SetupError, match=r"g2 would listen on 65\d+"):
        build_options(replace(SETTINGS, port=65_500), "g2", 1)


def test_the_options_of_a_group_come_last() -> None:
    command = build_command(
        ["timeball", "serve", "--group", "g1,g2"], {"group": "g2", "name_server_port": "-1"}
    )
    assert command == ["timeball", "serve", "--group", "g1,g2", "--group", "g2", "--name-server-port", "-1"]


@pytest.mark.parametrize("names", ["g1,", "g1,g1", ",g1"])
def test_each_group_is_named_once(names: str) -> None:
    with pytest.raises(SetupError, match="name each group once"):
        parse_group_names(replace(SETTINGS, group=names))


@pytest.mark.xdist_group("etcd")
def test_two_groups_run_are_started_again_and_end(tmp_path: Path) -> None:
    need_etcd()
    with EtcdCluster(tmp_path / "etcd", size=1) as etcd:
        node = Supervised(tmp_path, etcd.endpoints, blocks_of_ports(1, 2)[0])
        try:
            for group in ("g1", "g2"):
                node.wait(lambda group=group: node.events(event="ready", group=group))
                run_cluster(etcd.endpoints, "init", "--group", group, "--nodes", f"a.{group}")
            for group in ("g1", "g2"):
                node.wait(lambda group=group: node.events(event="leads", group=group))
            (ready,) = node.events(event="ready", group="g2")
            psutil.Process(ready["pid"]).kill()
            node.wait(lambda: len(node.events(event="leads", group="g2")) == 2)
            assert len(node.events(event="leads", group="g1")) == 1, "the other group goes on"
            children = psutil.Process(node.process.pid).children()
            assert len(children) == 2
        finally:
            code = node.end()
        assert code == 0
        assert not any(child.is_running() for child in children)


def test_a_group_that_cannot_start_ends_all(tmp_path: Path) -> None:
    """No etcd is needed to find that a port is taken."""
    (ports,) = blocks_of_ports(1, 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports["grpc-port"] + PORTS_APART))
        taken.listen()
        node = Supervised(tmp_path, [f"http://127.0.0.1:{free_ports(1)[0]}"], ports)
        assert node.process.wait(BOUND_S) == ExitCode.SETUP
    assert "the process of group g2 cannot start" in node.text
    assert str(ports["grpc-port"] + PORTS_APART) in node.text
