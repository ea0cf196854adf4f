"""A campaign that has a part in each of several groups, as one: every part is asked, and the answers are added up.

The plan of each part names all groups of the campaign, so a part whose group is gone is an error and not left out. A
part that was not planned, because the job died before, has no promises yet. With one group this is the campaign itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from timeball.errors import NotFound
from timeball.pipeline.endpoint import Endpoint, read_groups
from timeball.pipeline.groups import Group, place_of
from timeball.pipeline.jobs.campaign import Campaign, Cancelled, Paused, Progress, Resumed

T = TypeVar("T")

# The state of the whole is the first of these that a part is in: a whole is finished when all its parts are.
STATES = ("planned", "cancelled", "paused", "running", "finished")


@contextmanager
def open_parts(endpoint: str, campaign: str, table_uri: str | None = None) -> Iterator[dict[str, Campaign]]:
    """Open a campaign in the groups that its plan names; in all groups there are, if it is planned in none.

    `table_uri`: where this process reaches the pending tables, if not as the brokers do.
    """
    groups = read_groups(endpoint)
    with ExitStack() as opened:

        def open_in(group: Group) -> Campaign:
            uri = place_of("--table-uri", table_uri, group.name, len(groups))
            return Campaign(opened.enter_context(Endpoint(group.endpoint)), campaign, uri)

        yield choose({group.name: open_in(group) for group in sorted(groups)})


def choose(campaigns: dict[str, Campaign]) -> dict[str, Campaign]:
    """Return the parts of a campaign; raise NotFound when its plan names a group that is not there."""
    decided = (
        {name: campaign.find_decided() for name, campaign in campaigns.items()} if len(campaigns) > 1 else {}
    )
    known = {name: each for name, each in decided.items() if each is not None}
    if not known:
        return campaigns
    # Without groups: of a time with one group, or made in this group alone.
    names = next((each.groups for each in known.values() if each.groups), list(known))
    for name in names:
        if name not in campaigns:
            raise NotFound(f"the campaign has a part in the group {name!r}, which is not in the cluster")
    return {name: campaigns[name] for name in names}


class CampaignParts:
    """A campaign over the groups that have a part of it."""

    def __init__(self, parts: Mapping[str, Campaign]) -> None:
        self._parts = dict(parts)

    def progress(self) -> Progress:
        """Count all parts; raise NotFound."""
        return add_progress(self._each(Campaign.progress))

    def pause(self) -> Paused:
        """Hold everything that waits now."""
        done = self._each(Campaign.pause)
        return Paused(
            campaign=done[0].campaign,
            held=sum(each.held for each in done),
            repeated=all(each.repeated for each in done),
        )

    def resume(self, *, shift: bool = False) -> Resumed:
        """Let everything that is held wait again. Parts are paused one after the other: the longest shift is told."""
        done = self._each(lambda part: part.resume(shift=shift))
        return Resumed(
            campaign=done[0].campaign,
            rows=sum(each.rows for each in done),
            shift_ms=max(each.shift_ms for each in done),
            repeated=all(each.repeated for each in done),
        )

    def cancel(self) -> Cancelled:
        """End all that waits or is held."""
        done = self._each(Campaign.cancel)
        return Cancelled(
            campaign=done[0].campaign,
            rows=sum(each.rows for each in done),
            newly=sum(each.newly for each in done),
            cancelled=sum(each.cancelled for each in done),
            released=sum(each.released for each in done),
        )

    def _each(self, call: Callable[[Campaign], T]) -> list[T]:
        """Return what the call says of each part that is planned; raise NotFound when none is."""
        if len(self._parts) == 1:
            return [call(part) for part in self._parts.values()]
        planned = [part for part in self._parts.values() if part.find_decided() is not None]
        return [call(part) for part in planned or self._parts.values()]


def add_progress(parts: list[Progress]) -> Progress:
    """Return the progress of the whole."""
    if len(parts) == 1:
        return parts[0]
    rows, ended = sum(part.rows for part in parts), sum(part.released + part.cancelled for part in parts)
    due_ms = [part.next_due_ms for part in parts if part.next_due_ms is not None]
    last_ms = [part.last_due_ms for part in parts if part.last_due_ms is not None]
    return Progress(
        campaign=parts[0].campaign,
        state=min((part.state for part in parts), key=STATES.index),
        rows=rows,
        released=sum(part.released for part in parts),
        cancelled=sum(part.cancelled for part in parts),
        waiting=sum(part.waiting for part in parts),
        held=sum(part.held for part in parts),
        next_due_ms=min(due_ms, default=None),
        last_due_ms=max(last_ms, default=None),
        planned_ms=min(part.planned_ms for part in parts),
        percent=round(100 * ended / rows, 1) if rows else parts[0].percent,
        whole=all(part.whole for part in parts),
    )
