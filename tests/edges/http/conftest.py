"""A node with an HTTP port, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.edges.http.client import Client, client_of
from tests.node_fixture import RunningNode, running_node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("http") / "data", http_port=0) as running:
        yield running


@pytest.fixture
def client(node: RunningNode) -> Iterator[Client]:
    with client_of(node) as client:
        yield client
