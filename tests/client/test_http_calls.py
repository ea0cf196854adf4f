"""Calls over HTTP: nodes that do not answer, lost answers, TLS, tokens, and streams with credit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.accounts import access_file, keys
from tests.bounds import BOUND_S
from tests.certificates import certificate
from tests.client.awaited import Dial
from tests.client.cutting_proxy import cutting_proxy
from tests.client.hanging import stopped_node
from tests.node_fixture import RunningNode, eventually, running_node

from timeball import Forbidden, NotLeader, Timeball, TimeballError, Unauthorized, Unavailable
from timeball.client import http_calls
from timeball.client.attempts import Lost, NotNow, NotSent, OpenRead
from timeball.client.http_calls import HttpCalls
from timeball.client.http_codec import LeaseRequest, list_topics
from timeball.client.http_connection import Request
from timeball.client.network import BlockingNetwork, Stream, run
from timeball.model.errors import RequestError

BOTH_CLIENTS = True


def address(node: RunningNode) -> str:
    """The host and port of a node's HTTP interface."""
    return node.http_endpoint.partition("://")[2]


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that answers each connection with the next of these bytes, then closes it. Yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                peer, _ = listening.accept()
                with peer:
                    peer.recv(65_536)
                    peer.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(BOUND_S)


@contextmanager
def hanging_after(begin: bytes) -> Iterator[str]:
    """A server that begins each answer with these bytes, and sends no more. Yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:

        def serve() -> None:
            with suppress(OSError):  # the listening socket is shut down at the end
                while True:
                    peer = stack.enter_context(listening.accept()[0])
                    peer.recv(65_536)
                    peer.sendall(begin)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def answer(status: str, body: str, content_type: str = "application/problem+json") -> bytes:
    """The bytes of an answer of one request."""
    # Without `connection: close`, a fast client would send its next request on a connection that is about to close.
    head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
    return (head + "connection: close\r\n\r\n" + body).encode()


def stream_answer(*chunks: bytes, is_over: bool = False) -> bytes:
    """The bytes of a stream, with its end if `is_over`."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + body + (b"0\r\n\r\n" if is_over else b"")


def received_line(number: int) -> bytes:
    """A line of a stream with one message."""
    return (
        f'{{"receipt":"r{number}","topic":"t","attempt":1,"seq":{number},"queue":0,"offset":{number},'
        '"released":"2026-01-01T00:00:00Z"}\n'
    ).encode()


def problem(status: str, code: str) -> bytes:
    """The bytes of an answer with a problem document whose detail is "because"."""
    return answer(status, f'{{"code":"{code}","detail":"because"}}')


# ---- nodes that do not answer ------------------------------------------------------------------------------


def test_a_call_goes_to_the_next_node_if_the_first_is_not_there(node: RunningNode) -> None:
    with Timeball(f"http://127.0.0.1:1,{address(node)}") as ball:
        assert ball.send("several", "x").seq > 0
        assert ball._operations.endpoint == node.http_endpoint, "later calls go to the node that has answered"


@contextmanager
def silent_node() -> Iterator[str]:
    """The address of a node that does not answer: its system drops connections, because its backlog is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, ExitStack() as stack:
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_connection_attempt_leaves_time_for_the_next_node(node: RunningNode, dial: Dial) -> None:
    with silent_node() as silent:
        for timeout_ms in (3_000, 30_000):  # the attempt to connect must end before this time limit
            with dial(f"http://{silent},{address(node)}", timeout_ms=timeout_ms) as ball:
                assert ball.send("silent", "x").seq > 0
        with dial(f"http://{silent}", timeout_ms=100) as ball, pytest.raises(NotSent, match="timed out"):
            ball.send("silent", "x")


def test_a_repeatable_call_goes_to_the_next_node_if_the_first_hangs(node: RunningNode, dial: Dial) -> None:
    with stopped_node() as hanging:  # each new client asks it first
        endpoint = f"http://{hanging},{address(node)}"
        with dial(endpoint, timeout_ms=2_000) as ball:
            assert ball.send("hangs", "x", retry=True).seq > 0
        with dial(endpoint, timeout_ms=2_000) as ball:
            # The broker gets no time to wait in the second attempt, but has a message already.
            assert len(ball.pull("hangs", "readers", wait="100ms")) == 1
        with dial(endpoint, timeout_ms=1_000) as ball:
            with pytest.raises(Lost, match="no answer in time"):
                ball.send("hangs", "x")
            assert ball.send("hangs", "x").seq > 0


def test_a_stream_without_bytes_is_opened_again_at_the_next_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_calls, "STREAM_SILENCE_S", 0.05)
    with hanging_after(stream_answer()) as silent, answering(stream_answer(received_line(1))) as good:
        calls = HttpCalls(f"http://{silent},{good}", 30_000)
        stream = calls.open_stream(LeaseRequest("t", "g", 1, 0, 1_000), 1, None)
        messages = list[Any]()
        for _ in range(200):
            if messages := stream.read(100):
                break
        assert [message.seq for message in messages] == [1]
        stream.close()
        calls.close()


def test_a_connection_is_kept_for_its_own_node_after_a_change_of_the_current_one(node: RunningNode) -> None:
    """While a thread connects, another thread may change the current node."""

    class NodeChangingNetwork(BlockingNetwork):
        """Changes the current node during each connection attempt that will succeed."""

        async def connect(self, host: str, port: int, *more: Any) -> Stream:
            if port != 1:
                calls.leave(calls.endpoint)
            return await super().connect(host, port, *more)

    calls = HttpCalls(f"{node.http_endpoint},127.0.0.1:1", 30_000, network=NodeChangingNetwork())
    first, second = calls._endpoints
    for _ in range(4):
        calls.run(list_topics())
    assert all(connection._node.endpoint == first for connection in calls._kept[first])
    assert calls._kept[first] and not calls._kept[second]
    calls.close()


@pytest.mark.usefixtures("no_pauses")
def test_a_send_without_a_broker_raises_notsent(dial: Dial) -> None:
    with dial("http://127.0.0.1:1") as ball:
        with pytest.raises(NotSent, match="no broker answers at http://127"):
            ball.send("t", "x")
        with pytest.raises(NotSent, match="no row of this call was accepted"):
            ball.send_many([{"body": "x"}], topic="t")


def test_a_send_that_a_stopping_node_refused_goes_to_the_next_node(node: RunningNode, dial: Dial) -> None:
    with answering(problem("503 Service Unavailable", "unavailable")) as stopping:
        with dial(f"http://{stopping},{address(node)}") as ball:
            assert ball.send("several", "y").seq > 0


def test_a_send_to_a_node_that_does_not_lead_is_repeated_only_with_retry(
    node: RunningNode, dial: Dial
) -> None:
    """It may have carried out a send when it lost the lead, so a send without `retry` is not repeated."""
    with answering(problem("503 Service Unavailable", "not_leader")) as follower:
        with dial(f"http://{follower},{address(node)}") as ball:
            with pytest.raises(NotLeader, match="because"):
                ball.send("several", "z")
            assert ball.send("several", "z").seq > 0
    with answering(problem("503 Service Unavailable", "not_leader")) as follower:
        with dial(f"http://{follower},{address(node)}") as ball:
            assert ball.send("several", "z", retry=True).seq > 0


@pytest.mark.parametrize("endpoint", ["http://", "http://a:b", "http://a:1,", "http://a:1/path", "ftp://a:1"])
def test_a_malformed_endpoint_is_refused(endpoint: str, dial: Dial) -> None:
    with pytest.raises(RequestError, match="write it as"):
        dial(endpoint)


@pytest.mark.usefixtures("no_pauses")
def test_an_error_answer_of_another_server_is_distinguished_from_one_of_a_broker(dial: Dial) -> None:
    for other_answer, error_class, text in (
        (b"SSH-2.0-OpenSSH\r\n", TimeballError, "something else than a broker would"),
        (answer("404 Not Found", "<html>", "text/html"), TimeballError, "status 404, and not as a broker"),
        (answer("502 Bad Gateway", "<html>", "text/html"), Lost, "status 502"),
    ):
        with answering(other_answer) as other, dial(f"http://{other}") as ball:
            with pytest.raises(error_class, match=text):
                ball.send("t", "x")


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("body", ["<html>", '{"seq":"one"}', '{"messages":[],"store_ms":1}', "\xff"])
def test_a_successful_answer_of_another_server_is_an_error(body: str, dial: Dial) -> None:
    """A broker behind a proxy may have carried out a send although the proxy answers, so the outcome is unknown."""
    other_answer = answer("200 OK", body, "text/html")
    with answering(*3 * (other_answer,)) as other, dial(f"http://{other}") as ball:
        with pytest.raises(TimeballError, match="not as a broker would") as caught:
            ball.topics()
        assert not isinstance(caught.value, Unavailable), "an attempt later would get the same answer"
        with pytest.raises(Lost, match="not as a broker would"):
            ball.send("t", "x")
        with pytest.raises(Lost, match="may or may not be accepted: rows 0 to 1"):
            ball.send_many([{"body": "x"}] * 2, topic="t")


@pytest.mark.parametrize("answered", [answer("200 OK", "<html>", "text/html"), stream_answer(b"<html>\n")])
def test_a_stream_of_another_server_is_an_error_at_its_first_read(answered: bytes) -> None:
    with answering(answered) as other:
        calls = HttpCalls(f"http://{other}", 30_000)
        stream = calls.open_stream(LeaseRequest("t", "g", 1, 0, 60_000), 1, None)
        with pytest.raises(TimeballError, match="not as a broker would"):
            stream.read(30_000)
        stream.close()
        calls.close()


def test_a_problem_document_is_raised_as_the_class_of_its_code(node: RunningNode, dial: Dial) -> None:
    for code, kind in (("over_limit", "OverLimit"), ("conflict", "Conflict"), ("disk_failed", "DiskFailed")):
        with answering(problem("429 Too Many Requests", code)) as other, dial(f"http://{other}") as ball:
            with pytest.raises(TimeballError, match="because") as caught:
                ball.send("t", "x")
            assert type(caught.value).__name__ == kind


# ---- answers that are lost ---------------------------------------------------------------------------------


def test_a_send_whose_answer_is_lost_is_repeated_with_retry_and_else_raises_lost(
    node: RunningNode, dial: Dial
) -> None:
    for retry in (False, True):
        topic = f"cut-{retry}"
        with (
            cutting_proxy(node.http_endpoint) as proxy,
            dial(proxy.endpoint) as ball,
            dial(node.http_endpoint) as observer,
        ):
            ball.create_topic(topic, 1)
            with ThreadPoolExecutor(1) as pool:
                proxy.hold()
                sending = pool.submit(ball.send, topic, "x", retry=retry)
                eventually(
                    lambda topic=topic, observer=observer: observer.queues(topic)[0].max == 1,
                    "the broker has the message",
                )
                proxy.cut()
                if retry:
                    assert sending.result(BOUND_S).outcome == "created"
                else:
                    with pytest.raises(Lost, match="may or may not have been carried out"):
                        sending.result(BOUND_S)
            assert observer.queues(topic)[0].max == 1, "the message is stored once"


def test_the_rows_of_a_lost_answer_are_unknown_in_the_summary(node: RunningNode, dial: Dial) -> None:
    with (
        cutting_proxy(node.http_endpoint) as proxy,
        dial(proxy.endpoint) as ball,
        dial(node.http_endpoint) as observer,
    ):
        ball.create_topic("cut-rows", 1)
        with ThreadPoolExecutor(1) as pool:
            proxy.hold()
            sending = pool.submit(ball.send_many, [{"body": "b"}] * 4, topic="cut-rows")
            eventually(lambda: observer.queues("cut-rows")[0].max == 4, "the broker has the messages")
            proxy.cut()
            with pytest.raises(Lost, match="may or may not be accepted: rows 0 to 3") as caught:
                sending.result(BOUND_S)
        assert [(span.first_row, span.rows) for span in caught.value.summary.unknown] == [(0, 4)]


def test_a_call_without_an_answer_ends_after_its_time_limit(node: RunningNode, dial: Dial) -> None:
    with cutting_proxy(node.http_endpoint) as proxy, dial(proxy.endpoint, timeout_ms=300) as ball:
        proxy.hold()
        with pytest.raises(Lost, match="no answer in time"):
            ball.send("late", "x")


def test_a_call_during_a_restart_of_the_broker_succeeds(tmp_path: Path, dial: Dial) -> None:
    with running_node(tmp_path / "data") as node, dial(node.http_endpoint) as ball:
        first = ball.send("again", "1", message_id="1", retry=True)
        node.stop()
        restart = threading.Thread(target=node.start)
        restart.start()
        second = ball.send("again", "2")
        restart.join(BOUND_S)
        assert second.seq > first.seq
        assert ball.send("again", "1", message_id="1", retry=True).outcome == "exists"


@pytest.mark.usefixtures("no_pauses")
def test_a_send_to_a_stopping_broker_raises_notnow(node: RunningNode, dial: Dial) -> None:
    with dial(node.http_endpoint) as ball:
        node.broker.log.writer._closing = True
        try:
            with pytest.raises(NotNow, match="stopping"):
                ball.send("there", "x")
        finally:
            node.broker.log.writer._closing = False


def test_a_cancelled_read_leases_no_message(node: RunningNode) -> None:
    calls, read = HttpCalls(node.http_endpoint, 30_000), OpenRead()
    request = LeaseRequest("cancelled-read", "g", 1, 60_000, 60_000)
    with ThreadPoolExecutor(1) as pool, Timeball(node.http_endpoint) as ball:
        ball.create_topic("cancelled-read", 1)
        receiving = pool.submit(lambda: run(calls.receive(request, read)))
        read.cancel()
        with pytest.raises(RequestError, match="cancelled"):
            receiving.result(BOUND_S)
        ball.send("cancelled-read", "x")
        assert [message.attempts for message in ball.pull("cancelled-read", "g", wait="30s")] == [0]
    calls.close()


# ---- TLS and accounts --------------------------------------------------------------------------------------


def test_calls_over_tls_need_a_trusted_certificate_and_an_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dial: Dial
) -> None:
    monkeypatch.setattr("timeball.client.attempts.RETRY_PAUSES_S", ())
    issued = certificate(tmp_path / "tls", "broker.example")
    roots = Path(issued.roots).read_bytes()
    other_roots = Path(certificate(tmp_path / "other").roots).read_bytes()
    guarded = {"access_file": str(access_file(tmp_path)), **issued.settings}
    with running_node(tmp_path / "data", **guarded) as node:
        monkeypatch.setenv("TIMEBALL_TLS_NAME", "broker.example")
        with dial(node.http_endpoint, tls_roots=roots, **keys("shop")) as ball:
            assert ball.send("orders", "x").seq > 0
            for message in ball.consume("orders", "workers", until_idle="200ms"):
                assert message.body == b"x"
            with pytest.raises(Forbidden):
                ball.send("news", "x")
        with dial(node.http_endpoint, tls_roots=roots) as ball, pytest.raises(Unauthorized):
            ball.send("orders", "x")
        with dial(node.http_endpoint, tls_roots=other_roots, **keys("shop")) as ball:
            with pytest.raises(Unavailable, match="certificate verify failed"):
                ball.send("orders", "x")
        with pytest.raises(RequestError, match="tls_roots"):
            dial(node.http_endpoint, tls_roots=b"no certificate")


# ---- connections -------------------------------------------------------------------------------------------


def test_each_call_uses_an_idle_connection_and_a_closed_client_refuses_calls(node: RunningNode) -> None:
    calls = HttpCalls(node.http_endpoint, 30_000)
    for _ in range(3):
        calls.run(list_topics())
    assert len(calls._all) == 1
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: calls.run(list_topics()), range(40)))
    assert len(calls._all) <= 5
    calls.close()
    with pytest.raises(RequestError, match="closed"):
        calls.run(list_topics())


def test_a_connection_is_used_again_after_a_refused_request(node: RunningNode) -> None:
    calls = HttpCalls(node.http_endpoint, 30_000)
    with pytest.raises(TimeballError):
        calls.ask(Request("POST", "/v1/topics/t/messages", b"{}"), bytes, is_repeatable=False)
    calls.run(list_topics())
    assert len(calls._all) == 1
    calls.close()


# ---- streams -----------------------------------------------------------------------------------------------


def in_flight(node: RunningNode, topic: str) -> int:
    """The number of leased messages of a topic at this node, over all groups."""
    return sum(queue.open_rows for queue in node.broker.consuming.leases.all() if queue.topic == topic)


def test_a_loop_holds_at_most_as_many_messages_as_its_credit(node: RunningNode, dial: Dial) -> None:
    with dial(node.http_endpoint) as ball:
        ball.send_many([{"body": f"{number}"} for number in range(100)], topic="slow-handler")
        in_flight_counts, bodies = [], []
        for message in ball.consume("slow-handler", "g", max_messages=10, until_idle="300ms"):
            in_flight_counts.append(in_flight(node, "slow-handler"))
            bodies.append(message.body)
    assert sorted(bodies, key=int) == [b"%d" % number for number in range(100)]
    assert max(in_flight_counts) == 10
    assert in_flight(node, "slow-handler") == 0


def test_a_stream_without_messages_is_opened_again_after_growing_pauses() -> None:
    empty, with_message = (stream_answer(*chunks, is_over=True) for chunks in ((b"\n",), (received_line(1),)))
    with answering(*4 * (empty,), *2 * (with_message,)) as other:
        calls = HttpCalls(f"http://{other}", 30_000)
        stream = calls.open_stream(LeaseRequest("t", "g", 1, 0, 60_000), 10, None)
        assert stream.read(1_000) == [], "within 1 s the stream is opened at 0, 0.1, 0.3 and 0.7 s"
        for _ in range(2):
            assert [message.seq for message in stream.read(30_000)] == [1]
            assert stream._reopen_pause_s == 0, "a stream that has brought messages is opened again at once"
        stream.close()
        calls.close()


@pytest.mark.parametrize(("credit", "wait_ms"), [(3, 30_000), (10, 30_000), (10, 0)])
def test_a_read_of_a_stream_returns_all_messages_in_the_socket_up_to_its_credit(
    credit: int, wait_ms: int
) -> None:
    """The leases of messages that stay in the socket would end without notice."""
    chunks = [b"\n", *(received_line(number) for number in range(5))]
    with answering(stream_answer(*chunks)) as other:
        calls = HttpCalls(f"http://{other}", 30_000)
        stream = calls.open_stream(LeaseRequest("t", "g", 1, 0, 60_000), credit, None)
        assert [message.seq for message in stream.read(wait_ms)] == [*range(min(credit, 5))]
        stream.close()
        calls.close()


def test_a_loop_with_a_slow_handler_receives_more_messages_than_the_buffers_hold(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch, dial: Dial
) -> None:
    """The messages are larger than the buffers of a connection. Unread, they would stop the broker's writes."""
    monkeypatch.setattr("timeball.client.http_calls.BACKLOG_BYTES", 0)
    monkeypatch.setattr(
        "timeball.client.http_calls.BACKLOG_WAIT_S", 10.0
    )  # shorter than the time between empty lines
    messages = 300
    with dial(node.http_endpoint) as ball:
        ball.send_many([{"body": b"\xff" * 65_536}] * messages, topic="large")
        loop = ball.consume("large", "g", max_messages=messages, lease="12h")
        next(loop)
        eventually(
            lambda: in_flight(node, "large") == messages,
            "all messages are leased while the first is processed",
        )
        assert [message.attempts for message in islice(loop, messages - 1)] == [0] * (messages - 1)
        loop.close()


def test_a_loop_that_is_left_gives_back_the_messages_that_its_stream_has_sent(
    node: RunningNode, dial: Dial
) -> None:
    with dial(node.http_endpoint) as ball, dial(node.http_endpoint) as second:
        ball.send_many([{"body": f"{number}"} for number in range(600)], topic="left-stream")
        for _ in ball.consume("left-stream", "g", max_messages=500, lease="12h"):
            break
        attempts: list[int] = []
        while len(attempts) < 600:
            attempts += [
                message.attempts
                for message in second.pull("left-stream", "g", max_messages=1_000, wait="30s")
            ]
    assert sorted(attempts) == [0] * 599 + [1]


def test_a_loop_continues_after_a_restart_of_the_broker(tmp_path: Path, dial: Dial) -> None:
    with running_node(tmp_path / "data") as node, dial(node.http_endpoint) as ball:
        ball.send("through", "1")
        restart = threading.Thread(target=lambda: (node.stop(), node.start(), ball.send("through", "2")))
        bodies = []
        for message in ball.consume("through", "g"):
            bodies.append(message.body)
            if message.body == b"2":
                break
            restart.start()
        restart.join(BOUND_S)
        assert bodies == [b"1", b"2"]


def test_a_loop_over_an_unknown_topic_is_refused_if_messages_create_no_topics(
    tmp_path: Path, dial: Dial
) -> None:
    with running_node(tmp_path / "data", auto_create_topics=False) as node:
        with dial(node.http_endpoint) as ball, pytest.raises(RequestError, match="nowhere"):
            next(ball.consume("nowhere", "g"))


def test_loops_that_are_left_under_load_leave_no_message_leased(node: RunningNode, dial: Dial) -> None:
    """A message that the broker is sending is either read by the client or given back by the broker."""
    stopping, sent_counts = threading.Event(), list[int]()

    def send() -> None:
        with dial(node.http_endpoint) as producer:
            while not stopping.is_set() and len(sent_counts) < 200:
                producer.send_many([{"body": "x"}] * 3, topic="left-under-load")
                sent_counts.append(3)

    with dial(node.http_endpoint) as ball:
        ball.create_topic("left-under-load", 4)
        thread = threading.Thread(target=send)
        thread.start()
        for _ in range(30):
            for _ in ball.consume("left-under-load", "g", lease="12h", max_messages=50):
                break
        stopping.set()
        thread.join(BOUND_S)
        consumed = sum(1 for _ in ball.consume("left-under-load", "g", until_idle="500ms"))
    assert consumed == sum(sent_counts) and in_flight(node, "left-under-load") == 0
