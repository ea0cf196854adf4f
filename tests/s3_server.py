"""An S3 server on this machine, and a proxy before it that makes faults, for tests of object stores.

The server is moto, in a process of its own. It listens on loopback alone.
"""

from __future__ import annotations

import http.client
import os
import re
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import boto3
import pytest
from tests.bounds import BOUND_S

BUCKET = "ships"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "eu-north-1"}
OTHERS = ("AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_PROFILE")
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
_CONTENTS = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)

METHODS = ("GET", "PUT", "HEAD", "POST", "DELETE")
_OWN_HEADERS = ("content-length", "transfer-encoding", "connection", "expect")
Fault = Literal["slow", "unavailable", "silent", "lost_answer", "stale_list", "unconditional"]


@contextmanager
def running_s3() -> Iterator[str]:
    """Run moto, and yield its endpoint. TIMEBALL_TEST_S3 names another one, whose bucket exists and is empty."""
    if other := os.environ.get("TIMEBALL_TEST_S3"):
        yield other
        return
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        assert server.stderr is not None
        try:
            address = None
            while address is None and (line := server.stderr.readline()):
                address = _ADDRESS.search(line)
            assert address is not None, "moto ended before it listened"
            # Its lines about requests would fill the pipe.
            drained = threading.Thread(target=server.stderr.read, daemon=True)
            drained.start()
            make_bucket(f"http://127.0.0.1:{address[1]}")
            yield f"http://127.0.0.1:{address[1]}"
        finally:
            server.terminate()
        drained.join(BOUND_S)


def name_endpoint(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let this process, and those it starts, find S3 at an endpoint."""
    for name in OTHERS:
        patch.delenv(name, raising=False)
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
        patch.setenv(name, value)


def make_bucket(endpoint: str) -> None:
    """Make the bucket of the tests."""
    boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        region_name=KEYS["AWS_REGION"],
    ).create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": KEYS["AWS_REGION"]})


@dataclass
class _Rule:
    fault: Fault
    method: str
    part: str
    times: int
    pause_s: float
    seen: int = 0


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients that give up are expected
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class FaultyStore:
    """A proxy on loopback before an S3 server. A fault is made for requests of a method whose path has a part.

    slow            the answer is late
    unavailable     503, and the server does not get the request
    silent          no answer while the client waits, and the server does not get the request
    lost_answer     the server carries it out, and the connection ends before the answer
    stale_list      a list lacks keys that exist
    unconditional   a put loses its condition: no store should do this, and a test must notice
    """

    def __init__(self, endpoint: str) -> None:
        self._server_address = endpoint.removeprefix("http://")
        self._rules: list[_Rule] = []
        self.asked: list[tuple[str, str, str]] = []  # method, path and range of each request
        self._lock = threading.Lock()
        self._healed = threading.Event()
        self.hanging = 0  # requests whose clients wait for an answer that does not come
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_any(self) -> None:
                store.answer(self)

        for method in METHODS:
            setattr(Handler, f"do_{method}", Handler.do_any)
        self._http = _Quiet(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, name="faulty-store", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The address of the proxy."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        """End the proxy."""
        self.heal()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(BOUND_S)

    def break_next(
        self, fault: Fault, method: str, part: str, *, times: int = 1, pause_s: float = 0.3
    ) -> _Rule:
        """Make a fault for the next requests. For `stale_list`, the keys with `part` in their names are hidden."""
        rule = _Rule(fault, method, part, times, pause_s)
        with self._lock:
            self._rules.append(rule)
        return rule

    def go_away(self, fault: Fault = "unavailable") -> None:
        """Answer nothing but 503, or not at all, until `heal`."""
        for method in METHODS:
            self.break_next(fault, method, "", times=1 << 30)

    def heal(self) -> None:
        """Make no more faults. Requests that hang lose their connections."""
        with self._lock:
            self._rules.clear()
            self._healed.set()
            self._healed = threading.Event()

    def _hang(self, client: socket.socket) -> None:
        """Return when the client has closed its connection, or the store is healed."""
        with self._lock:
            healed = self._healed
            self.hanging += 1
        try:
            # The connection of a client that has sent its whole request is readable again when it is closed.
            while not healed.is_set() and not select.select([client], [], [], 0.05)[0]:
                pass
        finally:
            with self._lock:
                self.hanging -= 1

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request, with a fault if one is planned."""
        is_list = request.command == "GET" and "list-type=2" in request.path
        self.asked.append((request.command, request.path, request.headers.get("Range", "")))
        rule = self._rule(request.command, request.path, is_list)
        if rule is not None and rule.fault == "slow":
            threading.Event().wait(rule.pause_s)
        body = _body_of(request)
        if rule is not None and rule.fault == "silent":
            self._hang(request.connection)
            request.close_connection = True
            return
        if rule is not None and rule.fault == "unavailable":
            self._send(request, 503, [], b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>")
            return
        if rule is not None and rule.fault == "unconditional":
            del request.headers["If-None-Match"]
        status, headers, content = self._forward(request, body)
        if rule is not None and rule.fault == "lost_answer":
            request.close_connection = True
            return
        if rule is not None and rule.fault == "stale_list":
            hidden = rule.part.encode()
            content = _CONTENTS.sub(lambda match: b"" if hidden in match[0] else match[0], content)
        self._send(request, status, headers, content)

    def _rule(self, method: str, path: str, is_list: bool) -> _Rule | None:
        """Return the fault for a request, and count it."""
        with self._lock:
            for rule in self._rules:
                is_meant = (
                    is_list if rule.fault == "stale_list" else rule.method == method and rule.part in path
                )
                if is_meant and rule.seen < rule.times:
                    rule.seen += 1
                    return rule
        return None

    def _forward(
        self, request: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self._server_address, timeout=BOUND_S)
        try:
            headers = {
                name: value for name, value in request.headers.items() if name.lower() not in _OWN_HEADERS
            }
            connection.request(request.command, request.path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], body: bytes
    ) -> None:
        request.send_response(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and request.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                request.send_header(name, value)
        request.send_header("Content-Length", length)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


def _body_of(request: BaseHTTPRequestHandler) -> bytes:
    """Read the body of a request, also a chunked one."""
    if "chunked" not in request.headers.get("Transfer-Encoding", ""):
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))
    parts = []
    while size := int(request.rfile.readline().partition(b";")[0], 16):
        parts.append(request.rfile.read(size))
        request.rfile.readline()
    while request.rfile.readline().strip():  # trailers, which are not signed here
        pass
    return b"".join(parts)


@contextmanager
def faulty_store(endpoint: str) -> Iterator[FaultyStore]:
    """Run a proxy before the server at an endpoint."""
    store = FaultyStore(endpoint)
    try:
        yield store
    finally:
        store.close()
