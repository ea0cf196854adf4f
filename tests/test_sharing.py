"""The count of pytest-xdist after each test does not grow with the number of tests that were run."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sharing import Sharing
from xdist.scheduler import LoadGroupScheduling

ALONE = 100
NAMES = [f"test_alone[{number}]" for number in range(ALONE)] + [
    f"test_together[{number}]@one" for number in range(6)
]


class Process:
    """A stand-in for xdist's end of one process, with the tests that it has not run yet."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.queued: list[int] = []
        self.ran: list[str] = []
        self.shutting_down = False

    def send_runtest_some(self, indexes: list[int]) -> None:
        self.queued += indexes

    def shutdown(self) -> None:
        self.shutting_down = True


def run(scheduler: type[LoadGroupScheduling]) -> tuple[list[Process], int]:
    """Run all tests in two processes. Return these, and how many groups were counted at once at most."""
    counted: list[int] = []

    class Recording(scheduler):  # type: ignore[valid-type, misc]
        def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
            counted.append(len(workload))
            return int(super()._pending_of(workload))

    options: Any = SimpleNamespace(
        getvalue=lambda _: ["2*popen"], option=SimpleNamespace(loadscopereorder=True)
    )
    sharing: Any = Recording(options)
    processes = [Process("gw0"), Process("gw1")]
    for process in processes:
        sharing.add_node(process)
        sharing.add_node_collection(process, NAMES)
    sharing.schedule()
    for process in itertools.cycle(processes):
        if process.queued:
            index = process.queued.pop(0)
            process.ran.append(NAMES[index])
            sharing.mark_test_complete(process, index)
        if not any(process.queued for process in processes):
            break
    assert sharing.tests_finished and not sharing.has_pending
    return processes, max(counted)


def test_each_test_is_run_once_and_a_group_in_one_process() -> None:
    processes, _ = run(Sharing)
    assert sorted(name for process in processes for name in process.ran) == sorted(NAMES)
    assert [sum(name.endswith("@one") for name in process.ran) for process in processes] in ([6, 0], [0, 6])
    assert all(process.ran and process.shutting_down for process in processes)


def test_groups_that_are_done_are_not_counted_again() -> None:
    assert run(Sharing)[1] <= 4


def test_xdist_without_it_counts_all_groups() -> None:
    """The reason for tests/sharing.py, which can be removed when this fails because xdist has changed."""
    assert run(LoadGroupScheduling)[1] > ALONE // 4


@pytest.mark.parametrize(("dist", "ours"), [("loadgroup", True), ("load", False), ("no", False)])
def test_it_replaces_loadgroup_only(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, dist: str, ours: bool
) -> None:
    monkeypatch.setattr(pytestconfig.option, "dist", dist)
    monkeypatch.setattr(pytestconfig.option, "tx", ["popen"])
    scheduler = pytestconfig.hook.pytest_xdist_make_scheduler(config=pytestconfig, log=None)
    assert isinstance(scheduler, Sharing) == ours
