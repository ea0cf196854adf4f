"""The job `replay` over the groups of a cluster: the messages of each group are scheduled again in the same group.

Each group has its own replay, and all replays have the same name. If a run dies, the next run completes it: groups that
have done their replay do nothing, and a group that was added meanwhile replays its messages. With one group, the result
is the result of jobs/replay.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec
from pyspark.sql import SparkSession

from timeball.spark.endpoint import Group, group_table_uri, read_groups
from timeball.spark.jobs import replay
from timeball.spark.jobs.replay import ReplayPlan, ReplayReport, Window

K = TypeVar("K", int, str)


def plan(
    spark: SparkSession,
    endpoint: str,
    window: Window,
    *,
    archive_uri: str | None = None,
    table_uri: str | None = None,
) -> ReplayPlan:
    """Count the messages that `run` would schedule. Writes nothing."""
    groups = read_groups(endpoint)
    plans = {
        group.name: replay.plan(
            spark, group.endpoint, window, **_group_uris(group, len(groups), archive_uri, table_uri)
        )
        for group in groups
    }
    return plans[groups[0].name] if len(groups) == 1 else add_plans(plans)


def run(
    spark: SparkSession,
    endpoint: str,
    window: Window,
    *,
    archive_uri: str | None = None,
    table_uri: str | None = None,
    job_id: str | None = None,
    planned: ReplayPlan | None = None,
) -> ReplayReport:
    """Schedule the messages of the window again, in one attach per group. Does nothing in groups that have done so.

    `planned`: a recent result of `plan`, so that the messages are not counted again. URIs contain `{group}` if there
    are several groups.
    """
    groups, reports = read_groups(endpoint), {}
    for group in groups:
        group_plan = planned
        if planned is not None and len(groups) > 1:
            group_plan = planned.groups.get(group.name) if planned.groups else None
        uris = _group_uris(group, len(groups), archive_uri, table_uri)
        reports[group.name] = replay.run(
            spark, group.endpoint, window, job_id=job_id, planned=group_plan, **uris
        )
    return reports[groups[0].name] if len(groups) == 1 else add_reports(reports)


def done_before(endpoint: str, job_id: str, table_uri: str | None = None) -> ReplayReport | None:
    """Report the result of an earlier replay of this name. Returns None unless all groups have done their part."""
    groups, reports = read_groups(endpoint), {}
    for group in groups:
        uri = group_table_uri("--table-uri", table_uri, group.name, len(groups))
        done = replay.done_before(group.endpoint, job_id, uri)
        if done is None:
            return None
        reports[group.name] = done
    return reports[groups[0].name] if len(groups) == 1 else add_reports(reports)


def add_plans(groups: Mapping[str, ReplayPlan]) -> ReplayPlan:
    """Add the plans of all groups. They have the same `width_ms`, because it follows from the window."""
    plans = list(groups.values())
    first_due_ms = [plan.first_due_ms for plan in plans if plan.first_due_ms is not None]
    last_due_ms = [plan.last_due_ms for plan in plans if plan.last_due_ms is not None]
    topics = _add(plan.topics for plan in plans)
    return msgspec.structs.replace(
        plans[0],
        rows=sum(plan.rows for plan in plans),
        body_bytes=sum(plan.body_bytes for plan in plans),
        first_due_ms=min(first_due_ms, default=None),
        last_due_ms=max(last_due_ms, default=None),
        overdue=sum(plan.overdue for plan in plans),
        now_ms=min(plan.now_ms for plan in plans),
        curve=dict(sorted(_add(plan.curve for plan in plans).items())),
        topics=dict(sorted(topics.items(), key=lambda item: (-item[1], item[0]))),
        groups=dict(groups),
    )


def add_reports(groups: Mapping[str, ReplayReport]) -> ReplayReport:
    """Add the reports of all groups.

    `repeated` is True if no group has scheduled a row now, and at least one before.
    """
    reports = list(groups.values())
    return ReplayReport(
        job_id=reports[0].job_id,
        rows=sum(report.rows for report in reports),
        at_ms=min(report.at_ms for report in reports),
        repeated=any(report.repeated for report in reports)
        and not any(report.rows and not report.repeated for report in reports),
        ranges=[],
        groups=dict(groups),
    )


def _group_uris(
    group: Group, groups: int, archive_uri: str | None, table_uri: str | None
) -> dict[str, str | None]:
    return {
        "archive_uri": group_table_uri("--archive", archive_uri, group.name, groups),
        "table_uri": group_table_uri("--table-uri", table_uri, group.name, groups),
    }


def _add(counts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total: dict[K, int] = {}
    for group_counts in counts:
        for name, rows in group_counts.items():
            total[name] = total.get(name, 0) + rows
    return total
