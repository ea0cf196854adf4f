"""One node for the tests of this edge. Tests that stop a node start their own."""

from collections.abc import Iterator

import pyarrow.flight as flight
import pytest
from tests.node_fixture import RunningNode, running_node


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node") / "data") as running:
        yield running


@pytest.fixture
def wire(node: RunningNode) -> Iterator[flight.FlightClient]:
    """A connection of pyarrow's own client, without Timeball's client."""
    with flight.FlightClient(node.endpoint) as client:
        yield client
