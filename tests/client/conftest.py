"""A node for each protocol of the client: a test that uses `node` or `ball` runs over Flight and over HTTP.

A module for Flight alone replaces `node`. A single test for Flight uses `flight_node` or `flight_ball`. Tests that stop
a node start their own.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node_fixture import HttpNode, RunningNode, running_node

from timeball import Timeball


@pytest.fixture(scope="session")
def flight_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("flight") / "data") as running:
        yield running


@pytest.fixture(scope="session")
def http_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("http") / "data", kind=HttpNode) as running:
        yield running


@pytest.fixture(scope="session", params=["flight", "http"])
def node(request: pytest.FixtureRequest) -> RunningNode:
    found: RunningNode = request.getfixturevalue(f"{request.param}_node")
    return found


@pytest.fixture
def ball(node: RunningNode) -> Iterator[Timeball]:
    with Timeball(node.endpoint) as client:
        yield client


@pytest.fixture
def flight_ball(flight_node: RunningNode) -> Iterator[Timeball]:
    with Timeball(flight_node.endpoint) as client:
        yield client


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"
