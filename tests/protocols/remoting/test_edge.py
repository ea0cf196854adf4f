"""The two ports: opened, refused, bounded, closed."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from tests.node_fixture import RunningNode, eventually, running_node
from tests.protocols.remoting.wire import Wire

from timeball.errors import SetupError
from timeball.protocols.remoting import edge
from timeball.protocols.remoting.codec.codes import RequestCode
from timeball.protocols.remoting.codec.send_header import SEND_CODES


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


def test_a_client_that_takes_nothing_does_not_hold_up_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "LAST_ANSWERS_S", 0.05)
    running = RunningNode(tmp_path)
    running.start()
    wire = Wire.to(running)
    assert wire.ask(105, topic="TBW102").code == 0
    remoting = running.node.remoting
    assert remoting is not None
    [connection] = remoting._connections
    # More than the kernel's buffers hold, and nobody reads.
    running.loop.call_soon_threadsafe(connection.write, bytes(32 * 1024 * 1024))
    running.stop()
    wire.close()


def test_every_request_is_in_the_documentation(node: RunningNode) -> None:
    """And nothing else is, as far as the tables of requests go."""
    page = (Path(__file__).parents[3] / "docs/protocols/remoting.md").read_text()
    section = page.split("## Requests")[1].split("## Limits")[0]
    told: dict[int, str] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        codes = re.findall(r"\d+", cells[0]) if cells[0][:1].isdigit() else []
        told |= dict(zip(map(int, codes), cells[1].split(", ") if codes else [], strict=True))
    remoting = node.node.remoting
    assert remoting is not None
    answered = {int(code) for code in remoting._dispatch._handlers} | SEND_CODES
    assert told == {code: RequestCode(code).name for code in answered}


def test_a_watch_that_fails_stops_the_node_and_not_just_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timeball.protocols.remoting.edge.DEADLINES_LOOK_S", 0.01)

    def broken() -> None:
        raise ValueError("a bug of ours")

    with running_node(tmp_path) as running:
        remoting, failed = running.node.remoting, running.node._failed
        assert remoting is not None and failed is not None
        remoting._heartbeats.expire = broken  # type: ignore[method-assign]
        eventually(failed.done, "the node hears of it")
        assert str(failed.exception()) == "a bug of ours"
