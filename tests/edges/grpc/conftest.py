"""Fixtures: a running node, and a gRPC client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.edges.grpc.wire import Wire
from tests.node_fixture import RunningNode, running_node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    with running_node(tmp_path / "data") as running:
        yield running


@pytest.fixture
def wire(node: RunningNode) -> Iterator[Wire]:
    with Wire.to(node) as wire:
        yield wire
