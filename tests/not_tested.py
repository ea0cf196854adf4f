"""Names in capitals, at the end of a run, the stock clients, browser, etcd or disks that were missing.

This runs in the process that prints. The processes that share the tests have no terminal, and send it their reports.
"""

from __future__ import annotations

import pytest

ROOMS = ("tests/interop/", "tests/dashboard/", "tests/cluster/", "tests/crash/")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped: list[pytest.TestReport] = terminalreporter.stats.get("skipped", [])
    reasons = {str(report.longrepr[-1]) for report in skipped if report.nodeid.startswith(ROOMS)}  # type: ignore[index]
    if reasons:
        terminalreporter.section("NOT ALL IS TESTED", sep="!", red=True, bold=True)
        for reason in sorted(reasons):
            terminalreporter.line(f"NOT TESTED: {reason.removeprefix('Skipped: ')}", red=True, bold=True)
