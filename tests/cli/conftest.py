"""One broker for the tests of commands that only need some broker."""

from collections.abc import Iterator

import pytest
from tests.node_fixture import running_node


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker of this process; tests use topics of their own."""
    with running_node(tmp_path_factory.mktemp("broker") / "data") as node:
        yield node.endpoint
