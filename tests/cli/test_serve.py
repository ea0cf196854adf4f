"""`timeball serve`: the ready line, the end, and what keeps it from starting."""

import json
import signal
from pathlib import Path

import pytest
from tests.cli.processes import running, serving, timeball

from timeball import Timeball, __version__


def test_the_ready_line_is_there_when_a_client_can_connect(tmp_path: Path) -> None:
    """And says all that a program needs to find the broker."""
    with running("serve", "--json", "--port", "0", "--data", str(tmp_path / "d")) as server:
        ready = server.wait_line(event="ready")
        with Timeball(ready["endpoint"]) as ball:
            assert ball.topics() == {}
        assert ready["pid"] == server.pid
        assert ready["version"] == __version__
        assert ready["data"] == str(tmp_path / "d")
        assert ready["endpoint"].endswith(f":{ready['port']}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_it_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """Exit code 0, nothing on stderr, and what was acknowledged is there again."""
    data = str(tmp_path / "d")
    with running("serve", "--json", "--port", "0", "--data", data) as server:
        uri = server.wait_line(event="ready")["endpoint"]
        assert timeball("send", "orders", "kept", "--endpoint", uri).returncode == 0
        assert server.end(number) == 0
        assert server.errors == []
    with serving(Path(data)) as uri:
        pulled = timeball("pull", "orders", "--json", "--endpoint", uri)
        assert json.loads(pulled.stdout)["body"] == "kept"


def test_a_relative_folder_is_told_to_others_as_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's workers have a working folder of their own."""
    monkeypatch.chdir(tmp_path)
    with serving(Path("d")) as uri, Timeball(uri) as ball:
        assert ball.status()["table"]["uri"] == str(tmp_path / "d" / "pending")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    """gRPC would share the port silently; we do not."""
    with serving(tmp_path / "a") as uri:
        port = uri.rpartition(":")[2]
        ended = timeball("serve", "--port", port, "--data", str(tmp_path / "b"))
    assert ended.returncode == 4
    assert f"--port {port}" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_folder_in_use_is_named(tmp_path: Path) -> None:
    """Two brokers on one log would be the end of it."""
    with serving(tmp_path / "d"):
        ended = timeball("serve", "--port", "0", "--data", str(tmp_path / "d"))
    assert ended.returncode == 4
    assert "in use" in ended.stderr and str(tmp_path / "d") in ended.stderr


def test_a_folder_of_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    """Says which format it has and which one this version reads."""
    data = tmp_path / "d"
    with serving(data):
        pass
    facts = json.loads((data / "FORMAT").read_text())
    (data / "FORMAT").write_text(json.dumps({**facts, "format": facts["format"] + 1}))
    before = sorted((p.name, p.stat().st_mtime_ns) for p in data.rglob("*") if p.is_file())
    ended = timeball("serve", "--port", "0", "--data", str(data))
    assert ended.returncode == 4
    assert "newer" in ended.stderr and str(facts["format"] + 1) in ended.stderr
    assert sorted((p.name, p.stat().st_mtime_ns) for p in data.rglob("*") if p.is_file()) == before


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """Nobody's photographs become a message log."""
    (tmp_path / "holiday.jpg").write_bytes(b"\xff\xd8")
    ended = timeball("serve", "--port", "0", "--data", str(tmp_path))
    assert ended.returncode == 4
    assert "holiday.jpg" in ended.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["holiday.jpg"]


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    """--data wants a folder."""
    (tmp_path / "d").write_text("")
    ended = timeball("serve", "--port", "0", "--data", str(tmp_path / "d"))
    assert ended.returncode == 4
    assert "--data" in ended.stderr


def test_options_come_from_the_environment_and_from_a_file(tmp_path: Path) -> None:
    """The environment wins over the file."""
    file = tmp_path / "timeball.toml"
    file.write_text(f'data = "{tmp_path / "from-file"}"\nport = 1\n')
    with running("serve", "--json", "--settings", str(file), TIMEBALL_PORT="0") as server:
        ready = server.wait_line(event="ready")
    assert ready["data"] == str(tmp_path / "from-file")
    assert ready["port"] > 1
