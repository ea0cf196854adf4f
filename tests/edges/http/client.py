"""An HTTP client for tests: the standard library's, which shares no code with the edge."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from tests.bounds import BOUND_S
from tests.node_fixture import RunningNode


class Reply(NamedTuple):
    """A status, the headers (lower case), and the JSON of the body."""

    status: int
    headers: dict[str, str]
    value: Any


class Client:
    """One connection that is kept alive."""

    def __init__(self, node: RunningNode, authorization: str = "") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", node.node.http_port, timeout=BOUND_S)
        self._headers = {"authorization": authorization} if authorization else {}

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: dict[str, Any] | None = None,
        **headers: str,
    ) -> Reply:
        """Send a request. A body that is not bytes is sent as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            named.setdefault("content-type", "application/json")
        target = path + (f"?{urlencode(query)}" if query else "")
        self._connection.request(method, target, body, {**self._headers, **named})
        answer = self._connection.getresponse()
        data = answer.read()
        result = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, result, json.loads(data) if data else None)

    def send(self, topic: str, body: Any, **headers: str) -> Reply:
        """Send one message or several to a topic."""
        return self.ask("POST", f"/v1/topics/{quote(topic, safe='')}/messages", body, **headers)

    def receive(self, topic: str, group: str = "workers", **query: Any) -> Reply:
        """Receive for a group, with a wait of 5 s unless `query` has another."""
        return self.ask("POST", f"/v1/topics/{topic}/receive", query={"group": group, "wait": "5s", **query})

    def close(self) -> None:
        self._connection.close()


@contextmanager
def client_of(node: RunningNode, authorization: str = "") -> Iterator[Client]:
    """Run a client during a block. `authorization` is the header for all of its requests."""
    client = Client(node, authorization)
    try:
        yield client
    finally:
        client.close()
