"""A browser and a node for each module, a tab for each test: a fault in a tab fails its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser
from tests.dashboard.browser import Tab, chromium, needed
from tests.edges.http.client import Client, client_of
from tests.interop import environments
from tests.node_fixture import RunningNode, running_node


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def axe() -> str:
    return needed(environments.axe).read_text()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    data = tmp_path_factory.mktemp("dashboard") / "data"
    with running_node(data, http_port=0, push_allow="127.0.0.1") as running:
        yield running


@pytest.fixture
def client(node: RunningNode) -> Iterator[Client]:
    with client_of(node) as client:
        yield client


@pytest.fixture
def tabs(browser: Browser, node: RunningNode) -> Iterator[Callable[..., Tab]]:
    """Open tabs at the module's node. At the end, fail if any had a fault."""
    opened: list[Tab] = []

    def tab(port: int = 0, **options: Any) -> Tab:
        opened.append(Tab(browser, port or node.node.http_port, **options))
        return opened[-1]

    yield tab
    faults = [fault for each in opened for fault in each.faults]
    for each in opened:
        each.close()
    assert not faults, "\n".join(faults)


@pytest.fixture
def tab(tabs: Callable[..., Tab]) -> Tab:
    return tabs()
