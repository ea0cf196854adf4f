"""Invalid requests get a problem document with the right status, and affect no other request."""

from __future__ import annotations

import json
import random
import socket

import pytest
from tests.bounds import BOUND_S
from tests.edges.http.client import Client
from tests.node_fixture import RunningNode, eventually

from timeball.edges.http import requests

SEND = "/v1/topics/hostile/messages"
JSON_HEADERS = "Content-Type: application/json\r\nConnection: close\r\n"


def send_and_read(node: RunningNode, data: bytes) -> bytes:
    """Return everything that the server sends for these bytes, until it closes or is silent for long."""
    with socket.create_connection(("127.0.0.1", node.node.http_port), timeout=BOUND_S) as connection:
        connection.sendall(data)
        result = b""
        while part := connection.recv(65_536):
            result += part
        return result


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_message"),
        (b"", "application/json", 400, "invalid_message"),
        (b"[]", "application/json", 400, "invalid_message"),
        (b"[" * 100_000, "application/json", 400, "invalid_message"),
        (b'{"body": "\xff"}', "application/json", 400, "invalid_message"),
        (b'{"body": "\\ud800"}', "application/json", 400, "invalid_message"),
        (b'{"body": "x", "delya": "1h"}', "application/json", 400, "invalid_message"),
        (b'{"body": "x", "json": 1}', "application/json", 400, "invalid_message"),
        (b'{"tag": "x"}', "application/json", 400, "invalid_message"),
        (b'{"body": 1}', "application/json", 400, "invalid_message"),
        (b'{"body": "x", "id": ""}', "application/json", 400, "invalid_message"),
        (b'{"body": "x", "key": "a b"}', "application/json", 400, "invalid_message"),
        (b'{"body": "x", "key": "a", "keys": ["b"]}', "application/json", 400, "invalid_message"),
        (b'{"body": "x", "properties": {"a": "\\u0001"}}', "application/json", 400, "invalid_message"),
        (b'{"body": "x", "tag": "' + b"t" * 300 + b'"}', "application/json", 400, "invalid_message"),
        (b'{"base64": "!"}', "application/json", 400, "invalid_message"),
        (b'{"body": "x"}\nno', "application/x-ndjson", 400, "invalid_message"),
        (b'{"body": "x", "after": "soon"}', "application/json", 400, "invalid_delay"),
        (b'{"body": "x", "after": -1}', "application/json", 400, "invalid_delay"),
        (b'{"body": "x", "after": "P1M"}', "application/json", 400, "invalid_delay"),
        (b'{"body": "x", "after": ' + b"9" * 300 + b"}", "application/json", 400, None),
        (b'{"body": "x", "after": "' + b"9" * 5_000 + b'"}', "application/json", 400, "invalid_delay"),
        (b'{"body": "x", "at": "2031-01-31T09:00:00"}', "application/json", 400, "invalid_delay"),
        (b'{"body": "x", "at": 5}', "application/json", 400, "invalid_delay"),
        (b'{"body": "x", "at": "9999-01-01T00:00:00Z"}', "application/json", 400, "invalid_delay"),
        (b'{"body": "x", "at": 1, "after": "1ms"}', "application/json", 400, "invalid_delay"),
        pytest.param(b"{}\n" * 20_000, "application/x-ndjson", 413, "bad_request", id="many lines"),
        pytest.param(
            b"[{}" + b",{}" * 20_000 + b"]", "application/json", 413, "bad_request", id="long array"
        ),
        (b'{"body": "x"}', "text/plain", 415, "bad_request"),
        (b'{"body": "x"}', "application/json; charset=latin-1", 415, "bad_request"),
        (b'{"body": "' + b"x" * (requests.BODY_BYTES_MAX) + b'"}', "application/json", 413, "bad_request"),
        (b'{"body": "' + b"x" * 5_000_000 + b'"}', "application/json", 400, "invalid_message"),
    ],
    ids=str,
)
def test_an_invalid_send_gets_a_problem_document_with_its_status(
    client: Client, body: bytes, content_type: str, status: int, code: str
) -> None:
    answer = client.ask("POST", SEND, body, content_type=content_type)
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.value["status"] == status
    assert code is None or answer.value["code"] == code
    assert client.ask("POST", SEND, {"body": "well", "after": "1h"}).status == 201


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/topics/", 404),
        ("DELETE", "/v1/topics", 405),
        ("POST", "/v1/topics/rmq_sys_wheel_timer/messages", 403),
        ("POST", "/v1/topics/a.b/messages", 400),
        ("POST", "/v1/topics/" + "x" * 200 + "/messages", 400),
        ("POST", "/v1/topics/none/receive?group=g", 404),
        ("POST", "/v1/topics/known/receive", 400),
        ("POST", "/v1/topics/known/receive?group=a/b", 400),
        # 416: the code `out_of_range`.
        ("POST", "/v1/topics/known/receive?group=g&max=0", 416),
        ("POST", "/v1/topics/known/receive?group=g&max=x", 416),
        ("POST", "/v1/topics/known/receive?group=g&wait=2m", 416),
        ("POST", "/v1/topics/known/receive?group=g&wait=%ff", 400),
        ("POST", "/v1/topics/known/receive?group=g&lease=0", 416),
    ],
)
def test_an_invalid_request_gets_a_problem_document_with_its_status(
    client: Client, method: str, path: str, status: int
) -> None:
    client.send("known", {"body": "x"})
    answer = client.ask(method, path, {"body": "x"} if path.endswith("/messages") else None)
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/problem+json"
    assert client.send("known", {"body": "x"}).status == 201


def test_a_head_request_has_no_body_and_a_wrong_method_gets_the_valid_methods(client: Client) -> None:
    head = client.ask("HEAD", "/health/live")
    assert (head.status, head.value) == (200, None)
    assert client.ask("PUT", SEND, {"body": "x"}).headers["allow"] == "POST"


def test_the_former_get_for_receives_is_refused_with_advice(client: Client) -> None:
    client.send("former", {"body": "x"})
    answer = client.ask("GET", "/v1/topics/former/messages", query={"group": "g"})
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert "POST to /v1/topics/TOPIC/receive" in answer.value["detail"]
    assert client.ask("GET", "/v1/groups/g-former").status == 404


def test_a_receive_accepts_an_empty_object_but_no_fields(client: Client) -> None:
    client.send("bare", {"body": "x"})
    receive = "/v1/topics/bare/receive?group=g"
    assert client.ask("POST", receive, {}).value["messages"]
    refused = client.ask("POST", receive, {"max": 3})
    assert refused.status == 400 and "max" in refused.value["detail"]


@pytest.mark.parametrize(
    "header", [b"Transfer-Encoding: chunked", b"Content-Length: 99999999999999999999999"]
)
def test_a_body_without_a_usable_length_is_refused_at_the_limit(node: RunningNode, header: bytes) -> None:
    head = (
        b"POST "
        + SEND.encode()
        + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + header
        + b"\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", node.node.http_port), timeout=BOUND_S) as connection:
        connection.sendall(head)
        chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        try:
            for _ in range(requests.BODY_BYTES_MAX // 0x100000 + 2):
                connection.sendall(chunk)
        except OSError:
            pass  # it has been refused and closed
        answer = connection.recv(65_536)
    assert status_of(answer) in (400, 413)
    assert node.node.edges is not None
    assert not node.node.edges.http.limits.received.held_bytes


def test_a_body_that_is_not_complete_in_time_is_refused(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "BODY_S", 0.2)
    head = f"POST {SEND} HTTP/1.1\r\nHost: localhost\r\n{JSON_HEADERS}Content-Length: 10\r\n\r\n"
    assert status_of(send_and_read(node, head.encode() + b"{")) == 408
    assert node.node.edges is not None
    eventually(lambda: not node.node.edges.http.limits.received.held_bytes, "its bytes are given back")  # type: ignore[union-attr]


def test_random_bytes_do_not_disturb_other_clients(node: RunningNode, client: Client) -> None:
    source = random.Random(7)
    valid = f"POST {SEND} HTTP/1.1\r\nHost: localhost\r\n{JSON_HEADERS}Content-Length: 30\r\n\r\n"
    seen = set()
    for _ in range(200):
        data = bytearray(valid.encode() + json.dumps({"body": "x", "after": "1h"}).encode()[:30].ljust(30))
        for _ in range(source.randrange(1, 6)):
            data[source.randrange(len(data))] = source.randrange(256)
        with socket.create_connection(("127.0.0.1", node.node.http_port), timeout=BOUND_S) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65_536)
        if answer:
            seen.add(status_of(answer))
    assert seen, "the harness saw no answer"
    assert not [status for status in seen if status >= 500]
    assert client.ask("POST", SEND, {"body": "well", "after": "1h"}).status == 201


def test_an_address_that_does_not_read_its_answers_is_refused_before_it_leases_messages(
    node: RunningNode, client: Client
) -> None:
    client.send("unread", {"body": "x"})
    assert node.node.edges is not None
    sent = node.node.edges.http.limits.sent
    sent.add("127.0.0.1", requests.SENT_BYTES_MAX)
    try:
        refused = client.receive("unread", "readers")
        assert (refused.status, refused.value["code"]) == (429, "over_limit")
        assert "not read yet" in refused.value["detail"]
    finally:
        sent.remove("127.0.0.1", requests.SENT_BYTES_MAX)
    received = client.receive("unread", "readers").value["messages"]
    assert [(message["body"], message["attempt"]) for message in received] == [("x", 1)]


# ---- the table of paths, and answers in one write ---------------------------------------------------------------


def table_of(*templates: str) -> requests.PathTable:
    """A table whose endpoints are their templates."""
    return requests.PathTable({template: template for template in templates})  # type: ignore[misc]


def test_a_path_finds_its_endpoint_and_parameters_each_time() -> None:
    sends, messages = "/v1/topics/{topic}/messages", "/v1/messages/{id:path}"
    table = table_of(sends, messages)
    for _ in range(2):
        target, endpoint = table.find(b"/v1/topics/orders/messages?a=1&b=2")
        assert (endpoint, target.path, target.params) == (
            sends,
            "/v1/topics/orders/messages",
            {"topic": "orders"},
        )
        assert dict(target.query) == {"a": "1", "b": "2"}
        target, endpoint = table.find(b"/v1/messages/a/b%20c")
        assert (endpoint, target.params, dict(target.query)) == (messages, {"id": "a/b c"}, {})
    assert table.find(b"/v1/topics/orders/messages/")[1] is None


def test_the_paths_of_clients_take_limited_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PATHS_KEPT_MAX", 10)
    table = table_of("/v1/messages/{id:path}")
    for number in range(100):
        table.find(b"/v1/messages/%d" % number)
        table.find(b"/v1/messages/%d" % number + b"x" * requests.PATH_KEPT_CHARACTERS_MAX)
        table.find(b"/none/%d" % number)
        names = [b"%d" % name for name in range(requests.QUERY_KEPT_PARAMETERS_MAX + 1)]
        table.find(b"/v1/messages/%d?" % number + b"&".join(names))
        table.find(b"/v1/messages/%d?" % number + b"&".join([b"a"] * len(names)))
        assert 0 < len(table._results) <= 10
    assert max(map(len, table._results)) < 30


def test_pipelined_requests_get_whole_answers_in_their_order(node: RunningNode) -> None:
    first = b'{"body": "1"}'
    send = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        SEND.encode(), len(first), first,
    )  # fmt: skip
    last = b"HEAD /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    parts = send_and_read(node, send * 3 + last).split(b"HTTP/1.1 ")[1:]
    assert [part[:3] for part in parts] == [b"201"] * 3 + [b"200"]
    assert b"connection: close\r\n" in parts[3] and parts[3].endswith(b"\r\n\r\n"), "a HEAD has no body"
    for part in parts[:3]:
        head, _, body = part.partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head and json.loads(body)["durable"]
