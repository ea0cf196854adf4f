"""The distribution of tests by pytest-xdist: as with its `--dist loadgroup`, and in constant time for each test.

After each test xdist counts the remaining ones of all tests that this process has had. With thousands of tests the
process that distributes them spends ten seconds of CPU on this, and those that run them wait for it. Here a group that
is done is not counted again.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController


class Sharing(LoadGroupScheduling):
    """Groups stay in one process, all other tests go to the one that is free."""

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Record the end of a test, and assign more."""
        name = self.registered_collections[node][item_index]
        group, groups = self._split_scope(name), self.assigned_work[node]
        groups[group][name] = True
        if all(groups[group].values()):
            del groups[group]
        self._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Sharing | None:
    # With the log of the caller: a scheduler without one prints a line for each test.
    return Sharing(config, log) if config.getoption("dist") == "loadgroup" else None
