"""The tables of docs/recurring-rules.md are true: each row of them is a rule whose runs are computed here."""

from __future__ import annotations

import re

import pytest
from tests.docs_pages import page, section

from timeball.broker.recurring.rule import Rule
from timeball.model import limits
from timeball.model.time_parsing import instant_ms

PAGE = page("docs/recurring-rules.md")
CODE = re.compile(r"`([^`]+)`")


def rows(heading: str, columns: int) -> list[list[str]]:
    """Return the cells of a section's tables, without their first two lines."""
    lines = [line for line in section(PAGE, heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|", columns - 1)] for line in lines[2:]]


def spec(text: str, options: list[str]) -> dict[str, object]:
    """Build the rule of a row: an interval or a cron expression, and its options for gap and fold."""
    kind = {"every": text} if re.fullmatch(r"\d+\w", text) else {"cron": text, "zone": "Europe/Berlin"}
    keys = {"skip": "gap", "both": "fold"}
    return kind | {keys[option]: option for option in options}


@pytest.mark.parametrize("row", rows("Clock changes", 4))
def test_runs_on_the_days_of_the_clock_changes(row: list[str]) -> None:
    rule = Rule.parse(spec(CODE.findall(row[0])[0], CODE.findall(row[1])))
    for day, expected in [("2026-03-29", row[2]), ("2026-10-25", row[3])]:
        midnight = instant_ms(f"{day}T00:00:00Z")
        runs = rule.between(midnight - 1, midnight + 5 * limits.HOUR_MS // 2, 99)
        minutes = [(run.due_ms - midnight) // limits.MINUTE_MS for run in runs]
        assert " ".join(f"{minute // 60:02}:{minute % 60:02}" for minute in minutes) == expected.replace(
            "none", ""
        )


def test_the_page_has_its_table() -> None:
    assert len(rows("Clock changes", 4)) == 8


def test_each_example_in_the_table_of_forms_is_a_valid_rule() -> None:
    for key, example in re.findall(r"^\| `(\w+)` \| (.*?) \|", section(PAGE, "Forms"), re.MULTILINE)[:4]:
        first = CODE.findall(example)[0]
        value = first.strip('"').replace("\\n", "\n") if key != "at" else re.findall(r'"([^"]+)"', first)
        assert Rule.parse({key: value, "zone": "UTC"}).after(0)
