"""Plan, pause, resume and cancel campaigns, each decided by one row of the log.

    pause     a META row; from this moment the schedule loads nothing of the campaign's ranges
    resume    the data files that hold its rows are written again, its own rows due later by the shift and none before
              now; one frame has the TABLE row that exchanges the files and the META row that ends the hold
    cancel    a META row, after which nothing of it can be attached any more and all of it is held; then a CANCEL row
              for all that waits; then a META row that ends the hold

Numbers, ids and recall handles stay through both. A command that dies between its steps leaves the campaign as it was:
paused until the frame of the resume is in the log, and cancelled once the first row is. What a cancel has left over is
held, so that none of it is released, and is ended by the broker itself (`finish_cancels`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from timeball.broker.components import Components
from timeball.broker.registry.campaigns import CampaignFacts, State
from timeball.broker.revoking.ranges import cancel_ranges
from timeball.broker.table_changes import TableChanges
from timeball.errors import Corrupt, OutOfRange
from timeball.wire import Campaign, RangesCancelled

logger = logging.getLogger(__name__)


class CampaignChanges:
    """The verbs of campaigns, one at a time. Belongs to the event loop."""

    def __init__(self, parts: Components, mover: TableChanges) -> None:
        self._parts, self._mover = parts, mover
        # One change at a time: a resume writes files for seconds, and a cancel meanwhile would miss rows in them.
        self._lock = asyncio.Lock()
        self._damaged: set[str] = set()  # campaigns whose cancel waits for a command, not for the next duty

    def get(self, campaign: str) -> Campaign:
        """Return a campaign as it was left; raise InvalidMessage, NotFound."""
        return self._shown(campaign, self._parts.campaigns.get(campaign))

    def all(self) -> list[Campaign]:
        """Return all campaigns, the newest last, without their ranges."""
        found = self._parts.campaigns.all().items()
        return [self._shown(name, msgspec.structs.replace(facts, ranges=[])) for name, facts in found]

    async def plan(
        self, campaign: str, rows: int, at_ms: int | None = None, groups: Sequence[str] = ()
    ) -> Campaign:
        """Make a campaign of so many rows, which are attached next under its id; it may be there already.

        `at_ms`: the instant at which its rows were found to be valid. `groups`: of the cluster, each of which has a
        part of it. Raises OutOfRange for an id whose rows were
        attached before and which is no campaign any more.
        """
        parts = self._parts
        parts.writer.check_room()
        # Its attach would be answered as a repeated one: the id would stay planned, and the rows nowhere.
        if not parts.campaigns.is_known(campaign) and parts.ledger.has_attached(campaign):
            raise OutOfRange(
                f"rows were attached as {campaign} before, and no campaign is left of it: use another id"
            )
        planned_ms = parts.clock.now_ms() if at_ms is None else at_ms
        parts.campaigns.plan(
            campaign, rows, planned_ms, parts.writer.next_seq, parts.scheduler.settled_before_ms, groups
        )
        await parts.writer.flushed()
        return self.get(campaign)

    async def pause(self, campaign: str) -> Campaign:
        """Hold all of it that waits."""
        parts = self._parts
        async with self._lock, self._mover.lock:  # an attach has brought all its files, or none yet
            facts = parts.campaigns.get_attached(campaign)
            if facts.state == "paused":
                return self._shown(campaign, facts, repeated=True)
            parts.writer.check_room()
            # No pause between hold and row: a release handed out before it stands in the log before the row.
            held_from_ms = parts.scheduler.hold(campaign, facts.ranges)
            parts.campaigns.put(campaign, self._as(facts, "paused", held_from_ms=held_from_ms))
            await parts.writer.flushed()
            return self.get(campaign)

    async def resume(self, campaign: str, *, shift: bool) -> Campaign:
        """Let what is held wait again: overdue rows are due now, or all of it later by as long as the pause was."""
        async with self._lock:
            facts = self._parts.campaigns.get_attached(campaign)
            if facts.state != "paused":
                return self._shown(campaign, facts, repeated=True)
            # Never negative: with a clock that was set back a resume would move messages ahead of their instants.
            shift_ms = max(0, self._parts.clock.now_ms() - facts.since_ms) if shift else 0
            rows = await self._mover.resume(campaign, facts, shift_ms)
            return msgspec.structs.replace(self.get(campaign), count=rows, shift_ms=shift_ms)

    async def cancel(self, campaign: str) -> Campaign:
        """End all of it that waits or is held; definite when it returns, and may be repeated."""
        parts, counted = self._parts, RangesCancelled(0, 0, 0, 0)
        async with self._lock:
            async with self._mover.lock:
                facts = parts.campaigns.get(campaign)
                repeated = facts.state == "cancelled"
                if not repeated:
                    parts.writer.check_room()
                    held_from_ms = facts.held_from_ms
                    if facts.ranges and held_from_ms is None:
                        held_from_ms = parts.scheduler.hold(campaign, facts.ranges)
                    # Before the CANCEL rows: from now on nothing of the campaign can be attached behind them, and a
                    # start that finds this row alone releases nothing that was still to be cancelled.
                    first = msgspec.structs.replace(facts, state="cancelled", held_from_ms=held_from_ms)
                    parts.campaigns.put(campaign, first)
            if facts.ranges:
                reason = f"campaign {campaign}"
                counted = await cancel_ranges(parts, self._mover.lock, facts.ranges, reason)
            # Behind the last CANCEL row: until then what is held must not count as settled.
            # Not `already_cancelled`: these were ended, or moved, one by one; or by the cancel that this one finishes.
            ended = facts.cancelled + counted.cancelled
            if repeated and facts.held_from_ms is not None:
                ended += counted.already_cancelled
            if not repeated or (ended, None) != (facts.cancelled, facts.held_from_ms):
                parts.campaigns.put(
                    campaign, msgspec.structs.replace(self._as(facts, "cancelled"), cancelled=ended)
                )
                parts.outcomes.holds.remove(campaign)
            await parts.writer.flushed()
        return msgspec.structs.replace(self.get(campaign), count=counted.cancelled, repeated=repeated)

    async def finish_cancels(self) -> None:
        """Go on with the cancels that were cut short, by a crash or a full disk; a duty of upkeep.py."""
        for campaign, facts in self._parts.campaigns.all().items():
            if self._lock.locked():
                return  # a command is at work, perhaps on this very one
            is_cut_short = facts.state == "cancelled" and facts.held_from_ms is not None
            if is_cut_short and campaign not in self._damaged:
                try:
                    await self.cancel(campaign)
                except Corrupt as error:
                    # The rest of the campaign stays held, and the broker serves all else. Not tried again by itself:
                    # each try reads the files before the damaged one, and readers would wait behind it for ever.
                    self._damaged.add(campaign)
                    logger.error(
                        "cancel not finished: restore the file, then cancel again campaign=%s reason=%s",
                        campaign,
                        error,
                    )

    def _as(self, facts: CampaignFacts, state: State, held_from_ms: int | None = None) -> CampaignFacts:
        now_ms = self._parts.clock.now_ms()
        return msgspec.structs.replace(facts, state=state, since_ms=now_ms, held_from_ms=held_from_ms)

    def _shown(self, campaign: str, facts: CampaignFacts, *, repeated: bool = False) -> Campaign:
        # Read off and never written: the end of a campaign is the last of its instants, and no event.
        is_finished = facts.is_finished(self._parts.scheduler.settled_before_ms)
        return Campaign(
            campaign=campaign,
            state="finished" if is_finished else facts.state,
            since_ms=facts.since_ms,
            planned_ms=facts.planned_ms,
            planned_seq=facts.planned_seq,
            rows=facts.rows,
            ranges=facts.ranges,
            cancelled=facts.cancelled,
            groups=facts.groups,
            held_from_ms=facts.held_from_ms,
            repeated=repeated,
        )
