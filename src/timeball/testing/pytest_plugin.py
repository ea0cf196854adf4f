"""Fixtures for pytest. A package that depends on Timeball has them without an import.

timeball_broker        a TestBroker that starts and stops with the test
timeball_client        a client that is connected to it
timeball_async_client  the same for asyncio; for a plugin that runs coroutine tests, such as pytest-asyncio or anyio
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from timeball import AsyncTimeball, Timeball
    from timeball.testing import TestBroker


@pytest.fixture
def timeball_broker() -> Iterator[TestBroker]:
    """Start a broker with a virtual clock for one test."""
    # Imported here: every run of pytest loads this module, and most tests need no broker.
    from timeball.testing import TestBroker

    with TestBroker() as broker:
        yield broker


@pytest.fixture
def timeball_client(timeball_broker: TestBroker) -> Timeball:
    """Connect a client to the broker of the test."""
    return timeball_broker.client()


@pytest.fixture
def timeball_async_client(timeball_broker: TestBroker) -> AsyncTimeball:
    """Make a client for asyncio. Use it by `async with`, which closes it."""
    return timeball_broker.async_client()
