"""Calls: typed answers, repeated only if that is safe, with a clear error if there is no broker."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from tests.accounts import guarded_node, keys
from tests.certificates import Certificate, certificate
from tests.client.cutting_proxy import cutting_proxy
from tests.node_fixture import BOUND_S, RunningNode, running_node

from timeball import Timeball
from timeball.client import calls
from timeball.client.attempts import RETRY_PAUSES_S, NotSent
from timeball.client.calls import Calls, translate, translated
from timeball.client.credentials import ACCESS_KEY, SECRET_KEY, TLS_NAME, TLS_ROOTS
from timeball.client.network import run
from timeball.model import wire
from timeball.model.errors import (
    NotFound,
    OutOfRange,
    RequestError,
    TimeballError,
    Unauthorized,
    Unavailable,
)
from timeball.spark.endpoint import Endpoint

NOBODY = "grpc://127.0.0.1:1"


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("endpoint", ["", "localhost:7400", "http://localhost:7400", "grpc://"])
def test_an_endpoint_must_look_like_one(endpoint: str) -> None:
    with pytest.raises((RequestError, Unavailable), match="grpc://"):
        Calls(endpoint, 1_000).action("status", {}, dict[str, Any])


def test_answers_are_typed(node: RunningNode) -> None:
    there = Calls(node.endpoint, 30_000)
    assert there.action("status", {}, dict[str, Any])["log"]["next_seq"] >= 0
    answer = there.action("source_positions", b'{"source":"none"}', dict[str, dict[int, int]])
    assert answer == {"positions": {}}
    there.close()


def test_the_brokers_error_arrives_as_its_class(node: RunningNode) -> None:
    there = Calls(node.endpoint, 30_000)
    with pytest.raises(NotFound, match="nowhere"):
        there.action("queues", {"topic": "nowhere"}, dict[str, Any])
    with pytest.raises(RequestError, match="rows"):
        there.action("reserve", {"rows": 0}, dict[str, int])
    there.close()


def test_errors_in_the_middle_of_a_stream_are_ours_too(node: RunningNode) -> None:
    there = Calls(node.endpoint, 30_000)
    reader = there.stream({"read": "log", "from_seq": 0, "to_seq": 2**40})
    with pytest.raises(OutOfRange):
        reader.read_all()
    there.close()


def test_a_read_from_a_lost_machine_ends_by_a_ping(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of a log has no time limit."""
    quick = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    options = [(name, 300 if name in quick else value) for name, value in calls._CHANNEL]
    monkeypatch.setattr(calls, "_CHANNEL", options)
    with cutting_proxy(node.endpoint) as proxy:
        there = Calls(proxy.endpoint, 30_000)
        next_seq = there.action("status", {}, dict[str, Any])["log"]["next_seq"]
        proxy.hold()
        with pytest.raises(Unavailable):
            list(there.batches(wire.ReadLog(from_seq=1, to_seq=next_seq)))
        there.close()


class Counted(Calls):
    """Calls that count their attempts."""

    made = 0

    def pauses(self) -> Iterator[tuple[float, bool]]:
        for pause in super().pauses():
            self.made += 1
            yield pause


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("verb", ["status", "reserve"])
def test_nobody_there_is_unavailable_after_some_attempts(verb: str) -> None:
    """Also for a call that must not be repeated: without a connection it was not sent."""
    there = Counted(NOBODY, 30_000)
    with pytest.raises(NotSent, match=NOBODY):
        there.action(verb, {"rows": 1} if verb == "reserve" else {}, dict[str, Any])
    assert there.made == 1 + len(RETRY_PAUSES_S)
    there.close()


class Gone(flight.FlightServerBase):
    """A broker that disappears once it has the call."""

    def do_action(self, context: object, action: flight.Action) -> None:
        raise flight.FlightUnavailableError("Socket closed")


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(("verb", "attempts"), [("status", 1 + len(RETRY_PAUSES_S)), ("reserve", 1)])
def test_a_call_that_has_left_is_repeated_only_if_that_does_no_harm(verb: str, attempts: int) -> None:
    with Gone("grpc://127.0.0.1:0") as server:
        there = Counted(f"grpc://127.0.0.1:{server.port}", 30_000)
        with pytest.raises(Unavailable) as caught:
            there.action(verb, {"rows": 1} if verb == "reserve" else {}, dict[str, Any])
        assert there.made == attempts and type(caught.value) is Unavailable
        there.close()


def test_a_call_that_is_tried_again_does_not_outlive_its_time() -> None:
    tried = []

    class Counted(Calls):
        def pauses(self) -> Iterator[tuple[float, bool]]:
            for pause in super().pauses():
                tried.append(pause)
                yield pause

    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and answers none
        there = Counted(f"grpc://127.0.0.1:{silent.getsockname()[1]}", 100)
        with pytest.raises(Unavailable):
            there.action("status", {}, dict[str, Any])
    assert len(tried) <= 2, "the second attempt has no time left"
    there.close()


def test_a_closed_client_says_so_and_waits_for_nothing() -> None:
    nobody = Calls(NOBODY, 30_000)

    async def attempt(limit_s: float) -> None:
        nobody.close()
        raise NotSent("nobody")

    with pytest.raises(Unavailable, match="closed"):
        run(nobody.with_retries(attempt, 30_000))
    with pytest.raises(RequestError, match="closed"):
        nobody.action("status", {}, dict[str, Any])


def test_a_safe_call_outlives_a_restart(data: Path) -> None:
    with running_node(data) as node:
        there = Calls(node.endpoint, 30_000)
        before = there.action("status", {}, dict[str, Any])
        node.stop()
        restart = threading.Thread(target=node.start)
        restart.start()
        after = there.action("status", {}, dict[str, Any])
        restart.join(BOUND_S)
        assert after["log"]["first_seq"] == before["log"]["first_seq"]
        there.close()


def test_the_next_node_is_asked_when_one_does_not_answer(node: RunningNode) -> None:
    there = Calls(f"{NOBODY},{node.endpoint.removeprefix('grpc://')}", 30_000)
    assert there.action("status", {}, dict[str, Any])["log"]["next_seq"] >= 0
    assert there.endpoint == node.endpoint, "the one that answers is kept"
    there.close()


def test_a_send_goes_to_the_next_node_when_one_does_not_answer(node: RunningNode) -> None:
    with Timeball(f"{NOBODY},{node.endpoint.removeprefix('grpc://')}") as ball:
        assert ball.send_many(pa.table({"body": [b"hello"]}), topic="nodes").rows == 1


@pytest.mark.parametrize(
    "endpoint", ["grpc://,127.0.0.1:1", "grpc://127.0.0.1:1,", "127.0.0.1:1,127.0.0.1:2"]
)
def test_each_of_several_addresses_must_look_like_one(endpoint: str) -> None:
    with pytest.raises(RequestError, match="grpc://host:port"):
        Calls(endpoint, 1_000)


ENDPOINT = "grpc://127.0.0.1:1"


def test_codes_become_classes_with_their_text() -> None:
    wire = "no topic 'x'. Detail: Failed. gRPC client debug context: UNKNOWN:no topic. Client context: OK"
    error = translate(flight.FlightServerError(wire, extra_info=b"not_found"), ENDPOINT)
    assert type(error) is NotFound and str(error) == "no topic 'x'"


def test_an_unknown_code_becomes_the_base_class() -> None:
    assert type(translate(flight.FlightServerError("x", extra_info=b"new"), ENDPOINT)) is TimeballError
    assert type(translate(flight.FlightServerError("x", extra_info=b"\xff"), ENDPOINT)) is TimeballError


@pytest.mark.parametrize(
    "error",
    [flight.FlightUnavailableError("x"), flight.FlightTimedOutError("x"), flight.FlightCancelledError("x")],
)
def test_no_answer_is_unavailable_and_names_the_endpoint(error: flight.FlightError) -> None:
    ours = translate(error, ENDPOINT)
    assert type(ours) is Unavailable and ENDPOINT in str(ours)


def test_a_connection_that_broke_is_unavailable() -> None:
    assert type(translate(flight.FlightInternalError("stream broke"), ENDPOINT)) is Unavailable


def test_another_server_is_named_as_such() -> None:
    ours = translate(pa.ArrowInvalid("what?"), ENDPOINT)
    assert type(ours) is TimeballError and "something else than a broker" in str(ours)


@pytest.mark.usefixtures("no_pauses")
def test_a_web_server_that_speaks_http_2_is_no_broker() -> None:
    settings, not_found = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), bytes((0, 0, 1, 1, 5, 0, 0, 0, 1, 0x8D))

    def serve(listening: socket.socket) -> None:
        for _ in range(10):
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.sendall(settings)
                heard = b""
                while b"DoAction" not in heard and (data := connection.recv(4_096)):
                    heard += data
                connection.sendall(not_found)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4_096):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        endpoint = f"grpc://127.0.0.1:{listening.getsockname()[1]}"
        with Timeball(endpoint, timeout_ms=5_000) as ball, pytest.raises(Unavailable) as told:
            ball.reserve(1)
        assert endpoint in str(told.value) and "7400" in str(told.value)


def test_ours_pass_and_others_are_left_alone() -> None:
    with pytest.raises(NotFound), translated(ENDPOINT):
        raise NotFound("x")
    with pytest.raises(KeyError), translated(ENDPOINT):
        raise KeyError("x")
    with pytest.raises(Unavailable), translated(ENDPOINT):
        raise flight.FlightUnavailableError("x")


# ---- dialing with credentials and TLS ----------------------------------------------------------------------

ROW = pa.table({"body": [b"x"]})


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without credentials."""
    for name in (ACCESS_KEY, SECRET_KEY, TLS_ROOTS, TLS_NAME):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, issued: Certificate) -> Iterator[RunningNode]:
    """A node with TLS and access control."""
    with guarded_node(tmp_path_factory.mktemp("guarded"), **issued.settings) as running:
        yield running


def tls_endpoint(node: RunningNode) -> str:
    return f"grpc+tls://127.0.0.1:{node.node.port}"


@pytest.mark.usefixtures("no_credentials")
def test_credentials_of_the_environment_open_columns_over_tls(
    guarded: RunningNode, issued: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TLS_ROOTS, issued.roots)
    with Timeball(tls_endpoint(guarded)) as ball, pytest.raises(Unauthorized):
        ball.send_many(ROW, topic="orders")
    root = keys("root")
    monkeypatch.setenv(ACCESS_KEY, root["access_key"])
    monkeypatch.setenv(SECRET_KEY, root["secret_key"])
    with Timeball(tls_endpoint(guarded)) as ball:
        ((seq, _),) = ball.send_many(ROW, topic="orders").ranges
        assert ball.send_many(pa.table({"body": [b"x"] * 100}), topic="orders").rows == 100
        assert ball.read_log(seq, seq + 101).read_all().num_rows == 101
    with Endpoint(tls_endpoint(guarded)) as pipeline:
        assert pipeline.status().log.durable_seq >= seq
        assert sum(batch.num_rows for batch in pipeline.read_log(seq, seq + 101)) == 101


@pytest.mark.usefixtures("no_credentials")
def test_a_certificate_may_have_another_name_than_the_dialed_host_if_tls_name_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = certificate(tmp_path / "tls", "broker.example")
    with guarded_node(tmp_path, **issued.settings) as node:
        monkeypatch.setenv(TLS_NAME, "broker.example")
        with Timeball(tls_endpoint(node), tls_roots=Path(issued.roots).read_bytes(), **keys("shop")) as ball:
            assert ball.send_many(ROW, topic="orders").ranges == [(2, 1)]


@pytest.mark.usefixtures("no_credentials")
def test_a_broker_with_an_untrusted_certificate_is_unavailable(
    guarded: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timeball.client.attempts.RETRY_PAUSES_S", RETRY_PAUSES_S[:0])
    other_roots = Path(certificate(tmp_path).roots).read_bytes()
    with Timeball(tls_endpoint(guarded), tls_roots=other_roots, **keys("shop")) as ball:
        with pytest.raises(Unavailable, match="certificate verify failed"):
            ball.reserve(1)


@pytest.mark.usefixtures("no_credentials")
def test_a_call_without_tls_to_a_broker_with_tls_is_unavailable(
    guarded: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timeball.client.attempts.RETRY_PAUSES_S", RETRY_PAUSES_S[:0])
    with Timeball(guarded.endpoint, **keys("shop")) as ball, pytest.raises(Unavailable):
        ball.reserve(1)
