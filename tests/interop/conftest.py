"""Stock clients with a real broker. A test whose client is not available is skipped, and the end of the run lists it
in capitals (tests/not_tested.py). With TIMEBALL_INTEROP=required it fails instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.interop.admin_tool import AdminTool, admin_tool
from tests.interop.drivers import Driver
from tests.interop.grpc_conversation import WITH_GO as GRPC
from tests.interop.grpc_conversation import GrpcConversation
from tests.interop.stock_broker import StockBroker, stock_broker
from tests.interop.stock_clients import command


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockBroker]:
    """One broker for all tests. Their topics and groups have the names of the tests."""
    with stock_broker(tmp_path_factory.mktemp("broker") / "data") as running:
        yield running


@pytest.fixture(scope="session")
def clients(
    broker: StockBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Driver]]:
    """Return a function that returns the program of a client by name, and starts it at the first call."""
    running: dict[str, Driver] = {}

    def client(name: str) -> Driver:
        if name not in running:
            address = broker.grpc if name in GRPC else broker.name_server
            running[name] = Driver(command(name), address, tmp_path_factory.mktemp(name))
        return running[name]

    yield client
    for driver in running.values():
        driver.close()


@pytest.fixture(scope="session")
def mqadmin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminTool]:
    """RocketMQ's administration tool, in one process for all tests."""
    with admin_tool(tmp_path_factory.mktemp("mqadmin")) as tool:
        yield tool


@pytest.fixture
def client(request: pytest.FixtureRequest, clients: Callable[[str], Driver]) -> Driver:
    """Return the client that is the parameter of the test."""
    return clients(request.param)


@pytest.fixture
def talks(
    request: pytest.FixtureRequest, broker: StockBroker, clients: Callable[[str], Driver], name: str
) -> Callable[..., GrpcConversation]:
    """Return a function that starts a conversation of this test with the gRPC client that is its parameter."""
    return lambda **options: GrpcConversation(request.param, clients(request.param), broker, name, **options)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of the test for its topic, groups and clients, with a hyphen for each other character."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return name.removeprefix("test-").strip("-")
