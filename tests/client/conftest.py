"""One node for all tests of the client that only send and read; those that stop a node start their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node_fixture import RunningNode, running_node

from timeball import Timeball


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node") / "data") as running:
        yield running


@pytest.fixture
def ball(node: RunningNode) -> Iterator[Timeball]:
    with Timeball(node.endpoint) as client:
        yield client


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"
