"""Requests that no client would send: made by schemathesis from the OpenAPI document, and bytes nearly HTTP."""

from __future__ import annotations

import random
import socket
from collections import Counter
from typing import Any

import hypothesis
import requests
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.core.transport import Response
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from tests.bounds import BOUND_S
from tests.edges.http.openapi import OPERATIONS

from timeball.edges.http.answers_codec import EVENTS
from timeball.edges.http.codec import NDJSON

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
KNOWN_TOPIC = "known"  # made by the test; a question about topics that are never there has one answer
LABELS = [f"{each.method.upper()} {each.path}" for each in OPERATIONS]


def attack(port: int, label: str, examples: int) -> Counter[int]:
    """Send so many requests for one operation of the document; return the statuses. Raises at the first fault."""
    base, seen = f"http://127.0.0.1:{port}", Counter[int]()
    schema: Any = schemathesis.openapi.from_url(f"{base}/openapi.json")
    operations = [item.ok() for item in schema.get_all_operations()]
    (operation,) = [item for item in operations if item.label == label]

    @hypothesis.given(case=operation.as_strategy())
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    def ask(case: Any) -> None:
        # A long poll of every example would be a minute each.
        if isinstance(case.query, dict) and "wait" in case.query:
            case.query["wait"] = str(case.query["wait"])[:1]
        if len((case.path_parameters or {}).get("topic", "")) == 1:  # about half of the names
            case.path_parameters["topic"] = KNOWN_TOPIC
        answer = answer_to(case, base, session)
        seen[answer.status_code if answer is not None else 200] += 1
        # A condition that has a name is none of the broker's faults.
        if answer is not None and answer.status_code != 503:
            case.validate_response(answer, checks=CHECKS)

    with requests.Session() as session:
        ask()
    return seen


def answer_to(case: Any, base: str, session: requests.Session) -> Response | None:
    """Return what the broker answers; None for a stream, which has no end."""
    asked = case.as_transport_kwargs(base_url=base)
    with session.request(**asked, timeout=BOUND_S, stream=True) as answer:
        if answer.ok and answer.headers["content-type"].startswith((EVENTS, NDJSON)):
            return None
        return Response.from_requests(answer, verify=False)


PARTS = [
    b"POST /v1/topics/raw/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 13\r\n\r\n"
    b'{"body": "x"}',
    b"POST /v1/topics/raw/receive?group=g&max=3 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"POST /v1/topics/raw/messages HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    b'content-type: application/json\r\n\r\nd\r\n{"body": "x"}\r\n0\r\n\r\n',
    b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n\r\n",
    b"DELETE /v1/messages/%41%00%ff HTTP/1.1\r\nhost: localhost\r\nconnection: keep-alive, upgrade\r\n"
    b"upgrade: h2c\r\n\r\n",
]


def damaged(rng: random.Random) -> bytes:
    """Return some requests with bytes changed, cut out, repeated or put in."""
    data = bytearray(b"".join(rng.choices(PARTS, k=rng.randint(1, 3))))
    for _ in range(rng.randint(1, 6)):
        at, size = rng.randrange(len(data)), rng.randint(1, 9)
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = data[at : at + size] * rng.randint(1, 50)
            case 3:
                data[at:at] = rng.randbytes(size)
        if not data:
            data = bytearray(b"\0")
    return bytes(data)


LAST = b"\r\n\r\nGET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def status(port: int, rng: random.Random) -> bytes:
    """Send one damaged request; return the first status that comes, or nothing where the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as connection:
        result = b""
        try:
            connection.sendall(damaged(rng) + LAST)
            connection.settimeout(1)  # kept alive: the last request was taken for the body of another
            while part := connection.recv(65_536):
                result += part
        except (ConnectionResetError, BrokenPipeError, TimeoutError):
            pass
    assert not result or result.startswith(b"HTTP/1.1 "), result
    return result[9:12]
