"""Fixtures: a running node, with the reference or the compiled codec, and a wire to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, running_node

from timeball.edges.remoting.codec.implementation import COMPILED, PYTHON

# The contract of the hot codec: these run with the compiled one, where it was built, and with the reference.
BOTH_WAYS = {"test_sends", "test_sends_together", "test_pulls", "test_pops"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "codec" in metafunc.fixturenames and metafunc.module.__name__.rpartition(".")[2] in BOTH_WAYS:
        metafunc.parametrize("codec", ["python", "compiled"])


@pytest.fixture
def codec() -> str:
    return "auto"


@pytest.fixture
def delay_properties() -> str:
    return ""


@pytest.fixture
def node(tmp_path: Path, codec: str, delay_properties: str) -> Iterator[RunningNode]:
    if codec == "compiled" and COMPILED is None:
        pytest.skip("the codec is not compiled here: no Cython, or no C compiler with Python's headers")
    chosen = PYTHON if codec == "python" else None
    settings = {"grpc_port": -1, "delay_properties": delay_properties}
    with running_node(tmp_path / "data", codec=chosen, **settings) as running:
        assert running.node.edges is not None
        assert codec in ("auto", running.node.edges.remoting.codec.name)
        yield running


@pytest.fixture
def wire(node: RunningNode) -> Iterator[Wire]:
    with Wire.to(node) as wire:
        yield wire
