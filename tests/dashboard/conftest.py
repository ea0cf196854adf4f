"""A browser and a node for each module, and a tab for each test. A fault in a tab fails the test."""

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
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe-core, which finds faults of accessibility."""
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
    """A function that opens a tab at the node of the module, or at a port. A fault in any tab fails the test."""
    opened: list[Tab] = []

    def open_tab(port: int = 0, **options: Any) -> Tab:
        opened.append(Tab(browser, port or node.node.http_port, **options))
        return opened[-1]

    yield open_tab
    faults = [fault for opened_tab in opened for fault in opened_tab.faults]
    for opened_tab in opened:
        opened_tab.close()
    assert not faults, "\n".join(faults)


@pytest.fixture
def tab(tabs: Callable[..., Tab]) -> Tab:
    return tabs()
