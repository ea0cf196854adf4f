"""Forbidden requests are refused before their bodies are read."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.accounts import access_file
from tests.bounds import BOUND_S
from tests.node_fixture import RunningNode, running_node

from timeball.io.clock import ManualClock

ACCOUNTS = '[[accounts]]\naccess_key = "nothing"\nsecret_key = "nothing secret 4"\n'
# Any account may send the bodies of these requests. They name messages by id or key, whose topics the broker checks
# later, or come from another node of the cluster.
OF_ANY_ACCOUNT = {
    ("PATCH", "/v1/messages/{id}"), ("POST", "/v1/cancel"), ("POST", "/v1/reschedule"), ("POST", "/v1/cluster/{group}"),
}  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    folder: Path = tmp_path_factory.mktemp("guarded")
    path = access_file(folder, ACCOUNTS)
    with running_node(
        folder / "data", ManualClock(), access_file=str(path), http_port=0, auto_create_topics=True
    ) as running:
        yield running


def operations_with_bodies(node: RunningNode) -> set[tuple[str, str]]:
    """Return method and path of each operation with a body, from the OpenAPI document."""
    connection = http.client.HTTPConnection("127.0.0.1", node.node.http_port, timeout=BOUND_S)
    connection.request("GET", "/openapi.json")
    paths = json.loads(connection.getresponse().read())["paths"]
    connection.close()
    return {
        (method.upper(), path)
        for path, operations in paths.items()
        for method, operation in operations.items()
        if "requestBody" in operation
    }


def status_of_head(node: RunningNode, method: str, path: str) -> int:
    """Send only the head of a request with a large body, and return the status of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", node.node.http_port, timeout=BOUND_S)
    consumes = path.startswith("/v1/topics/{topic}/") and not path.endswith("/messages")
    target = path.replace("{", "").replace("}", "") + ("?group=g" if consumes else "")
    connection.putrequest(method, target)
    connection.putheader("authorization", "Bearer nothing:nothing secret 4")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", "8000000")
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


def test_the_body_of_a_forbidden_request_is_not_read(node: RunningNode) -> None:
    result = operations_with_bodies(node)
    assert result >= OF_ANY_ACCOUNT and len(result) > 8
    statuses = {item: status_of_head(node, *item) for item in sorted(result - OF_ANY_ACCOUNT)}
    assert set(statuses.values()) == {403}, statuses
    assert node.node.edges is not None and not node.node.edges.http.limits.received.held_bytes
