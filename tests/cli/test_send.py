"""`timeball send`: what is printed when the broker has it, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.in_process import run_here
from tests.cli.processes import COMMAND, running
from tests.cli.small_disk import on_small_disk


def test_the_id_is_on_stdout_and_nothing_else(endpoint: str) -> None:
    """So that a script can keep it."""
    ended = run_here("send", "sent", "hello", "--endpoint", endpoint)
    assert ended.returncode == 0
    assert re.fullmatch(r"[0-9a-f]{32}\n", ended.stdout)
    assert ended.stderr == ""


def test_json_is_the_receipt(endpoint: str) -> None:
    """A message without a delay has no instant."""
    ended = run_here("send", "sent", "hello", "--id", "mine", "--json", "--endpoint", endpoint)
    receipt = json.loads(ended.stdout)
    assert receipt["id"] == "mine"
    assert receipt["due_ms"] is None
    assert receipt["seq"] > 0 and receipt["store_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no spaces allowed", "x"], "topic"),
        (["t" * 300, "x"], "topic"),
        (["sent", "x", "--id", "i" * 5_000], "unique_key"),
        (["sent", "--lines", "nowhere.txt"], "--lines nowhere.txt"),
        (["sent", "x", "--property", "=value"], "NAME=VALUE"),
    ],
    ids=["blank", "long topic", "long id", "no file", "no name"],
)
def test_a_refusal_names_what_is_wrong(endpoint: str, arguments: list[str], named: str) -> None:
    """Exit code 2, one sentence, nothing on stdout."""
    ended = run_here("send", *arguments, "--endpoint", endpoint)
    assert ended.returncode == 2, ended.stderr
    assert named in ended.stderr
    assert ended.stdout == ""
    assert len(ended.stderr.strip().splitlines()) == 1


def test_an_invalid_endpoint_is_refused() -> None:
    """With the form that is wanted."""
    ended = run_here("send", "t", "x", "--endpoint", "localhost:7400")
    assert ended.returncode == 2
    assert "grpc://host:port" in ended.stderr


def test_the_endpoint_may_come_from_the_environment(endpoint: str) -> None:
    """TIMEBALL_ENDPOINT, as docs/operations.md says."""
    assert run_here("send", "sent", "x", TIMEBALL_ENDPOINT=endpoint).returncode == 0


def test_lines_that_are_refused_say_which_ones_were_sent(endpoint: str, tmp_path: Path) -> None:
    """The lines of a file are sent in parts of 50,000; a part is accepted whole or not at all."""
    file = tmp_path / "lines.txt"
    file.write_bytes(b"x\n" * 50_010 + b"y" * 5_000_000 + b"\n")
    ended = run_here("send", "parts", "--lines", str(file), "--endpoint", endpoint)
    assert ended.returncode == 2, ended
    told = " ".join(ended.stderr.split())
    assert "lines 50001 to 50011, here rows 0 to 10" in told and "50000 lines before these were sent" in told
    assert "body: more than 4194304 bytes" in told


def test_a_full_disk_refuses_messages_and_says_so(tmp_path: Path) -> None:
    """Exit code 5, and what is there can still be read: the broker goes on."""
    serve = [*COMMAND, "serve", "--json", "--port", "0", "--data", str(tmp_path / "disk" / "d")]
    (tmp_path / "disk").mkdir()
    command = on_small_disk(tmp_path / "disk", 16, [*serve, "--segment-bytes", "4MiB"])
    with running(command=command) as server:
        uri = server.wait_line(event="ready")["endpoint"]
        body = "x" * 1_000_000
        codes = []
        for _ in range(30):
            ended = run_here("send", "big", "-", "--endpoint", uri, text=body)
            codes.append(ended.returncode)
            if ended.returncode:
                break
        assert codes[0] == 0 and codes[-1] == 5, codes
        assert "disk full" in ended.stderr and "free some space" in ended.stderr
        assert "NEW MESSAGES ARE REFUSED" in run_here("status", "--endpoint", uri, COLUMNS="500").stdout
        disk = json.loads(run_here("status", "--json", "--endpoint", uri).stdout)["disk"]
        assert "disk full" in disk["no_room"] and disk["free_bytes"] < 4 << 20
        pulled = run_here("pull", "big", "--peek", "--max", "1", "--json", "--endpoint", uri)
        assert json.loads(pulled.stdout)["body"] == body


def test_a_disk_too_small_to_begin_with_is_a_storage_error(tmp_path: Path) -> None:
    """Said at the start, not with the first message."""
    (tmp_path / "disk").mkdir()
    serve = [*COMMAND, "serve", "--json", "--port", "0", "--data", str(tmp_path / "disk" / "d")]
    with running(command=on_small_disk(tmp_path / "disk", 16, serve)) as server:
        assert server.wait_end() == 5
        assert any("disk full" in line for line in server.errors)
