"""Says in capitals, at the end of a run, which stock clients it went without.

In the process that prints: those that share the tests have no terminal, and their reports come here.
"""

from __future__ import annotations

import pytest

ROOM = "tests/interop/"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped: list[pytest.TestReport] = terminalreporter.stats.get("skipped", [])
    reasons = {str(report.longrepr[-1]) for report in skipped if report.nodeid.startswith(ROOM)}  # type: ignore[index]
    if reasons:
        terminalreporter.section("STOCK CLIENTS NOT TESTED", sep="!", red=True, bold=True)
        for reason in sorted(reasons):
            terminalreporter.line(f"NOT TESTED: {reason.removeprefix('Skipped: ')}", red=True, bold=True)
