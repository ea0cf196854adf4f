"""`timeball status`: a table for people, the broker's own answer as JSON."""

from __future__ import annotations

import json

import pytest
from tests.cli.processes import timeball

from timeball import __version__
from timeball.cli.status import _punctuality


def test_json_is_what_the_broker_says(endpoint: str) -> None:
    """docs/flight.md names the fields."""
    found = json.loads(timeball("status", "--json", "--endpoint", endpoint).stdout)
    assert found["version"] == __version__
    assert found["log"]["durable_seq"] <= found["log"]["next_seq"]
    assert found["schedule"].keys() >= {"tail_rows", "wheel_rows", "table_rows", "cancelled_rows"}


def test_people_see_a_line_for_each_matter(endpoint: str) -> None:
    """In a narrow terminal lines are folded, not cut."""
    shown = timeball("status", "--endpoint", endpoint, COLUMNS="60")
    assert shown.returncode == 0
    labels = [label for line in shown.stdout.splitlines() if (label := line[:17].strip())]
    wanted = [
        "broker",
        "log",
        "on disk up to",
        "waiting",
        "of them cancelled",
        "pending table",
        "released",
        "memory",
    ]
    assert labels == wanted
    assert endpoint in shown.stdout


def test_punctuality_is_the_bound_that_holds_for_99_in_100() -> None:
    """And the latest of all, which may be far beyond it."""
    none = {"released": 0, "max_ms": 0, "buckets": {}}
    assert _punctuality(none) == "nothing since the broker started"
    found = {"released": 1_000, "max_ms": 80, "buckets": {"<=1 ms": 900, "<=5 ms": 95, "more": 5}}
    assert _punctuality(found).endswith("99 % of them late by <=5 ms, the latest 80 ms")


@pytest.mark.parametrize("uri", ["http://127.0.0.1:7400", "7400"])
def test_an_endpoint_of_another_form_is_refused(uri: str) -> None:
    """Exit code 2."""
    assert timeball("status", "--endpoint", uri).returncode == 2
