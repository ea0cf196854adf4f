"""Format the output of `timeball cluster status` for people."""

from __future__ import annotations

from collections.abc import Iterator

from timeball.cli.units import show_wait
from timeball.monitoring.replica_groups import ReplicaGroup, ReplicaState

HEADINGS = ("node", "role", "log", "committed", "applied", "lag", "clock", "version", "since")


def lines(group: ReplicaGroup, now_ms: int) -> Iterator[str]:
    """Yield the lines of one group, as of `now_ms` (wall clock)."""
    leader = f"leader {group.leader}, epoch {group.epoch}" if group.leader else "no leader"
    yield f"group {group.group}: {leader}"
    rows = [HEADINGS, *(_row(each, now_ms) for each in group.replicas)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if group.asked:
        yield f"  asked for: {group.asked}"
    for problem in group.problems:
        yield f"  ! {problem}"


def _row(each: ReplicaState, now_ms: int) -> tuple[str, ...]:
    role = each.role if each.is_in_record or each.role == "learner" else f"{each.role}, no replica"
    offset = "" if each.clock_offset_ms is None else f"{each.clock_offset_ms:+.1f} ms"
    since = "" if each.since_ms is None else show_wait(max(0, now_ms - each.since_ms))
    numbers = (each.log_seq, each.committed_seq, each.applied_seq, each.lag_rows)
    return (each.node, role, *(_count(number) for number in numbers), offset, each.version, since)


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"
