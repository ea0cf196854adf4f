"""One broker for the tests of commands that only need some broker."""

from collections.abc import Iterator

import pytest
from tests.cli.processes import serving


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real broker in a process of its own; tests use topics of their own."""
    with serving(tmp_path_factory.mktemp("broker") / "data") as uri:
        yield uri
