"""A follower's own answers over HTTP, and which requests are the leader's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from timeball.cluster.transport.gateway import LocalAnswers, read_head
from timeball.model.errors import Forbidden, Unauthorized
from timeball.monitoring.figures import ReplicaFigures

FOLLOWER = ReplicaFigures("g1", "b/1", "follower", "a", promised=4, log_seq=9)


def ask(
    target: str, figures: ReplicaFigures = FOLLOWER, *, method: str = "GET", headers: str = ""
) -> tuple[int, bytes] | None:
    """Return the status and body of a follower's answer, or None if the leader has to answer."""

    def authenticate(headers: Mapping[str, str]) -> None:
        if headers.get("authorization") == "Bearer wrong":
            raise Unauthorized("no such account")

    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()

    def check(method: str, path: str, headers: Mapping[str, str]) -> None:
        if "origin" in headers:
            raise Forbidden(f"{method} {path} by a page")

    answer = LocalAnswers(lambda: figures, authenticate, check).answer(head)
    if answer is None:
        return None
    first, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in first
    return int(first.split()[1]), body


def test_a_follower_names_the_leader_with_status_503_and_knows_no_other_group() -> None:
    status, body = ask("/leader/g1") or (0, b"")
    assert status == 503 and msgspec.json.decode(body) == {"group": "g1", "leader": "a", "role": "follower"}
    assert (ask("/leader/g2") or (0, b""))[0] == 404


def test_a_node_is_ready_while_there_is_a_leader_to_forward_to() -> None:
    alone = msgspec.structs.replace(FOLLOWER, leader="")
    assert ask("/health/live", alone) == (200, b'{"status":"live"}')
    assert ask("/health/ready") == (200, b'{"status":"ready"}')
    assert (ask("/health/ready", alone) or (0, b""))[0] == 503


def test_metrics_are_those_of_the_replica_and_need_an_account() -> None:
    status, body = ask("/metrics?x=1") or (0, b"")
    assert status == 200 and b'timeball_cluster_role{group="g1",role="follower"} 1.0' in body
    assert (ask("/metrics", headers="Authorization: Bearer wrong\r\n") or (0, b""))[0] == 401


def test_requests_from_pages_of_other_sites_are_refused() -> None:
    for path in ("/metrics", "/leader/g1"):
        status, body = ask(path, headers="Origin: http://evil.example\r\n") or (0, b"")
        assert status == 403 and b"by a page" in body


def test_a_head_request_gets_no_body() -> None:
    assert ask("/health/live", method="HEAD") == (200, b"")


@pytest.mark.parametrize(
    ("target", "method"), [("/v1/topics", "GET"), ("/health/live", "POST"), ("/leader", "GET"), ("/", "GET")]
)
def test_other_requests_are_left_to_the_leader(target: str, method: str) -> None:
    assert ask(target, method=method) is None


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01 hello", b"GET /health/live HTTP/1.1\r\nHost: x\r\n"])
def test_bytes_that_are_no_http_request_are_left_to_the_leader(sent: bytes) -> None:
    async def run() -> bytes | None:
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        return await read_head(reader)

    head = asyncio.run(run())
    assert head == sent
    assert LocalAnswers(lambda: FOLLOWER, lambda _: None, lambda *_: None).answer(sent) is None


def test_a_head_without_an_end_is_forwarded_as_it_is() -> None:
    async def run() -> tuple[bytes | None, bytes]:
        reader = asyncio.StreamReader(limit=1_000)
        reader.feed_data(b"x" * 5_000)
        reader.feed_eof()
        return await read_head(reader), await reader.read()

    assert asyncio.run(run()) == (b"", b"x" * 5_000)
