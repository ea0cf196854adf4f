"""HTTP requests that a follower answers itself: leader, health and metrics. All others are forwarded to the leader.

    GET /leader/<group>    503, with the leader's name, so that a load balancer sends no clients to this node
    GET /health/live       200
    GET /health/ready      200 while there is a leader, to which this port forwards
    GET /metrics           this replica's figures

The first request of a connection decides: either it is answered here and the connection is closed, or the whole
connection is forwarded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
from prometheus_client import ProcessCollector

from timeball.model.errors import Forbidden, Unauthorized
from timeball.monitoring.metrics import CONTENT_TYPE, as_text
from timeball.monitoring.replica_figures import ReplicaFigures
from timeball.monitoring.replica_metrics import collect

logger = logging.getLogger(__name__)

HEAD_S = 30.0  # time limit for the head of a request, after which the connection is closed
END_OF_HEAD = b"\r\n\r\n"
JSON = "application/json"


class Request(NamedTuple):
    """The head of a request."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case


class LocalAnswers:
    """The answers of one node. Belongs to the event loop.

    `authenticate` receives the headers and raises Unauthorized unless their account may read the metrics. `check`
    receives method, path and headers, and raises Forbidden for requests that a browser sends on behalf of another
    site's page.
    """

    def __init__(
        self,
        figures: Callable[[], ReplicaFigures],
        authenticate: Callable[[Mapping[str, str]], object],
        check: Callable[[str, str, Mapping[str, str]], object],
    ) -> None:
        self._figures, self._authenticate, self._check = figures, authenticate, check
        self._process = ProcessCollector(registry=None)

    def answer(self, head: bytes) -> bytes | None:
        """Build the answer to a request with this head. None when the leader must answer it."""
        request = _parse(head)
        if request is None or request.method not in ("GET", "HEAD"):
            return None
        response = self._answer(request)
        if response is None:
            return None
        try:
            self._check(request.method, request.path, request.headers)
        except Forbidden as error:
            response = 403, _problem(403, error.code, str(error)), JSON
        return _encode(*response, is_head=request.method == "HEAD")

    def _answer(self, request: Request) -> tuple[int, bytes, str] | None:
        figures = self._figures()
        match request.path.strip("/").split("/"):
            case ["leader", group] if unquote(group) == figures.group:
                document = {"group": figures.group, "leader": figures.leader, "role": figures.role}
                return 503, msgspec.json.encode(document), JSON
            case ["leader", _]:
                return 404, _problem(404, "not_found", f"this node keeps group {figures.group}"), JSON
            case ["health", "live"]:
                return 200, b'{"status":"live"}', JSON
            case ["health", "ready"] if figures.leader:
                return 200, b'{"status":"ready"}', JSON
            case ["health", "ready"]:
                return 503, _problem(503, "unavailable", f"group {figures.group} has no leader"), JSON
            case ["metrics"]:
                return self._answer_metrics(request, figures)
        return None

    def _answer_metrics(self, request: Request, figures: ReplicaFigures) -> tuple[int, bytes, str]:
        try:
            self._authenticate(request.headers)
        except Unauthorized as error:
            return 401, _problem(401, error.code, str(error)), JSON
        return 200, as_text([*collect(figures), *self._process.collect()]), CONTENT_TYPE


async def read_head(reader: asyncio.StreamReader) -> bytes | None:
    """Read the head of the first request, or the bytes that arrived instead. None after HEAD_S."""
    with suppress(asyncio.LimitOverrunError):  # too long for a head: the bytes stay in the reader
        try:
            async with asyncio.timeout(HEAD_S):
                return await reader.readuntil(END_OF_HEAD)
        except asyncio.IncompleteReadError as error:
            return error.partial
        except TimeoutError:
            return None
    return b""


def _parse(head: bytes) -> Request | None:
    if not head.endswith(END_OF_HEAD):
        return None
    request_line, *lines = head.decode("latin-1").split("\r\n")
    fields = request_line.split(" ")
    if len(fields) != 3:
        return None
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Request(fields[0], fields[1].partition("?")[0], headers)


def _problem(status: int, code: str, detail: str) -> bytes:
    return msgspec.json.encode(
        {"title": HTTPStatus(status).phrase, "status": status, "code": code, "detail": detail}
    )


def _encode(status: int, body: bytes, media_type: str, *, is_head: bool) -> bytes:
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {media_type}\r\n"
        f"content-length: {len(body)}\r\ncache-control: no-store\r\nconnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if is_head else body)
