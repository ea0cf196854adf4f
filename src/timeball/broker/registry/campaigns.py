"""Campaigns: the scheduled messages of one bulk attach as one object, and the decisions about them.

    planned --attach--> running --pause--> paused --resume--> running --> finished
       \\__________________\\___________________\\__cancel--> cancelled

A campaign is planned before its files are written. Its ranges of numbers are set in the frame that attaches the files.
While it is paused, `held_from_ms` is the due time from which on its scheduled messages are held (schedule/outcomes.py).
It is finished when all its due times have passed, which is computed and not stored. The rows contain the decisions. The
outcome of each scheduled message is in the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.model import limits
from timeball.model.errors import InvalidMessage, NotFound, OutOfRange, OverLimit
from timeball.model.rules import check_campaign
from timeball.table.attachment import Attachment

JOB_MS_MAX = 7 * limits.DAY_MS  # from the plan of a campaign to its attach. A bulk job takes minutes

State = Literal["planned", "running", "paused", "cancelled"]


class CampaignFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a campaign's META row. Times in milliseconds."""

    state: State
    since_ms: int  # when the campaign got this state
    planned_ms: int
    planned_seq: int  # end of the log at that time: all rows of the campaign come after it
    rows: int  # number of scheduled messages: as planned, then as attached
    ranges: list[tuple[int, int]] = []  # (first_seq, rows)
    # The latest due time of its scheduled messages, or -1 before the attach.
    last_due_ms: int = -1
    cancelled: int = 0  # scheduled messages ended by its cancel. The log may remove their rows
    # While the campaign is paused or being cancelled: pending scheduled messages that are due at this time or later are
    # held.
    held_from_ms: int | None = None
    # The groups of the cluster that each have a part of the campaign. A later try must distribute it in the same way.
    groups: list[str] = []

    def is_finished(self, settled_before_ms: int) -> bool:
        """Return whether all its messages have been settled one by one. `settled_before_ms`: of the schedule."""
        return self.state == "running" and self.last_due_ms < settled_before_ms

    def is_cancelled_for_good(self, now_ms: int) -> bool:
        """Return whether none of its messages can be delivered any more, even without the record of its cancel."""
        # With held scheduled messages, the cancel was interrupted. Without an attach, its job may still run and must be
        # refused.
        is_behind = bool(self.ranges) or self.since_ms < now_ms - JOB_MS_MAX
        return self.state == "cancelled" and self.held_from_ms is None and is_behind


class Campaigns:
    """All campaigns, by id. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, "campaign", CampaignFacts)

    def get(self, campaign: str) -> CampaignFacts:
        """Return the decisions about a campaign. Raise InvalidMessage, NotFound."""
        found = self._kept.values.get(check_campaign(campaign))
        if found is None:
            raise NotFound(f"no campaign {campaign!r}; `timeball campaign list` shows those there are")
        return found

    def is_known(self, campaign: str) -> bool:
        """Return whether there is a campaign with this id. Raise InvalidMessage."""
        return check_campaign(campaign) in self._kept.values

    def get_attached(self, campaign: str) -> CampaignFacts:
        """Return the decisions about a campaign that may be paused. Raise InvalidMessage, NotFound, OutOfRange."""
        found = self.get(campaign)
        if found.state == "cancelled":
            raise InvalidMessage(f"campaign {campaign} was cancelled")
        if found.state == "planned":
            raise OutOfRange(f"campaign {campaign} is planned, and nothing of it is attached yet")
        return found

    def all(self) -> dict[str, CampaignFacts]:
        """Return all campaigns, in the order of their plans."""
        return dict(
            sorted(self._kept.values.items(), key=lambda one: (one[1].planned_seq, one[1].planned_ms))
        )

    def put(self, campaign: str, facts: CampaignFacts) -> None:
        """Append the decisions about a campaign."""
        self._kept.put([(campaign, facts)])

    def changed(self, campaign: str, facts: CampaignFacts) -> Change:
        """Build the row of the decisions about a campaign, for a frame with other rows."""
        return self._kept.changed([(campaign, facts)])

    def plan(
        self,
        campaign: str,
        rows: int,
        planned_ms: int,
        next_seq: int,
        settled_before_ms: int,
        groups: Sequence[str] = (),
    ) -> None:
        """Plan a campaign, unless it exists. A campaign without rows is running at once, as it has nothing to attach.

        Raise OverLimit.
        """
        if self.is_known(campaign):
            return
        # The oldest campaign that is over is deleted: the outcomes of its messages are in the log and the ledger.
        while len(self._kept.values) >= limits.CAMPAIGNS_MAX:
            self._kept.put([(self._oldest_over(settled_before_ms, planned_ms), None)])
        state: State = "planned" if rows else "running"
        self.put(
            campaign,
            CampaignFacts(
                state=state, since_ms=planned_ms, planned_ms=planned_ms, planned_seq=next_seq, rows=rows,
                groups=list(groups),
            ),
        )  # fmt: skip

    def _oldest_over(self, settled_before_ms: int, now_ms: int) -> str:
        for name, facts in self.all().items():
            if facts.is_cancelled_for_good(now_ms) or facts.is_finished(settled_before_ms):
                return name
        raise OverLimit(
            f"{limits.CAMPAIGNS_MAX} campaigns are not over yet: cancel those that are not needed"
        )

    def check_attach(self, attachment: Attachment) -> None:
        """Raise InvalidMessage for the attach of a campaign that has been cancelled meanwhile."""
        found = self._planned_for(attachment)
        if found is not None and found.state == "cancelled":
            raise InvalidMessage(f"campaign {attachment.job_id} was cancelled")

    def attached(self, attachment: Attachment, now_ms: int) -> Change | None:
        """Build the row for the frame of a campaign's attach. Return None for other attaches."""
        planned = self._planned_for(attachment)
        if planned is None or planned.state != "planned":
            return None
        facts = msgspec.structs.replace(
            planned,
            state="running",
            since_ms=now_ms,
            rows=attachment.rows,
            ranges=attachment.ranges,
            last_due_ms=max((entry.max_due_ms for entry in attachment.files), default=-1),
        )
        return self.changed(attachment.job_id, facts)

    def _planned_for(self, attachment: Attachment) -> CampaignFacts | None:
        return self._kept.values.get(attachment.job_id) if attachment.job == "bulk" else None
