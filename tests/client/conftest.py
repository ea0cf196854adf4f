"""A node for the tests of the client. `ball` has operations only, and `columns` has columns as well, over Flight.

A module with `BOTH_CLIENTS = True` is a contract of Timeball and AsyncTimeball. Each of its tests that asks for `ball`,
`columns` or `dial` runs twice, each time on a node of its own.

Tests that stop a node start their own.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.client.awaited import CLIENTS, Dial
from tests.node_fixture import RunningNode, running_node

from timeball import Timeball


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_contract = getattr(metafunc.module, "BOTH_CLIENTS", False)
    if is_contract and {"ball", "columns", "dial"} & set(metafunc.definition._fixtureinfo.argnames):
        metafunc.parametrize("client_kind", list(CLIENTS), indirect=True)


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RunningNode]]:
    """A function that returns the node for a kind of client, a key of CLIENTS. It starts the node at the first call."""
    running: dict[str, RunningNode] = {}
    with ExitStack() as stack:

        def node_of(kind: str) -> RunningNode:
            """Return the node of this kind of client, and start it at the first call."""
            if kind not in running:
                folder = tmp_path_factory.mktemp("client") / "data"
                running[kind] = stack.enter_context(running_node(folder))
            return running[kind]

        yield node_of


@pytest.fixture(scope="session")
def client_kind(request: pytest.FixtureRequest) -> str:
    """The key of the client's class in CLIENTS: in a contract each of them in turn, else "blocking"."""
    return getattr(request, "param", "blocking")


@pytest.fixture(scope="session")
def node(client_kind: str, nodes: Callable[[str], RunningNode]) -> RunningNode:
    """The node of this kind of client. All tests of the session share it."""
    return nodes(client_kind)


@pytest.fixture
def dial(client_kind: str) -> Dial:
    """The class of the client."""
    return CLIENTS[client_kind]


@pytest.fixture
def ball(node: RunningNode, dial: Dial) -> Iterator[Timeball]:
    """A client over HTTP, for operations only."""
    with dial(node.http_endpoint) as client:
        yield client


@pytest.fixture
def columns(node: RunningNode, dial: Dial) -> Iterator[Timeball]:
    """A client over HTTP and Flight, for operations and columns."""
    with dial(node.http_endpoint, flight=node.endpoint) as client:
        yield client


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The folder of a node that the test starts itself. It does not exist yet."""
    return tmp_path / "data"
