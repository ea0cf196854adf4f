"""`timeball serve`: the ready line, the end, and errors at the start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from tests.accounts import ACCESS_FILE, access_file
from tests.bounds import BOUND_S
from tests.certificates import certificate
from tests.cli.in_process import run_here
from tests.cli.processes import COMMAND, Running, client_of, http_endpoint_of, running, serving
from tests.cli.supervised import Supervised, blocks_of_ports, run_cluster
from tests.cluster.etcd_cluster import EtcdCluster, need_etcd
from tests.cluster.written_log import opened
from tests.node_fixture import eventually, running_node
from tests.ports import free_ports

from timeball import __version__
from timeball.cli import serve
from timeball.cli.main import main
from timeball.cli.output import ExitCode
from timeball.cli.serve import (
    PORTS,
    PORTS_APART,
    RESTARTS,
    RestartPauses,
    announce,
    build_command,
    build_options,
    parse_group_names,
)
from timeball.io.clock import ManualClock
from timeball.io.files import RealFiles
from timeball.model.config import Settings
from timeball.model.errors import SetupError, Unavailable
from timeball.node.data_folder import write_format


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_the_broker_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """The ready line is complete. The exit code is 0, and the next start has the acknowledged messages."""
    data = str(tmp_path / "d")
    with running("serve", "--json", "--port", "0", "--data", data) as server:
        ready = server.wait_line(event="ready")
        assert (ready["pid"], ready["version"], ready["data"]) == (server.pid, __version__, data)
        assert ready["endpoint"].endswith(f":{ready['port']}")
        with client_of(ready) as ball:
            assert ball.topics() == {}
        assert run_here("send", "orders", "kept", "--endpoint", http_endpoint_of(ready)).returncode == 0
        assert server.end(number) == 0
        assert server.errors == []
    with running_node(Path(data)) as node:
        pulled = run_here("pull", "orders", "--json", "--endpoint", node.http_endpoint)
        assert json.loads(pulled.stdout)["body"] == "kept"


@pytest.mark.parametrize("http_port", [0, -1])
def test_the_ready_line_names_the_dashboard_if_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], http_port: int
) -> None:
    with running_node(tmp_path / "d", http_port=http_port) as node:
        announce(node.node, as_json=False)
        output = f", dashboard http://127.0.0.1:{node.node.http_port}/, data " in capsys.readouterr().out
    assert output is (http_port == 0)


def test_a_folder_and_a_port_in_use_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two brokers on one log would destroy it, and gRPC lets two processes share a port."""
    monkeypatch.chdir(tmp_path)
    with serving(Path("d")) as ready, client_of(ready) as ball:
        table_uri = ball.status()["table"]["uri"]
        assert table_uri == str(tmp_path / "d" / "pending"), (
            "Spark's workers have a working folder of their own"
        )
        port = str(ready["port"])
        for options, words in (
            (["--port", port, "--data", "other"], f"--port {port}"),
            (["--port", "0", "--data", str(tmp_path / "d")], f"{tmp_path / 'd'} is in use"),
        ):
            result = run_here("serve", *options)
            assert result.returncode == 4
            assert words in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_folder_of_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    """The error names the format of the folder, and nothing in the folder changes."""
    data = tmp_path / "d"
    with running_node(data):
        pass
    facts = json.loads((data / "FORMAT").read_text())
    (data / "FORMAT").write_text(json.dumps({**facts, "format": facts["format"] + 1}))
    before = sorted((p.name, p.stat().st_mtime_ns) for p in data.rglob("*") if p.is_file())
    result = run_here("serve", "--port", "0", "--data", str(data))
    assert result.returncode == 4
    assert "newer" in result.stderr and str(facts["format"] + 1) in result.stderr
    assert sorted((p.name, p.stat().st_mtime_ns) for p in data.rglob("*") if p.is_file()) == before


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """A folder with other files, such as photographs, does not become a message log."""
    (tmp_path / "holiday.jpg").write_bytes(b"\xff\xd8")
    result = run_here("serve", "--port", "0", "--data", str(tmp_path))
    assert result.returncode == 4
    assert "holiday.jpg" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["holiday.jpg"]


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    """The error names the option --data."""
    (tmp_path / "d").write_text("")
    result = run_here("serve", "--port", "0", "--data", str(tmp_path / "d"))
    assert result.returncode == 4
    assert "--data" in result.stderr


def test_options_come_from_the_environment_and_from_a_file(tmp_path: Path) -> None:
    """The environment wins over the file: the port is not that of the file."""
    file = tmp_path / "timeball.toml"
    file.write_text(f'data = "{tmp_path / "from-file"}"\nport = 1\n')
    with running("serve", "--json", "--settings", str(file), TIMEBALL_PORT="0") as server:
        ready = server.wait_line(event="ready")
    assert ready["data"] == str(tmp_path / "from-file")
    assert ready["port"] > 1


def test_a_public_address_needs_a_certificate_or_allow_plaintext(tmp_path: Path) -> None:
    options = ["serve", "--port", "0", "--host", "0.0.0.0", "--data", str(tmp_path / "d")]
    result = run_here(*options)
    assert result.returncode == 4 and len(result.stderr.splitlines()) == 1
    assert "--host 0.0.0.0" in result.stderr and "--allow-plaintext" in result.stderr
    assert not (tmp_path / "d").exists()
    with running(*options, "--allow-plaintext", "--json") as server:
        assert server.wait_line(event="ready")["host"] == "0.0.0.0"


def test_an_access_file_that_others_may_read_is_named(tmp_path: Path) -> None:
    path = access_file(tmp_path)
    path.chmod(0o644)
    result = run_here("serve", "--port", "0", "--data", str(tmp_path / "d"), "--access-file", str(path))
    assert result.returncode == 4 and "--access-file" in result.stderr and "chmod 600" in result.stderr


def test_commands_use_keys_and_roots_of_the_environment_and_sighup_reloads_accounts(tmp_path: Path) -> None:
    """A secret in the environment does not appear in a list of processes. An invalid access file changes nothing."""
    issued, path = certificate(tmp_path / "tls"), access_file(tmp_path)
    options = ["--tls-cert", issued.cert, "--tls-key", issued.key, "--access-file", str(path)]
    options += ["--log-level", "info", "--log-format", "json"]
    with running("serve", "--json", "--port", "0", "--data", str(tmp_path / "d"), *options) as server:
        ready = server.wait_line(event="ready")
        assert ready["endpoint"].startswith("grpc+tls://")
        address_and_roots = {"TIMEBALL_ENDPOINT": http_endpoint_of(ready), "TIMEBALL_TLS_ROOTS": issued.roots}
        shop = {**address_and_roots, "TIMEBALL_ACCESS_KEY": "shop", "TIMEBALL_SECRET_KEY": "shop secret 1"}
        assert run_here("send", "orders", "x", **shop).returncode == 0
        for credentials in (address_and_roots, {**shop, "TIMEBALL_SECRET_KEY": "wrong"}):
            result = run_here("send", "orders", "x", **credentials)
            assert (
                result.returncode == 2 and "access key" in result.stderr and "secret 1" not in result.stderr
            )
        result = run_here("send", "news", "x", **shop)
        assert result.returncode == 2 and "'news'" in result.stderr
        access_file(tmp_path, ACCESS_FILE.replace("shop secret 1", "shop secret 9"))
        os.kill(server.pid, signal.SIGHUP)
        shop["TIMEBALL_SECRET_KEY"] = "shop secret 9"
        eventually(lambda: run_here("send", "orders", "x", **shop).returncode == 0, "the new secret is known")
        lines = [json.loads(line) for line in server.errors]
        assert [line["level"] for line in lines if line["logger"] == "timeball.io.security"] == ["INFO"]
        access_file(tmp_path, "not TOML")
        os.kill(server.pid, signal.SIGHUP)
        eventually(lambda: [line for line in server.errors if "--access-file" in line], "the mistake is told")
        assert run_here("send", "orders", "x", **shop).returncode == 0
        assert server.end() == 0


def test_connections_do_not_take_the_files_that_the_log_needs(tmp_path: Path) -> None:
    """A broker raises the soft limit of its shell. With 200 files, a few hundred connections would stop its log."""
    words = [*COMMAND, "serve", "--json", "--port", "0", "--data", str(tmp_path / "d")]
    limited = ["sh", "-c", 'ulimit -Sn 200; exec "$@"', "sh", *words]
    with ExitStack() as connections, running(command=limited) as server:
        ready = server.wait_line(event="ready")
        host, _, port = ready["remoting"].rpartition(":")
        for _ in range(300):
            connections.enter_context(socket.create_connection((host, int(port)), timeout=BOUND_S))
        with client_of(ready) as ball:
            assert ball.send("orders", "x").seq == 2
            assert ball.compact() is None
        assert server.end() == 0


def limited(files: int, *arguments: str) -> list[str]:
    """Build the command `timeball serve` in a shell that allows so many open files."""
    return ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *COMMAND, "serve", *arguments]


def test_too_few_descriptors_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with running(command=limited(64, "--port", "0", "--data", str(tmp_path / "d"))) as server:
        eventually(lambda: server.code is not None, "it has ended")
        assert server.code == ExitCode.SETUP
    assert "may open 64 files and a broker needs 256: raise the limit" in " ".join(server.errors)
    assert not (tmp_path / "d").exists()


def is_served(ready: dict[str, Any]) -> bool:
    """True if a new client can send a message to the broker with this ready line."""
    try:
        with client_of(ready) as new:
            new.send("orders", "last")
    except Unavailable:
        return False
    return True


@pytest.mark.slow
def test_idle_connections_stop_neither_the_log_nor_later_clients(tmp_path: Path) -> None:
    """Three times as many connections as descriptors are opened at three edges, while segments fill and begin."""
    options = ["--json", "--port", "0", "--data", str(tmp_path / "d"), "--segment-bytes", "1048576"]
    with ExitStack() as stack:
        server = stack.enter_context(running(command=limited(256, *options)))
        ready = server.wait_line(event="ready")
        ports = [ready["port"], *(int(ready[edge].rpartition(":")[2]) for edge in ("remoting", "grpc"))]
        early_client = stack.enter_context(client_of(ready))
        early_client.send("orders", "first")
        for number in range(750):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", ports[number % 3]))
            if number % 50 == 0:
                early_client.send("orders", bytes(300_000))
        assert early_client.status()["log"]["bytes"] > 3 * 1_048_576, "segments have begun meanwhile"
        eventually(lambda: is_served(ready), "a later client waits for a descriptor, and is served")
        assert server.end(signal.SIGTERM) == 0


def test_a_name_server_without_a_port_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(
            [
                "name-server",
                "--cluster",
                "shop",
                "--node",
                "ns1",
                "--etcd",
                "http://127.0.0.1:1",
                "--name-server-port=-1",
                "--remoting-port=1",
            ]
        )
    assert "--name-server-port -1: choose a port" in capsys.readouterr().err


def test_a_name_server_without_a_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as result:
        main(["name-server"])
    assert result.value.code == 4 and "--cluster" in capsys.readouterr().err


async def _own() -> asyncio.AbstractEventLoop:
    """Return the running event loop."""
    return asyncio.get_running_loop()


def test_the_loop_is_uvloops_and_ends_with_the_runner() -> None:
    with serve.runner() as runner:
        loop = runner.run(_own())
        assert isinstance(loop, uvloop.Loop) and not loop.is_closed()
    assert loop.is_closed()
    assert not isinstance(asyncio.run(_own()), uvloop.Loop)


SETTINGS = replace(
    Settings(), cluster="c", node="a", group="g1,g2", etcd="http://127.0.0.1:1", data=Path("d")
)


def test_each_group_has_its_own_node_name_folder_and_ports() -> None:
    first, second = (build_options(SETTINGS, group, index) for index, group in enumerate(["g1", "g2"]))
    assert (first["node"], first["data"]) == ("a.g1", "d/g1")
    assert (second["node"], second["data"], second["group"]) == ("a.g2", "d/g2", "g2")
    assert first["port"] == str(SETTINGS.port)
    for name in PORTS:
        assert int(second[name]) == int(first[name]) + PORTS_APART
    # The supervisor runs the one name server for all groups.
    assert {first["name_server_port"], second["name_server_port"]} == {"-1"}


def test_an_edge_that_is_left_out_stays_out() -> None:
    options = build_options(replace(SETTINGS, grpc_port=-1), "g2", 1)
    assert options["grpc_port"] == "-1"


@pytest.mark.parametrize(
    ("advertise", "of_second_group"),
    [("", ""), ("host", "host"), ("host:10911", "host:11011"), ("::1", "::1"), ("[::1]:9", "[::1]:109")],
)
def test_the_advertised_port_moves_with_the_ports_of_the_group(advertise: str, of_second_group: str) -> None:
    options = build_options(replace(SETTINGS, advertise=advertise), "g2", 1)
    assert options["advertise"] == of_second_group


def test_a_port_above_65535_is_refused() -> None:
    with pytest.raises(SetupError, match=r"g2 would listen on 65\d+"):
        build_options(replace(SETTINGS, port=65_500), "g2", 1)


def test_the_options_of_a_group_come_last() -> None:
    command = build_command(
        ["timeball", "serve", "--group", "g1,g2"], {"group": "g2", "name_server_port": "-1"}
    )
    assert command == ["timeball", "serve", "--group", "g1,g2", "--group", "g2", "--name-server-port", "-1"]


@pytest.mark.parametrize("names", ["g1,", "g1,g1", ",g1"])
def test_an_empty_or_repeated_group_name_is_refused(names: str) -> None:
    with pytest.raises(SetupError, match="name each group once"):
        parse_group_names(replace(SETTINGS, group=names))


@pytest.mark.xdist_group("etcd")
def test_the_process_of_each_group_runs_starts_again_after_a_kill_and_ends(tmp_path: Path) -> None:
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
            assert len(node.events(event="leads", group="g1")) == 1, (
                "the kill of one group does not end the other"
            )
            children = psutil.Process(node.process.pid).children()
            assert len(children) == 2
        finally:
            code = node.end()
        assert code == 0
        assert not any(child.is_running() for child in children)


def test_a_group_that_cannot_start_ends_all(tmp_path: Path) -> None:
    """The port of the second group is taken. The command finds that without etcd."""
    (ports,) = blocks_of_ports(1, 2)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", ports["grpc-port"] + PORTS_APART))
        holder.listen()
        node = Supervised(tmp_path, [f"http://127.0.0.1:{free_ports(1)[0]}"], ports)
        assert node.process.wait(BOUND_S) == ExitCode.SETUP
    assert "the process of group g2 cannot start" in node.text
    assert str(ports["grpc-port"] + PORTS_APART) in node.text


EDGES = ("port", "http-port", "name-server-port", "remoting-port", "grpc-port", "replication-port")


def command(data: Path, **ports: int) -> list[str]:
    """Build the arguments of a replica on free ports, or on these `ports`. No etcd runs at its address."""
    chosen = dict(zip(EDGES, free_ports(len(EDGES)), strict=True)) | ports
    options = [word for name, port in chosen.items() for word in (f"--{name}", str(port))]
    etcd = f"http://127.0.0.1:{free_ports(1)[0]}"
    return ["serve", "--cluster", "c", "--node", "a", "--etcd", etcd, "--data", str(data), *options]


@pytest.mark.parametrize("edge", ["replication-port", "port", "grpc-port"])
def test_a_port_in_use_is_named_after_the_log_has_begun(tmp_path: Path, edge: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = int(holder.getsockname()[1])
        result = run_here(*command(tmp_path / "d", **{edge: port}))
    assert result.returncode == ExitCode.SETUP
    assert str(port) in result.stderr and len(result.stderr.splitlines()) == 1
    # The node had created its log before it opened the port.
    assert RealFiles(tmp_path / "d").list_dir("log")


def test_the_folder_of_another_node_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    files = RealFiles(tmp_path / "d")
    write_format(files)
    opened(files)
    result = run_here(*command(tmp_path / "d"))
    assert result.returncode == ExitCode.SETUP
    assert "belongs to replica b/" in result.stderr and "--data" in result.stderr


@pytest.mark.parametrize("left_out", ["--node", "--etcd"])
def test_required_settings_are_requested(tmp_path: Path, left_out: str) -> None:
    words = command(tmp_path / "d")
    at = words.index(left_out)
    result = run_here(*words[:at], *words[at + 2 :])
    assert result.returncode != 0 and left_out in result.stderr


def test_the_pause_before_a_restart_doubles_and_is_reset_by_a_steady_run() -> None:
    clock, environment = ManualClock(), dict[str, str]()

    def begin(ran_ms: int) -> float:
        """Begin a start after a run of `ran_ms`. Returns the pause before it, in seconds."""
        clock.advance(ran_ms)
        # Each start is one of a new process: it knows only the environment.
        wait_s = RestartPauses(clock, environment).begin()
        clock.advance(int(wait_s * 1_000))
        return wait_s

    assert [begin(0) for _ in range(8)] == [0, 0.5, 1, 2, 4, 8, 10, 10]
    assert begin(4_000) == 6, "the time that the node has run counts"
    assert begin(59_999) == 0 and begin(0) == 10, "the run was too short"
    assert [begin(60_000), begin(0), begin(0)] == [0, 0.5, 1]


FAILS_AT_EACH_START = """
from timeball.cli.main import main
from timeball.cluster.member import Member

async def fail(member):
    raise ZeroDivisionError

Member._report_figures = fail
main()
"""


def test_a_replica_whose_error_recurs_waits_longer_and_longer(tmp_path: Path) -> None:
    """The process replaces itself, and the new process knows the pauses of the processes before it."""
    program = [sys.executable, "-c", FAILS_AT_EACH_START]
    replica = Running(command=[*program, *command(tmp_path / "d"), "--json"])

    def next_pauses_ms() -> list[int]:
        """Read the next pause from the environment of the process. Empty while the process is replaced."""
        variables = Path(f"/proc/{replica.pid}/environ").read_text().split("\0")
        states = [line.removeprefix(f"{RESTARTS}=") for line in variables if line.startswith(RESTARTS)]
        return [int(state.split()[0]) for state in states]

    try:
        replica.wait_line(event="ready")
        eventually(lambda: any("waits before it starts again" in line for line in replica.errors), "it waits")
        eventually(lambda: max(next_pauses_ms(), default=0) >= 1_000, "the pause has doubled")
    finally:
        replica.end()
