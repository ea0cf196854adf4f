"""The job `replay` over the groups of a cluster: the messages of each group are scheduled again in the same group.

Each group has its own replay, and all have the same name. If a run dies, the next one completes it: groups that have
done their replay do nothing, and a group that was added meanwhile replays its messages. With one group, the result is
that of jobs/replay.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec
from pyspark.sql import SparkSession

from timeball.spark.endpoint import read_groups
from timeball.spark.groups import Group, place_of
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
    found = {
        each.name: replay.plan(
            spark, each.endpoint, window, **_places(each, len(groups), archive_uri, table_uri)
        )
        for each in groups
    }
    return found[groups[0].name] if len(groups) == 1 else add_plans(found)


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
    """Schedule the messages of the window again, in one attach per group. Groups that have done so do nothing.

    `planned`: a recent result of `plan`, so that the messages are not counted again. URIs contain `{group}` if there
    are several groups.
    """
    groups, found = read_groups(endpoint), {}
    for each in groups:
        known = planned
        if planned is not None and len(groups) > 1:
            known = planned.groups.get(each.name) if planned.groups else None
        places = _places(each, len(groups), archive_uri, table_uri)
        found[each.name] = replay.run(spark, each.endpoint, window, job_id=job_id, planned=known, **places)
    return found[groups[0].name] if len(groups) == 1 else add_reports(found)


def done_before(endpoint: str, job_id: str, table_uri: str | None = None) -> ReplayReport | None:
    """Report the result of an earlier replay of this name, or None if a group has not done its part."""
    groups, found = read_groups(endpoint), {}
    for each in groups:
        uri = place_of("--table-uri", table_uri, each.name, len(groups))
        done = replay.done_before(each.endpoint, job_id, uri)
        if done is None:
            return None
        found[each.name] = done
    return found[groups[0].name] if len(groups) == 1 else add_reports(found)


def add_plans(groups: Mapping[str, ReplayPlan]) -> ReplayPlan:
    """Add the plans of all groups. They have the same `width_ms`, because it follows from the window."""
    parts = list(groups.values())
    first = [each.first_due_ms for each in parts if each.first_due_ms is not None]
    last = [each.last_due_ms for each in parts if each.last_due_ms is not None]
    topics = _add(each.topics for each in parts)
    return msgspec.structs.replace(
        parts[0],
        rows=sum(each.rows for each in parts),
        body_bytes=sum(each.body_bytes for each in parts),
        first_due_ms=min(first, default=None),
        last_due_ms=max(last, default=None),
        overdue=sum(each.overdue for each in parts),
        now_ms=min(each.now_ms for each in parts),
        curve=dict(sorted(_add(each.curve for each in parts).items())),
        topics=dict(sorted(topics.items(), key=lambda item: (-item[1], item[0]))),
        groups=dict(groups),
    )


def add_reports(groups: Mapping[str, ReplayReport]) -> ReplayReport:
    """Add the reports of all groups. `repeated` is True if none has scheduled a row now, and at least one before."""
    parts = list(groups.values())
    return ReplayReport(
        job_id=parts[0].job_id,
        rows=sum(each.rows for each in parts),
        at_ms=min(each.at_ms for each in parts),
        repeated=any(each.repeated for each in parts)
        and not any(each.rows and not each.repeated for each in parts),
        ranges=[],
        groups=dict(groups),
    )


def _places(
    group: Group, groups: int, archive_uri: str | None, table_uri: str | None
) -> dict[str, str | None]:
    return {
        "archive_uri": place_of("--archive", archive_uri, group.name, groups),
        "table_uri": place_of("--table-uri", table_uri, group.name, groups),
    }


def _add(counts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total: dict[K, int] = {}
    for each in counts:
        for name, rows in each.items():
            total[name] = total.get(name, 0) + rows
    return total
