"""`timeball replay`: the confirmation before messages are scheduled. tests/spark/jobs tests the job itself."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from deltalake import DeltaTable
from tests.cli.in_process import run_here
from tests.cli.unreachable import NO_FLIGHT, assert_says_how_to_reach_one
from tests.node_fixture import eventually, running_node
from tests.rounds import only_in_a_siege

from timeball.cli.replay import confirm, describe_plan, find_start_ms, print_report, show_time
from timeball.model.errors import InvalidDelay, RequestError
from timeball.model.limits import DAY_MS, HOUR_MS

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")

from timeball.spark.jobs.replay import ReplayPlan, ReplayReport

NOON_MS = 1_900_000_000_000 // DAY_MS * DAY_MS + 12 * HOUR_MS
WINDOW = ["--from", "2030-01-01T09:00Z", "--until", "2030-01-01T10:00Z"]
PLAN = ReplayPlan(
    job_id="replay-1",
    rows=5_000,
    body_bytes=1_048_576,
    first_due_ms=NOON_MS,
    last_due_ms=NOON_MS + 60_500,
    overdue=0,
    now_ms=NOON_MS - HOUR_MS,
    width_ms=60_000,
    curve={NOON_MS: 4_000, NOON_MS + 60_000: 1_000},
    topics={"orders": 4_900, "news": 100},
)


def test_a_replay_starts_at_a_time_or_after_a_shift() -> None:
    assert find_start_ms(from_ms=1_000, at_ms=5_000, shift_ms=None) == 5_000
    assert find_start_ms(from_ms=1_000, at_ms=None, shift_ms=30) == 1_030
    assert find_start_ms(from_ms=1_000, at_ms=0, shift_ms=None) == 0
    for at_and_shift in ((None, None), (5_000, 30)):
        with pytest.raises(InvalidDelay, match="exactly one of --at"):
            find_start_ms(1_000, *at_and_shift)


def test_a_replay_without_confirmation_schedules_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    confirm(PLAN, late=False, yes=True)
    with pytest.raises(RequestError, match="add --yes, or --dry-run"):
        confirm(PLAN, late=False, yes=False)  # no terminal to ask on


def test_past_due_times_are_refused_unless_allowed() -> None:
    some_late = msgspec.structs.replace(PLAN, overdue=4_999)
    with pytest.raises(RequestError, match="4,999 of 5,000 messages would be due before now"):
        confirm(some_late, late=False, yes=True)
    confirm(some_late, late=True, yes=True)


def test_a_plan_shows_its_curve_topics_and_due_times() -> None:
    *curve, topics, span, width = describe_plan(PLAN)
    assert [line.split()[0] for line in curve] == [show_time(NOON_MS), show_time(NOON_MS + 60_000)]
    assert [line.split()[-1] for line in curve] == ["4,000", "1,000"]
    assert topics == "from orders 4,900, news 100"
    assert span == (
        f"5,000 messages, 1 MiB of bodies, due {show_time(NOON_MS)} to {show_time(NOON_MS + 60_500)}"
    )
    assert width == "each bar is 1m"
    assert (
        list(describe_plan(msgspec.structs.replace(PLAN, overdue=7)))[-1]
        == "7 of them would be due before now"
    )
    many = msgspec.structs.replace(PLAN, topics={f"t{n}": 1 for n in range(12)})
    assert any(line.endswith("t9 1, and 2 topics more") for line in describe_plan(many))
    nothing = msgspec.structs.replace(PLAN, rows=0, first_due_ms=None, last_due_ms=None)
    assert list(describe_plan(nothing)) == ["nothing passed in this window"]


def test_a_time_shows_milliseconds_only_if_they_are_not_0() -> None:
    assert (show_time(0), show_time(1_500)) == ("1970-01-01T00:00:00Z", "1970-01-01T00:00:01.500Z")


def test_the_report_says_whether_an_earlier_run_has_scheduled_the_messages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = ReplayReport(job_id="replay-1", rows=5_000, at_ms=0, repeated=False, ranges=[(1, 5_000)])
    print_report(report, as_json=False)
    print_report(msgspec.structs.replace(report, repeated=True), as_json=False)
    print_report(report, as_json=True)
    now, before, document = capsys.readouterr().out.splitlines()
    assert now == "scheduled 5,000 messages as replay-1"
    assert before == "done before, at 1970-01-01T00:00:00Z: 5,000 messages as replay-1"
    assert json.loads(document)["ranges"] == [[1, 5_000]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (WINDOW, "--at"),
        ([*WINDOW, "--shift", "soon"], "--shift"),
        (["--from", "2030-01-01T09:00", *WINDOW[2:], "--shift", "1d"], "--from"),
        ([*WINDOW, "--shift", "1d", "--stretch", "-1"], "--stretch"),
        ([*WINDOW, "--shift", "1d", "--by", "luck"], "--by"),
        ([*WINDOW, "--shift", "1d", "--job-id", "once more"], "--job-id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_arguments_are_refused_before_spark_starts(arguments: list[str], text: str) -> None:
    result = run_here("replay", *arguments, "--master", "spark://127.0.0.1:1", "--endpoint", NO_FLIGHT)
    assert (result.returncode, result.stdout) == (2, "")
    assert text in result.stderr


def test_no_broker_is_told_without_waiting_for_spark() -> None:
    arguments = [*WINDOW, "--shift", "1d", "--master", "spark://127.0.0.1:1", "--endpoint", NO_FLIGHT]
    assert_says_how_to_reach_one(run_here("replay", *arguments), NO_FLIGHT)


@pytest.mark.siege
@only_in_a_siege
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_replay_schedules_nothing_before_it_is_confirmed_and_once_after_that(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", compact_rows=0) as node, node.client() as ball:
        ball.send_many([{"topic": "t", "body": b"x", "delay_ms": 1} for _ in range(5)])
        eventually(lambda: len(ball.browse("t", "all", wait="10s")) == 5, "five messages released")
        now_ms = ball.status()["now_ms"]
        eventually(lambda: ball.status()["now_ms"] > now_ms, "a moment later")
        where = ["--from", str(now_ms - HOUR_MS), "--until", str(now_ms), "--shift", "1d"]
        where += ["--endpoint", node.endpoint]

        def count_table_rows() -> int:
            table = DeltaTable(ball.status()["table"]["uri"])
            return len(table.to_pyarrow_table(columns=["seq"])) if table.file_uris() else 0

        archived = run_here("pipeline", "run", "archive", "--once", "--endpoint", node.endpoint)
        assert (archived.returncode, archived.stdout) == (0, ""), archived.stderr
        plan = run_here("replay", *where, "--dry-run", "--json")
        assert plan.returncode == 0 and json.loads(plan.stdout)["topics"] == {"t": 5}, plan.stderr
        refused = run_here("replay", *where)
        assert refused.returncode == 2 and "5 messages" in refused.stdout and "add --yes" in refused.stderr
        assert count_table_rows() == 0
        result = run_here("replay", *where, "--yes")
        assert result.returncode == 0 and result.stdout.splitlines()[-1].startswith("scheduled 5 messages"), (
            result.stderr
        )
        repeated = run_here("replay", *where, "--yes", "--json")
        assert repeated.returncode == 0 and json.loads(repeated.stdout)["repeated"] is True, repeated.stderr
        assert count_table_rows() == 5
