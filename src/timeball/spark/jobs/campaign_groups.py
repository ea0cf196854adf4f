"""A campaign with parts in several groups of a cluster: calls go to all its parts, and the answers are added up.

The plan of each part names all groups of the campaign. So a group that no longer exists raises an error, and its part
is not silently left out. A part that is not planned, because the job died before, has no messages yet. With one group,
the only part is the campaign itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from timeball.model.errors import NotFound
from timeball.spark.endpoint import Endpoint, read_groups
from timeball.spark.groups import Group, group_table_uri
from timeball.spark.jobs.campaign import Campaign, Cancelled, Paused, Progress, Resumed

T = TypeVar("T")

# A campaign has the first of these states that any of its parts has. So it is finished when all its parts are.
STATE_PRECEDENCE = ("planned", "cancelled", "paused", "running", "finished")


@contextmanager
def open_parts(endpoint: str, campaign: str, table_uri: str | None = None) -> Iterator[dict[str, Campaign]]:
    """Open the parts of a campaign by group, in the groups that its plan names. Without a plan, in all groups.

    `table_uri`: the URI of the pending tables for this process, if it is not the brokers'. It contains `{group}` if
    there are several groups. The connections are closed after the block.
    """
    groups = read_groups(endpoint)
    with ExitStack() as opened:

        def open_in(group: Group) -> Campaign:
            uri = group_table_uri("--table-uri", table_uri, group.name, len(groups))
            return Campaign(opened.enter_context(Endpoint(group.endpoint)), campaign, uri)

        yield choose({group.name: open_in(group) for group in sorted(groups)})


def choose(campaigns: dict[str, Campaign]) -> dict[str, Campaign]:
    """Select the groups that the campaign's plan names, or all if it is not planned.

    `campaigns`: the campaign in each group of the cluster, planned there or not. Raises NotFound if the plan names a
    group that is not in the cluster.
    """
    states = (
        {name: campaign.find_state() for name, campaign in campaigns.items()} if len(campaigns) > 1 else {}
    )
    planned = {name: state for name, state in states.items() if state is not None}
    if not planned:
        return campaigns
    # A plan names no groups if it was made when there was one group, or for one group only.
    names = next((state.groups for state in planned.values() if state.groups), list(planned))
    for name in names:
        if name not in campaigns:
            raise NotFound(f"the campaign has a part in the group {name!r}, which is not in the cluster")
    return {name: campaigns[name] for name in names}


class CampaignParts:
    """A campaign, as the sum of its parts in several groups. Its methods raise NotFound if no part is planned."""

    def __init__(self, parts: Mapping[str, Campaign]) -> None:
        self._parts = dict(parts)

    def progress(self) -> Progress:
        """Count the messages of all parts."""
        return add_progress(self._call_parts(Campaign.progress))

    def pause(self) -> Paused:
        """Hold all waiting messages."""
        results = self._call_parts(Campaign.pause)
        return Paused(
            campaign=results[0].campaign,
            held=sum(result.held for result in results),
            repeated=all(result.repeated for result in results),
        )

    def resume(self, *, shift: bool = False) -> Resumed:
        """Make all held messages wait again.

        The parts were paused one by one, and `shift_ms` is their longest shift.
        """
        results = self._call_parts(lambda part: part.resume(shift=shift))
        return Resumed(
            campaign=results[0].campaign,
            rows=sum(result.rows for result in results),
            shift_ms=max(result.shift_ms for result in results),
            repeated=all(result.repeated for result in results),
        )

    def cancel(self) -> Cancelled:
        """Cancel all waiting and held messages."""
        results = self._call_parts(Campaign.cancel)
        return Cancelled(
            campaign=results[0].campaign,
            rows=sum(result.rows for result in results),
            newly=sum(result.newly for result in results),
            cancelled=sum(result.cancelled for result in results),
            released=sum(result.released for result in results),
        )

    def _call_parts(self, call: Callable[[Campaign], T]) -> list[T]:
        """Call a function for each planned part. Returns the results."""
        # If no part is planned, all parts are called, which raises NotFound.
        if len(self._parts) == 1:
            return [call(part) for part in self._parts.values()]
        planned = [part for part in self._parts.values() if part.find_state() is not None]
        return [call(part) for part in planned or self._parts.values()]


def add_progress(parts: list[Progress]) -> Progress:
    """Add the progress of the parts."""
    if len(parts) == 1:
        return parts[0]
    rows, settled = sum(part.rows for part in parts), sum(part.released + part.cancelled for part in parts)
    due_ms = [part.next_due_ms for part in parts if part.next_due_ms is not None]
    last_ms = [part.last_due_ms for part in parts if part.last_due_ms is not None]
    return Progress(
        campaign=parts[0].campaign,
        state=min((part.state for part in parts), key=STATE_PRECEDENCE.index),
        rows=rows,
        released=sum(part.released for part in parts),
        cancelled=sum(part.cancelled for part in parts),
        waiting=sum(part.waiting for part in parts),
        held=sum(part.held for part in parts),
        next_due_ms=min(due_ms, default=None),
        last_due_ms=max(last_ms, default=None),
        planned_ms=min(part.planned_ms for part in parts),
        percent=round(100 * settled / rows, 1) if rows else parts[0].percent,
        whole=all(part.whole for part in parts),
    )
