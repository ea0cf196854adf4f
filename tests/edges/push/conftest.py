"""A node whose pushes may go to this machine, and a client of its HTTP port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.edges.http.client import Client, client_of
from tests.node_fixture import RunningNode, running_node

LOOPBACK = "127.0.0.1"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    data = tmp_path_factory.mktemp("push") / "data"
    with running_node(data, http_port=0, push_allow=LOOPBACK) as running:
        yield running


@pytest.fixture
def client(node: RunningNode) -> Iterator[Client]:
    with client_of(node) as client:
        yield client
