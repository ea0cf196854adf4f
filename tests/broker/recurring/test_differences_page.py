"""The tables of docs/coming-from-cron.md are true: each row has a rule, and the runs that are computed here."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from tests.docs_pages import page, section

from timeball.broker.recurring.rule import Rule
from timeball.model.errors import InvalidDelay
from timeball.model.time_parsing import instant_ms

PAGE = page("docs/coming-from-cron.md")
SCHEDULERS = {"cron": 8, "Celery beat": 7, "EventBridge Scheduler": 7, "Quartz": 8, "Others": 3}
CODE = re.compile(r"`([^`]+)`")
RUN = re.compile(r"\d{4}-\d\d-\d\d(?:T\d\d:\d\dZ)?")


def rows(scheduler: str) -> list[list[str]]:
    """Return the cells of a section's table, without its first two lines."""
    lines = [line for line in section(PAGE, scheduler).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("row", [row for scheduler in SCHEDULERS for row in rows(scheduler)], ids=" ".join)
def test_a_rule_has_the_runs_of_its_row(row: list[str]) -> None:
    (text,), expected = CODE.findall(row[2]), row[3]
    rule: dict[str, Any] = msgspec.json.decode(text)
    if "every" not in rule:
        rule.setdefault("zone", "UTC")
    if expected.startswith("refused: "):
        with pytest.raises(InvalidDelay) as error_info:
            Rule.parse(rule)
        advice = CODE.findall(expected) or [expected.removeprefix("refused: ")]
        assert advice[0] in str(error_info.value)
        return
    runs = RUN.findall(expected)
    # The row has the first runs of the year 2026, or of the day of its first run.
    begin = f"{runs[0][:10]}T00:00:00Z" if "T" in runs[0] else "2026-01-01T00:00:00Z"
    for run, occurrence in zip(runs, Rule.parse(rule).after(instant_ms(begin) - 1, len(runs)), strict=True):
        if "T" in run:
            assert occurrence.due_ms == instant_ms(run)
        else:
            assert occurrence.local[:10] == run


def test_each_scheduler_has_its_table() -> None:
    assert {scheduler: len(rows(scheduler)) for scheduler in SCHEDULERS} == SCHEDULERS
