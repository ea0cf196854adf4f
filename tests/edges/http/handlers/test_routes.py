"""The table of paths agrees with the document."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.edges.http.client import Client
from tests.node_fixture import RunningNode, running_node

from timeball.edges.http.edge import collect_routes
from timeball.io.clock import ManualClock


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """Start a node that has all paths: those of a manual clock, too."""
    with running_node(tmp_path_factory.mktemp("http") / "data", ManualClock(), http_port=0) as running:
        yield running


def test_each_path_and_method_is_in_the_document(client: Client, node: RunningNode) -> None:
    document = client.ask("GET", "/openapi.json").value
    handlers = collect_routes(node.broker, node.node.metrics, node.node.status)
    known = {
        (path.replace(":path", ""), method)
        for paths in (handlers.paths, handlers.open_paths)
        for path, methods in paths.items()
        for method in methods
    }
    assert known == {(path, item.upper()) for path, methods in document["paths"].items() for item in methods}
