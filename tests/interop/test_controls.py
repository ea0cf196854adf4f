"""The harness itself must notice the faults that it is for. It needs no stock client, so these tests are fast."""

from __future__ import annotations

import hashlib
import re
import socket
from collections import Counter
from pathlib import Path

import pytest
from tests.interop import environments, stock_clients
from tests.interop.conversation import by_body, is_early
from tests.interop.environments import Missing
from tests.interop.grpc_conversation import came_early
from tests.interop.record import golden, raw, scrubbed
from tests.interop.recorder import recording

from timeball.edges.remoting.codec.codes import RequestCode
from timeball.edges.remoting.codec.frame import Command, Frame, Splitter, decode, encode


def test_an_early_message_is_noticed() -> None:
    assert is_early({"store_ms": 999}, 1_000)
    assert not is_early({"store_ms": 1_000}, 1_000)


def test_a_row_that_comes_early_is_noticed() -> None:
    assert came_early({"store_ms": 999, "due_ms": 1_000})
    assert not came_early({"store_ms": 1_000, "due_ms": 1_000})
    ended = {"due_ms": None, "properties": "1ST_POP_TIME\x01500\x02"}
    assert came_early({"store_ms": 1_499, **ended}, 1_000)
    assert not came_early({"store_ms": 1_500, **ended}, 1_000)


def test_no_two_tests_share_a_topic() -> None:
    """Topics and groups bear their test's name and client: with the same ones twice, one test reads the other's."""
    pages = [path.read_text() for path in Path(__file__).parent.glob("test_grpc_*.py")]
    found = Counter(name for page in pages for name in re.findall(r"^def (test_\w+)", page, re.MULTILINE))
    assert found and max(found.values()) == 1, found.most_common(3)


def test_a_doubled_message_is_noticed() -> None:
    assert by_body([{"body": "a"}, {"body": "b"}]).keys() == {"a", "b"}
    with pytest.raises(AssertionError):
        by_body([{"body": "a"}, {"body": "a"}])


# ---- clients that are not there ------------------------------------------------------------------------------


@pytest.fixture
def no_such_client(monkeypatch: pytest.MonkeyPatch) -> str:
    def make() -> list[str]:
        raise Missing("there is no tin can here")

    monkeypatch.setitem(stock_clients.COMMANDS, "tin can", make)
    monkeypatch.setattr(stock_clients, "_made", {})
    monkeypatch.delenv("TIMEBALL_INTEROP", raising=False)
    return "tin can"


def test_a_missing_client_is_skipped_with_its_reason(no_such_client: str) -> None:
    with pytest.raises(pytest.skip.Exception, match="tin can: there is no tin can here"):
        stock_clients.command(no_such_client)


def test_a_missing_client_fails_where_it_is_required(
    no_such_client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBALL_INTEROP", "required")
    with pytest.raises(pytest.fail.Exception, match="tin can is required"):
        stock_clients.command(no_such_client)


def test_a_tool_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Missing, match="no mvn here"):
        environments.tool("mvn", "maven")


def test_a_package_that_cannot_be_fetched_is_missing() -> None:
    with pytest.raises(Missing, match="could not fetch its packages: no such network"):
        environments.fetch(["sh", "-c", "echo no such network; exit 1"])


@pytest.mark.parametrize(
    "told", ["ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "verifying go.mod: checksum mismatch"]
)
def test_a_wrong_hash_is_no_reason_to_skip(told: str) -> None:
    with pytest.raises(environments.subprocess.CalledProcessError):
        environments.fetch(["sh", "-c", f"echo {told}; exit 1"])


def test_jars_that_are_not_the_locked_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jar").write_bytes(b"a")
    right = hashlib.sha256(b"a").hexdigest()
    environments.check(tmp_path, f"{right}  a.jar\n")
    for wrong in ("", f"{right}  a.jar\n{right}  b.jar\n", f"{'0' * 64}  a.jar\n"):
        with pytest.raises(ValueError, match=r"[ab]\.jar"):
            environments.check(tmp_path, wrong)


# ---- recording -------------------------------------------------------------------------------------------------


def test_the_proxy_keeps_what_is_sent_and_passes_it_on() -> None:
    asked = encode(Command(code=RequestCode.HEART_BEAT, opaque=1, body=b"{}"))
    with socket.create_server(("127.0.0.1", 0)) as server, recording() as recorder:
        recorder.forward_to = f"127.0.0.1:{server.getsockname()[1]}"
        host, port = recorder.address.split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(asked)
            broker, _ = server.accept()
            with broker:
                assert broker.recv(len(asked), socket.MSG_WAITALL) == asked
                broker.sendall(b"answer")
                assert client.recv(6, socket.MSG_WAITALL) == b"answer"
        assert recorder.streams() == [asked]
        assert golden(recorder) == asked


def test_this_machine_is_not_in_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    name, other = b"10.20.30.40", b"11.11.11.11"
    monkeypatch.setattr("tests.interop.record.machine_names", lambda: iter([(name, other)]))
    frame = Frame(0, b'{"code":34,"extFields":{"a":"10.20.30.40@17"}}', b"10.20.30.40")
    [kept] = Splitter().feed(raw(scrubbed(frame)))
    assert kept.body == other
    assert decode(kept).ext == {"a": "11.11.11.11@17"}
