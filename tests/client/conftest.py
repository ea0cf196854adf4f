"""A node for the tests of the client. `ball` has operations only, and `columns` has columns as well, over Flight.

Tests that stop a node start their own.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node_fixture import RunningNode, running_node

from timeball import Timeball


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("client") / "data") as running:
        yield running


@pytest.fixture
def ball(node: RunningNode) -> Iterator[Timeball]:
    with Timeball(node.http_endpoint) as client:
        yield client


@pytest.fixture
def columns(node: RunningNode) -> Iterator[Timeball]:
    with node.client() as client:
        yield client


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"
