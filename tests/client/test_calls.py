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

NO_BROKER = "grpc://127.0.0.1:1"  # nothing listens on this port


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("endpoint", ["", "localhost:7400", "http://localhost:7400", "grpc://"])
def test_a_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises((RequestError, Unavailable), match="grpc://"):
        Calls(endpoint, 1_000).action("status", {}, dict[str, Any])


def test_an_answer_is_decoded_as_the_given_type(node: RunningNode) -> None:
    broker = Calls(node.endpoint, 30_000)
    assert broker.action("status", {}, dict[str, Any])["log"]["next_seq"] >= 0
    answer = broker.action("source_positions", b'{"source":"none"}', dict[str, dict[int, int]])
    assert answer == {"positions": {}}
    broker.close()


def test_an_error_of_the_broker_is_raised_as_the_class_of_its_code(node: RunningNode) -> None:
    broker = Calls(node.endpoint, 30_000)
    with pytest.raises(NotFound, match="nowhere"):
        broker.action("queues", {"topic": "nowhere"}, dict[str, Any])
    with pytest.raises(RequestError, match="rows"):
        broker.action("reserve", {"rows": 0}, dict[str, int])
    broker.close()


def test_an_error_within_a_stream_is_raised_as_an_error_of_timeball(node: RunningNode) -> None:
    broker = Calls(node.endpoint, 30_000)
    reader = broker.stream({"read": "log", "from_seq": 0, "to_seq": 2**40})
    with pytest.raises(OutOfRange):
        reader.read_all()
    broker.close()


def test_a_read_from_a_machine_that_does_not_answer_ends_after_a_ping(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of a log has no time limit, so only the unanswered ping of gRPC ends it."""
    ping_options = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    options = [(name, 300 if name in ping_options else value) for name, value in calls._CHANNEL]
    monkeypatch.setattr(calls, "_CHANNEL", options)
    with cutting_proxy(node.endpoint) as proxy:
        broker = Calls(proxy.endpoint, 30_000)
        next_seq = broker.action("status", {}, dict[str, Any])["log"]["next_seq"]
        proxy.hold()
        with pytest.raises(Unavailable):
            list(broker.batches(wire.ReadLog(from_seq=1, to_seq=next_seq)))
        broker.close()


class CountedCalls(Calls):
    """Calls that count their attempts."""

    attempts = 0

    def pauses(self) -> Iterator[tuple[float, bool]]:
        for pause in super().pauses():
            self.attempts += 1
            yield pause


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("verb", ["status", "reserve"])
def test_a_call_without_a_broker_is_not_sent_after_all_attempts(verb: str) -> None:
    """`reserve` must not be carried out twice, but without a connection it was not sent."""
    broker = CountedCalls(NO_BROKER, 30_000)
    with pytest.raises(NotSent, match=NO_BROKER):
        broker.action(verb, {"rows": 1} if verb == "reserve" else {}, dict[str, Any])
    assert broker.attempts == 1 + len(RETRY_PAUSES_S)
    broker.close()


class DisappearingBroker(flight.FlightServerBase):
    """A broker whose connection breaks when it has received the call."""

    def do_action(self, context: object, action: flight.Action) -> None:
        raise flight.FlightUnavailableError("Socket closed")


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(("verb", "attempts"), [("status", 1 + len(RETRY_PAUSES_S)), ("reserve", 1)])
def test_a_call_whose_answer_is_lost_is_repeated_only_if_it_is_repeatable(verb: str, attempts: int) -> None:
    with DisappearingBroker("grpc://127.0.0.1:0") as server:
        broker = CountedCalls(f"grpc://127.0.0.1:{server.port}", 30_000)
        with pytest.raises(Unavailable) as caught:
            broker.action(verb, {"rows": 1} if verb == "reserve" else {}, dict[str, Any])
        assert broker.attempts == attempts and type(caught.value) is Unavailable
        broker.close()


def test_further_attempts_do_not_extend_the_time_limit_of_a_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and answers none
        broker = CountedCalls(f"grpc://127.0.0.1:{silent.getsockname()[1]}", 100)
        with pytest.raises(Unavailable):
            broker.action("status", {}, dict[str, Any])
    assert broker.attempts <= 2, "the second attempt has no time left"
    broker.close()


def test_closing_a_client_ends_the_pause_of_a_call_and_refuses_further_calls() -> None:
    broker = Calls(NO_BROKER, 30_000)

    async def attempt(limit_s: float) -> None:
        broker.close()
        raise NotSent("no broker")

    with pytest.raises(Unavailable, match="closed"):
        run(broker.with_retries(attempt, 30_000))
    with pytest.raises(RequestError, match="closed"):
        broker.action("status", {}, dict[str, Any])


def test_a_repeatable_call_succeeds_during_a_restart(data: Path) -> None:
    with running_node(data) as node:
        broker = Calls(node.endpoint, 30_000)
        before = broker.action("status", {}, dict[str, Any])
        node.stop()
        restart = threading.Thread(target=node.start)
        restart.start()
        after = broker.action("status", {}, dict[str, Any])
        restart.join(BOUND_S)
        assert after["log"]["first_seq"] == before["log"]["first_seq"]
        broker.close()


def test_a_call_goes_to_the_next_node_if_the_first_does_not_answer(node: RunningNode) -> None:
    cluster = Calls(f"{NO_BROKER},{node.endpoint.removeprefix('grpc://')}", 30_000)
    assert cluster.action("status", {}, dict[str, Any])["log"]["next_seq"] >= 0
    assert cluster.endpoint == node.endpoint, "later calls go to the node that has answered"
    cluster.close()


def test_a_send_of_columns_goes_to_the_next_node_if_the_first_does_not_answer(node: RunningNode) -> None:
    with Timeball(f"{NO_BROKER},{node.endpoint.removeprefix('grpc://')}") as ball:
        assert ball.send_many(pa.table({"body": [b"hello"]}), topic="nodes").rows == 1


@pytest.mark.parametrize(
    "endpoint", ["grpc://,127.0.0.1:1", "grpc://127.0.0.1:1,", "127.0.0.1:1,127.0.0.1:2"]
)
def test_a_malformed_list_of_nodes_is_refused(endpoint: str) -> None:
    with pytest.raises(RequestError, match="grpc://host:port"):
        Calls(endpoint, 1_000)


ENDPOINT = "grpc://127.0.0.1:1"


def test_a_code_of_the_broker_becomes_its_class_with_the_text_without_debug_context() -> None:
    flight_text = (
        "no topic 'x'. Detail: Failed. gRPC client debug context: UNKNOWN:no topic. Client context: OK"
    )
    error = translate(flight.FlightServerError(flight_text, extra_info=b"not_found"), ENDPOINT)
    assert type(error) is NotFound and str(error) == "no topic 'x'"


def test_an_unknown_code_becomes_timeballerror() -> None:
    assert type(translate(flight.FlightServerError("x", extra_info=b"new"), ENDPOINT)) is TimeballError
    assert type(translate(flight.FlightServerError("x", extra_info=b"\xff"), ENDPOINT)) is TimeballError


@pytest.mark.parametrize(
    "error",
    [flight.FlightUnavailableError("x"), flight.FlightTimedOutError("x"), flight.FlightCancelledError("x")],
)
def test_an_error_without_an_answer_is_unavailable_and_names_the_endpoint(error: flight.FlightError) -> None:
    translated_error = translate(error, ENDPOINT)
    assert type(translated_error) is Unavailable and ENDPOINT in str(translated_error)


def test_a_broken_connection_is_unavailable() -> None:
    assert type(translate(flight.FlightInternalError("stream broke"), ENDPOINT)) is Unavailable


def test_an_answer_of_another_server_becomes_a_timeballerror_that_says_so() -> None:
    translated_error = translate(pa.ArrowInvalid("what?"), ENDPOINT)
    assert type(translated_error) is TimeballError and "something else than a broker" in str(translated_error)


@pytest.mark.usefixtures("no_pauses")
def test_a_web_server_with_http_2_is_unavailable_with_a_hint_about_the_port() -> None:
    # Frames of HTTP/2: empty SETTINGS, and HEADERS of stream 1 with END_STREAM and `:status: 404` (HPACK index 13).
    settings, not_found = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), bytes((0, 0, 1, 1, 5, 0, 0, 0, 1, 0x8D))

    def serve(listening: socket.socket) -> None:
        """Refuse the request on each connection as a web server does, and read the client's bytes until its end."""
        for _ in range(10):
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.sendall(settings)
                request = b""
                while b"DoAction" not in request and (data := connection.recv(4_096)):
                    request += data
                connection.sendall(not_found)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4_096):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        endpoint = f"grpc://127.0.0.1:{listening.getsockname()[1]}"
        with Timeball(endpoint, timeout_ms=5_000) as ball, pytest.raises(Unavailable) as caught:
            ball.reserve(1)
        assert endpoint in str(caught.value) and "7400" in str(caught.value)


def test_only_errors_of_flight_are_translated() -> None:
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
    """The certificate of the node `guarded`."""
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
