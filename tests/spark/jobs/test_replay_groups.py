"""Tests of timeball.spark.jobs.replay_groups: how the replays of several groups are added up.

What they schedule: tests/spark/test_all_groups.py.
"""

from __future__ import annotations

from timeball.spark.jobs.replay import ReplayPlan, ReplayReport
from timeball.spark.jobs.replay_groups import add_plans, add_reports


def plan(rows: int, due_ms: int | None, **topics: int) -> ReplayPlan:
    return ReplayPlan(
        job_id="replay-1", rows=rows, body_bytes=10 * rows, first_due_ms=due_ms, last_due_ms=due_ms, overdue=rows,
        now_ms=rows, width_ms=1_000, curve={} if due_ms is None else {due_ms: rows}, topics=topics,
    )  # fmt: skip


def report(rows: int, *, repeated: bool) -> ReplayReport:
    return ReplayReport(job_id="replay-1", rows=rows, at_ms=5, repeated=repeated, ranges=[(1, rows)])


def test_a_plan_of_all_groups() -> None:
    result = add_plans({"g1": plan(5, 2_000, a=5), "g2": plan(7, 1_000, a=1, b=6), "g3": plan(0, None)})
    assert (result.rows, result.body_bytes, result.overdue, result.now_ms) == (12, 120, 12, 0)
    assert (result.first_due_ms, result.last_due_ms) == (1_000, 2_000)
    assert list(result.curve.items()) == [(1_000, 7), (2_000, 5)]
    assert list(result.topics.items()) == [("a", 6), ("b", 6)]
    assert result.groups and [each.rows for each in result.groups.values()] == [5, 7, 0]


def test_a_replay_is_repeated_when_no_group_schedules_a_row() -> None:
    done, fresh = report(5, repeated=True), report(7, repeated=False)
    both = add_reports({"g1": done, "g2": fresh})
    assert (both.rows, both.repeated, both.ranges) == (12, False, [])
    assert add_reports({"g1": done, "g2": report(0, repeated=False)}).repeated, "nothing passed in the other"
    assert not add_reports({"g1": fresh, "g2": report(0, repeated=False)}).repeated
