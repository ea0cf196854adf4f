"""One broker for tests of commands that need any broker."""

from collections.abc import Iterator

import pytest
from tests.node_fixture import RunningNode, running_node

from timeball.client import attempts


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A broker of this process; tests use topics of their own."""
    with running_node(tmp_path_factory.mktemp("broker") / "data") as node:
        yield node


@pytest.fixture(scope="session")
def endpoint(broker: RunningNode) -> str:
    """The HTTP address of the broker."""
    return broker.http_endpoint


@pytest.fixture(scope="session")
def flight(broker: RunningNode) -> str:
    """Its Flight address."""
    return broker.endpoint


@pytest.fixture(autouse=True, scope="module")
def _no_pauses() -> Iterator[None]:
    """A client that finds no broker makes all attempts at once, because tests run thirty commands without a broker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempts, "RETRY_PAUSES_S", (0.0,) * len(attempts.RETRY_PAUSES_S))
        yield
