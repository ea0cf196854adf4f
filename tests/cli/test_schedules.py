"""`timeball schedules` and `timeball zones`: their output for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.in_process import run_here
from tests.node_fixture import running_node

from timeball.cli.schedules import _zone_lines
from timeball.model.http_api import ZoneMoved, ZonesInUse, ZoneUpdated
from timeball.model.time_parsing import VERSION


@pytest.fixture(scope="module")
def http_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The HTTP address of a broker."""
    with running_node(tmp_path_factory.mktemp("schedules") / "data") as node:
        yield node.http_endpoint


def test_each_command_prints_its_result_from_put_to_delete(http_endpoint: str) -> None:
    def run_schedules(*arguments: str) -> str:
        result = run_here("schedules", *arguments, "--endpoint", http_endpoint)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def run_json(*arguments: str) -> Any:
        return json.loads(run_schedules(*arguments, "--json"))

    line = run_schedules(
        "put", "report", "reports", "make it", "--cron", "0 9 * * 1", "--zone", "Europe/Berlin"
    )
    assert line.startswith("report: created, next at ") and line.endswith(", 0 runs")
    assert run_json("show", "report")["body"] == "make it"
    assert [line.split(":")[0] for line in run_schedules("list").splitlines()] == ["report"]
    assert run_schedules("list", "--topic", "others") == ""
    assert run_schedules("pause", "report") == "report: paused, 0 runs"
    assert run_json("resume", "report")["state"] == "active"
    assert run_schedules("run", "report").startswith("report: sent report.run-")
    assert run_schedules("history", "report").splitlines()[0].endswith("  unknown")
    schedule = run_json("put", "report", "reports", "make it", "--every", "1h", "--skip-while-busy", "makers")
    assert (schedule["overlap"], schedule["group"]) == ("skip", "makers")
    assert run_schedules("delete", "report") == "report: deleted"
    # Previews come last: they need no stored schedule.
    assert run_json("preview", "--every", "90m", "--count", "1", "--after", "2030-01-01T00:00:00Z") == {
        "due": "2030-01-01T01:30:00.000Z", "due_ms": 1_893_461_400_000, "local": "2030-01-01T01:30:00Z",
    }  # fmt: skip
    rule = '{"at": ["2030-01-31T09:00"]}'
    assert run_schedules("preview", "--rule", rule, "--zone", "UTC") == "2030-01-31T09:00:00"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--rule", "x"], "--rule"), (["--rule", "[]"], "--rule"), (["--cron", "x", "--zone", "UTC"], "cron")],
)
def test_a_rule_that_cannot_be_read_is_refused(http_endpoint: str, arguments: list[str], text: str) -> None:
    result = run_here("schedules", "preview", *arguments, "--endpoint", http_endpoint)
    assert result.returncode == 2 and text in result.stderr and "Traceback" not in result.stderr


def test_an_endpoint_of_flight_is_refused() -> None:
    result = run_here("schedules", "list", "--endpoint", "grpc://127.0.0.1:1")
    assert result.returncode == 2 and "http://" in result.stderr


def test_each_key_of_a_schedule_is_an_option(http_endpoint: str, tmp_path: Path) -> None:
    """The answer of the broker has the values of all options."""
    holidays = tmp_path / "holidays.txt"
    holidays.write_text("2030-12-26  # a comment\n\n2031-01-01\n")

    def put(*arguments: str) -> dict[str, Any]:
        """Put the schedule "full" with these options. Returns the answer of the broker."""
        result = run_here(
            "schedules", "put", "full", "reports", "b", *arguments, "--json", "--endpoint", http_endpoint
        )
        assert result.returncode == 0, result.stderr
        return dict(json.loads(result.stdout))

    output = put(
        "--cron", "0 0 9 * * *", "--seconds", "--zone", "Europe/Berlin", "--gap", "skip", "--fold", "both",
        "--starts-at", "2030-01-01T00:00:00", "--ends-at", "2032-01-01T00:00:00", "--times", "900",
        "--exclude", "2030-12-25",
        "--exclude-file", str(holidays), "--move", "before", "--tag", "t", "--keys", "k1", "--keys", "k2",
        "--property", "p=1", "--catch-up", "all", "--catch-up-within", "2d",
    )  # fmt: skip
    assert output["rule"] == {
        "cron": "0 0 9 * * *", "seconds": True, "zone": "Europe/Berlin", "gap": "skip", "fold": "both",
        "starts_at": "2030-01-01T00:00:00", "ends_at": "2032-01-01T00:00:00", "count": 900,
        "exclude": ["2030-12-25", "2030-12-26", "2031-01-01"], "move": "before",
    }  # fmt: skip
    assert (output["tag"], output["keys"], output["properties"]) == ("t", ["k1", "k2"], {"p": "1"})
    assert (output["catch_up"], output["catch_up_within"]) == ("all", "2d")
    assert (
        put("--every", "1h", "--anchor", "2030-01-01T00:10:00Z")["next"]["due"] == "2030-01-01T00:10:00.000Z"
    )
    assert put("--at", "2030-01-31T09:00", "--at", "2030-02-28T09:00", "--zone", "UTC")["rule"]["at"] == [
        "2030-01-31T09:00:00",
        "2030-02-28T09:00:00",
    ]
    rrule = put("--rrule", r"DTSTART:20300125T090000\nRRULE:FREQ=DAILY", "--zone", "UTC")
    assert rrule["next"]["local"] == "2030-01-25T09:00:00"


def test_zones_shows_the_version_of_tzdata_and_the_zones_in_use(http_endpoint: str) -> None:
    def run_command(*arguments: str) -> str:
        result = run_here(*arguments, "--endpoint", http_endpoint)
        assert result.returncode == 0, result.stderr
        return result.stdout

    run_command(
        "schedule", "local", "x", "--at", "2030-01-31T09:00", "--zone", "Asia/Tokyo", "--id", "local-1"
    )
    nine_in_tokyo_ms = 1_896_048_000_000  # 2030-01-31T00:00:00Z
    assert json.loads(run_command("get", "local-1", "--json"))["due_ms"] == nine_in_tokyo_ms
    assert run_command("zones").startswith(f"tzdata {VERSION}\n") and "  Asia/Tokyo\n" in run_command("zones")
    document = json.loads(run_command("zones", "--json"))
    assert {"zone": "Asia/Tokyo", "latest": "2030-02-15T00:00:00.000Z"} in document["zones"]
    assert "update" not in document, "tzdata was not updated"


def test_moves_of_the_last_update_of_tzdata_are_shown() -> None:
    moved = ZoneMoved(
        zone="America/Vancouver", messages=2, schedules=1, before="2030-01-31T17:00:00.000Z", before_ms=1,
        after="2030-01-31T16:00:00.000Z", after_ms=0,
    )  # fmt: skip
    updated = ZoneUpdated(tzdata="2", former="1", at="", at_ms=0, moved=[moved])
    lines = list(_zone_lines(ZonesInUse("2", [], updated)))
    assert lines[0] == "tzdata 2" and lines[1].startswith("updated from 1 at 1970-01-01")
    assert lines[2] == (
        "  America/Vancouver: 2 messages and 1 schedules moved, the first from 2030-01-31T17:00:00.000Z to "
        "2030-01-31T16:00:00.000Z"
    )
    without_moves = msgspec.structs.replace(updated, moved=[])
    assert list(_zone_lines(ZonesInUse("2", [], without_moves)))[-1] == "  nothing moved"
