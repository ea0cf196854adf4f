"""RocketMQ's own administration tool, and its output for a command.

One process runs the commands of many tests. A new process takes a second or more to start, and on a busy machine its
first request often fails with a RemotingTimeoutException.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.interop.drivers import Driver, driving
from tests.interop.stock_broker import StockBroker
from tests.interop.stock_clients import command


class AdminTool:
    """Call it with a broker and the words of a command."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __call__(self, broker: StockBroker, *words: str) -> str:
        """Run a command for a broker, and return the output. Raise AssertionError if it contains an exception."""
        printed: str = self._driver.call("command", words=[*words, "-n", broker.name_server])
        assert "Exception" not in printed, printed
        return printed


@contextmanager
def admin_tool(home: Path) -> Iterator[AdminTool]:
    """Start the tool with the environment of this process. It looks for its account in $ROCKETMQ_HOME."""
    with driving(command("mqadmin"), "", home) as driver:
        yield AdminTool(driver)
