"""Campaigns: the scheduled messages of one bulk attach, which can be paused, resumed and cancelled together.

    planned --attach--> running --pause--> paused --resume--> running --> finished
       \\__________________\\___________________\\__cancel--> cancelled

A campaign is planned before its files are written. Its ranges of numbers are set in the frame that attaches the files.
While it is paused, `held_from_ms` is the due time from which on its scheduled messages are held (schedule/outcomes.py).
It is finished when all its due times have passed, which is computed and not stored. The META rows contain only the
decisions. The outcome of each scheduled message is in other rows of the log.
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
        """Check whether all its messages are settled. Messages due before the schedule's `settled_before_ms` are."""
        return self.state == "running" and self.last_due_ms < settled_before_ms

    def is_cancelled_for_good(self, now_ms: int) -> bool:
        """Check whether none of its messages can be delivered any more, even if this record were deleted."""
        # If messages are still held, the cancel was interrupted. Without an attach, the job may still be running, and
        # its attach must be refused.
        is_behind = bool(self.ranges) or self.since_ms < now_ms - JOB_MS_MAX
        return self.state == "cancelled" and self.held_from_ms is None and is_behind


class Campaigns:
    """All campaigns, by id. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "campaign", CampaignFacts)

    def get(self, campaign: str) -> CampaignFacts:
        """Find a campaign. Raise InvalidMessage, NotFound."""
        facts = self._table.values.get(check_campaign(campaign))
        if facts is None:
            raise NotFound(f"no campaign {campaign!r}; `timeball campaign list` shows those there are")
        return facts

    def is_known(self, campaign: str) -> bool:
        """Check whether a campaign with this id exists. Raise InvalidMessage for an invalid id."""
        return check_campaign(campaign) in self._table.values

    def get_attached(self, campaign: str) -> CampaignFacts:
        """Find a campaign that is attached and not cancelled. Raise InvalidMessage, NotFound, OutOfRange."""
        facts = self.get(campaign)
        if facts.state == "cancelled":
            raise InvalidMessage(f"campaign {campaign} was cancelled")
        if facts.state == "planned":
            raise OutOfRange(f"campaign {campaign} is planned, and nothing of it is attached yet")
        return facts

    def all(self) -> dict[str, CampaignFacts]:
        """List all campaigns by id, in the order in which they were planned."""
        return dict(
            sorted(self._table.values.items(), key=lambda entry: (entry[1].planned_seq, entry[1].planned_ms))
        )

    def put(self, campaign: str, facts: CampaignFacts) -> None:
        """Append the state of a campaign to the log."""
        self._table.put([(campaign, facts)])

    def changed(self, campaign: str, facts: CampaignFacts) -> Change:
        """Build the row with the state of a campaign, for a frame with other rows."""
        return self._table.changed([(campaign, facts)])

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
        # Delete the oldest campaign that is over: the outcomes of its messages are in the log and the ledger.
        while len(self._table.values) >= limits.CAMPAIGNS_MAX:
            self._table.put([(self._find_oldest_finished(settled_before_ms, planned_ms), None)])
        state: State = "planned" if rows else "running"
        self.put(
            campaign,
            CampaignFacts(
                state=state, since_ms=planned_ms, planned_ms=planned_ms, planned_seq=next_seq, rows=rows,
                groups=list(groups),
            ),
        )  # fmt: skip

    def _find_oldest_finished(self, settled_before_ms: int, now_ms: int) -> str:
        for name, facts in self.all().items():
            if facts.is_cancelled_for_good(now_ms) or facts.is_finished(settled_before_ms):
                return name
        raise OverLimit(
            f"{limits.CAMPAIGNS_MAX} campaigns are not over yet: cancel those that are not needed"
        )

    def check_attach(self, attachment: Attachment) -> None:
        """Raise InvalidMessage if this attach belongs to a cancelled campaign."""
        facts = self._campaign_of(attachment)
        if facts is not None and facts.state == "cancelled":
            raise InvalidMessage(f"campaign {attachment.job_id} was cancelled")

    def attached(self, attachment: Attachment, now_ms: int) -> Change | None:
        """Build the row that makes a planned campaign running, for the frame of its attach. None for other attaches."""
        planned = self._campaign_of(attachment)
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

    def _campaign_of(self, attachment: Attachment) -> CampaignFacts | None:
        return self._table.values.get(attachment.job_id) if attachment.job == "bulk" else None
