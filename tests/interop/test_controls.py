"""The harness of these tests notices the faults that it is made for. These tests need no stock client."""

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
from tests.interop.record import encode_frame, golden, without_names
from tests.interop.recorder import recording

from timeball.edges.remoting.codec.codes import RequestCode
from timeball.edges.remoting.codec.frame import Command, Frame, Splitter, decode, encode


def test_an_early_message_is_noticed() -> None:
    assert is_early({"store_ms": 999}, 1_000)
    assert not is_early({"store_ms": 1_000}, 1_000)


def test_a_row_that_comes_early_is_noticed() -> None:
    """A row without a due time is that of a message whose lease has ended, here 1,000 ms after its first delivery."""
    assert came_early({"store_ms": 999, "due_ms": 1_000})
    assert not came_early({"store_ms": 1_000, "due_ms": 1_000})
    ended = {"due_ms": None, "properties": "1ST_POP_TIME\x01500\x02"}
    assert came_early({"store_ms": 1_499, **ended}, 1_000)
    assert not came_early({"store_ms": 1_500, **ended}, 1_000)


def test_no_two_tests_over_grpc_share_a_topic() -> None:
    """Topics and groups have the names of the test and of the client. Tests with one name would share messages."""
    modules = [path.read_text() for path in Path(__file__).parent.glob("test_grpc_*.py")]
    counts = Counter(name for text in modules for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    assert counts and max(counts.values()) == 1, counts.most_common(3)


def test_a_doubled_message_is_noticed() -> None:
    assert by_body([{"body": "a"}, {"body": "b"}]).keys() == {"a", "b"}
    with pytest.raises(AssertionError):
        by_body([{"body": "a"}, {"body": "a"}])


# ---- missing clients -----------------------------------------------------------------------------------------


@pytest.fixture
def no_such_client(monkeypatch: pytest.MonkeyPatch) -> str:
    """Add a client that is missing and not required, and return its name."""

    def fail() -> list[str]:
        raise Missing("there is no absent client here")

    monkeypatch.setitem(stock_clients.COMMANDS, "absent client", fail)
    monkeypatch.setattr(stock_clients, "_made", {})
    monkeypatch.delenv("TIMEBALL_INTEROP", raising=False)
    return "absent client"


def test_a_missing_client_is_skipped_with_its_reason(no_such_client: str) -> None:
    with pytest.raises(pytest.skip.Exception, match="absent client: there is no absent client here"):
        stock_clients.command(no_such_client)


def test_a_missing_client_fails_where_it_is_required(
    no_such_client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBALL_INTEROP", "required")
    with pytest.raises(pytest.fail.Exception, match="absent client is required"):
        stock_clients.command(no_such_client)


def test_the_error_of_a_missing_tool_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Missing, match="no mvn here"):
        environments.tool("mvn", "maven")


def test_a_package_that_cannot_be_fetched_is_missing() -> None:
    with pytest.raises(Missing, match="could not fetch its packages: no such network"):
        environments.fetch(["sh", "-c", "echo no such network; exit 1"])


@pytest.mark.parametrize(
    "output", ["ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "verifying go.mod: checksum mismatch"]
)
def test_a_wrong_hash_is_no_reason_to_skip(output: str) -> None:
    with pytest.raises(environments.subprocess.CalledProcessError):
        environments.fetch(["sh", "-c", f"echo {output}; exit 1"])


def test_jars_that_are_not_the_locked_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jar").write_bytes(b"a")
    right = hashlib.sha256(b"a").hexdigest()
    environments.check(tmp_path, f"{right}  a.jar\n")
    for wrong in ("", f"{right}  a.jar\n{right}  b.jar\n", f"{'0' * 64}  a.jar\n"):
        with pytest.raises(ValueError, match=r"[ab]\.jar"):
            environments.check(tmp_path, wrong)


# ---- recording -------------------------------------------------------------------------------------------------


def test_the_recorder_records_and_forwards_what_is_sent() -> None:
    request = encode(Command(code=RequestCode.HEART_BEAT, opaque=1, body=b"{}"))
    with socket.create_server(("127.0.0.1", 0)) as server, recording() as recorder:
        recorder.forward_to = f"127.0.0.1:{server.getsockname()[1]}"
        host, port = recorder.address.split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(request)
            broker, _ = server.accept()
            with broker:
                assert broker.recv(len(request), socket.MSG_WAITALL) == request
                broker.sendall(b"answer")
                assert client.recv(6, socket.MSG_WAITALL) == b"answer"
        assert recorder.streams() == [request]
        assert golden(recorder) == request


def test_a_recording_does_not_contain_the_name_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    name, other = b"10.20.30.40", b"11.11.11.11"
    monkeypatch.setattr("tests.interop.record.machine_names", lambda: iter([(name, other)]))
    frame = Frame(0, b'{"code":34,"extFields":{"a":"10.20.30.40@17"}}', b"10.20.30.40")
    [recorded] = Splitter().feed(encode_frame(without_names(frame)))
    assert recorded.body == other
    assert decode(recorded).ext == {"a": "11.11.11.11@17"}
