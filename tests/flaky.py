"""A failed test is run once more. If it passes then, it is *flaky*: the closing lines name it and its first failure.

One race must not fail a whole run, and none may stay hidden. A second failure fails. Everything is torn down between
the two runs, also shared fixtures: the second run gets none of the first one's state. `--once` switches this off.

A first failure is reported with an outcome of its own, which pytest counts neither as passed nor as failed; this
travels from the processes of pytest-xdist to the one that prints.
"""

from __future__ import annotations

import pytest
from _pytest.runner import runtestprotocol
from _pytest.terminal import TerminalReporter

AGAIN = "again"
SECOND_RUN = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--once", action="store_true", help="do not run a failed test once more")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.config.getoption("--once") or item.stash.get(SECOND_RUN, False):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    failed = [report for report in reports if report.failed]
    if not failed:
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
    ending = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(None), when="teardown")
    if ending.excinfo is not None:
        failed.append(pytest.TestReport.from_item_and_call(item, ending))
    for report in failed:
        report.outcome = AGAIN  # type: ignore[assignment]
        item.ihook.pytest_runtest_logreport(report=report)
    item.stash[SECOND_RUN] = True
    # Through all plugins once more: this run has its own time limit, warnings and logs.
    item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
    return True


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return (AGAIN, "r", "RUN AGAIN") if report.outcome == AGAIN else None


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    stats = terminalreporter.stats
    first_failures = stats.pop(AGAIN, [])
    failed = {report.nodeid for name in ("failed", "error") for report in stats.get(name, [])}
    flaky: dict[str, pytest.TestReport] = {}
    for report in first_failures:
        if report.nodeid not in failed:
            flaky.setdefault(report.nodeid, report)
    if not flaky:
        return
    stats["flaky"] = list(flaky.values())
    terminalreporter.section("flaky: failed once, passed when run again")
    for name, report in flaky.items():
        terminalreporter.section(name, sep="_")
        terminalreporter.write_line(report.longreprtext)
    for name in flaky:
        terminalreporter.write_line(f"FLAKY {name}")
