"""The two ports of the edge: start, errors, limits, TLS and stop."""

from __future__ import annotations

import os
import re
import socket
import ssl
from pathlib import Path

import pytest
from tests.certificates import certificate
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.edges.remoting import edge
from timeball.edges.remoting.codec.codes import RequestCode
from timeball.edges.remoting.codec.sends import SEND_CODES
from timeball.edges.shared import first_byte
from timeball.model.errors import SetupError


def test_a_taken_port_names_its_option_and_leaves_nothing_open(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("name_server_port", "remoting_port"):
            running = RunningNode(tmp_path / option, **{option: port})
            with pytest.raises(SetupError, match=f"--{option.replace('_', '-')} {port}"):
                running.start()
            other = RunningNode(tmp_path / option)
            other.start()  # the failed node has released the folder
            other.stop()


def test_port_minus_one_disables_listening(tmp_path: Path) -> None:
    with running_node(tmp_path, name_server_port=-1, remoting_port=-1) as node:
        assert (node.node.name_server_port, node.node.remoting_port) == (-1, -1)


def test_stopping_closes_connections(tmp_path: Path) -> None:
    running = RunningNode(tmp_path)
    running.start()
    wire = Wire.to(running)
    assert wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TBW102").code == 0
    running.stop()
    assert wire.is_closed()
    wire.close()


def test_every_handler_has_a_request_code_of_rocketmq(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        assert node.node.edges is not None
        assert node.node.edges.remoting._dispatch._handlers.keys() <= set(RequestCode)


def test_a_client_that_does_not_read_does_not_delay_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "LAST_ANSWERS_S", 0.05)
    running = RunningNode(tmp_path)
    running.start()
    wire = Wire.to(running)
    assert wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TBW102").code == 0
    remoting = running.node.edges.remoting
    assert remoting is not None
    [connection] = remoting._connections
    # The client does not read, and the kernel cannot buffer so many bytes.
    running.loop.call_soon_threadsafe(connection.write, bytes(32 * 1024 * 1024))
    running.stop()
    wire.close()


def test_the_documentation_lists_exactly_the_answered_requests(node: RunningNode) -> None:
    page = (Path(__file__).parents[3] / "docs/protocols/remoting.md").read_text()
    section = page.split("## Requests")[1].split("## Limits")[0]
    documented: dict[int, str] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        codes = re.findall(r"\d+", cells[0]) if cells[0][:1].isdigit() else []
        documented |= dict(zip(map(int, codes), cells[1].split(", ") if codes else [], strict=True))
    remoting = node.node.edges.remoting
    assert remoting is not None
    answered = {int(code) for code in remoting._dispatch._handlers} | SEND_CODES
    assert documented == {code: RequestCode(code).name for code in answered}


def test_an_error_of_a_periodic_check_stops_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timeball.edges.remoting.edge.DEADLINES_CHECK_S", 0.01)

    def fail() -> None:
        raise ValueError("an error of the check")

    with running_node(tmp_path) as running:
        remoting, failed = running.node.edges.remoting, running.node._failed
        assert remoting is not None and failed is not None
        remoting._heartbeats.expire = fail  # type: ignore[method-assign]
        eventually(failed.done, "the node is told of the error")
        assert str(failed.exception()) == "an error of the check"


# ---- TLS ------------------------------------------------------------------------------------------------------


def test_both_ports_accept_only_tls(tmp_path: Path) -> None:
    issued = certificate(tmp_path / "tls")
    with running_node(tmp_path / "data", **issued.settings) as node:
        for port in (node.node.name_server_port, node.node.remoting_port):
            with SecureWire(port, issued.roots) as wire:
                assert wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TBW102").code == 0
            with Wire(port) as plain:
                plain.send(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TBW102")
                assert plain.is_closed()


def test_large_answers_and_many_requests_work_over_tls(tmp_path: Path) -> None:
    issued = certificate(tmp_path / "tls")
    with running_node(tmp_path / "data", **issued.settings) as node:
        with SecureWire(node.node.remoting_port, issued.roots) as wire:
            body = os.urandom(1_000_000)
            sent = [
                wire.send(
                    RequestCode.SEND_MESSAGE_V2,
                    body,
                    a="p",
                    b="orders",
                    e=0,
                    f=0,
                    g=1,
                    h=0,
                    i=f"UNIQ_KEY\x01{n:032}",
                )
                for n in range(8)
            ]
            assert {wire.answer_to(opaque).code for opaque in sent} == {0}
            pulled = wire.ask(
                RequestCode.PULL_MESSAGE, consumerGroup="g", topic="orders", queueId=0, queueOffset=0, maxMsgNums=32,
                sysFlag=4, subscription="*", commitOffset=0, suspendTimeoutMillis=0,
            )  # fmt: skip
            assert pulled.code == 0 and body in pulled.body


def test_a_connection_with_an_unfinished_handshake_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_byte, "FIRST_BYTE_S", 0.2)
    monkeypatch.setattr(first_byte, "HANDSHAKE_S", 0.2)
    issued = certificate(tmp_path / "tls")
    with running_node(tmp_path / "data", **issued.settings) as node:
        with Wire(node.node.remoting_port) as silent:
            assert silent.is_closed()
        with Wire(node.node.remoting_port) as half:
            half.send_bytes(first_byte.TLS_RECORD)
            assert half.is_closed()


class SecureWire(Wire):
    """A Wire over TLS."""

    def __init__(self, port: int, roots: str) -> None:
        super().__init__(port)
        context = ssl.create_default_context(cafile=roots)
        self._socket = context.wrap_socket(self._socket, server_hostname="127.0.0.1")
