"""Plan, pause, resume and cancel campaigns. One row of the log decides each change.

    pause     a META row; from this moment the schedule loads no messages of the campaign's ranges
    resume    the data files with the campaign's rows are rewritten: its rows are due later by the shift, and none
              before now; one frame has the TABLE row that exchanges the files and the META row that ends the hold
    cancel    a META row, after which no more files of the campaign can be attached and all its messages are held; then
              a CANCEL row for all pending messages; then a META row that ends the hold

Numbers, ids and recall handles stay the same through pause and resume. If a command stops between its steps, the
campaign stays as it was. It is paused until the frame of the resume is in the log, and cancelled as soon as the first
META row of the cancel is in the log. If a cancel stops after that row, the remaining messages are held, so none is
released, and the broker cancels them later (`finish_cancels`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from timeball.broker.registry.attach import AttachState
from timeball.broker.registry.campaigns import CampaignFacts, Campaigns, State
from timeball.broker.tables.table_changes import TableChanges
from timeball.io.clock import SchedulerClock
from timeball.log.writer import LogWriter
from timeball.model.errors import Corrupt, OutOfRange
from timeball.model.wire import Campaign, RangesCancelled
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Cancels the pending messages in ranges of numbers (first_seq, rows), for a reason (Broker.cancel_ranges).
CancelRanges = Callable[[Sequence[tuple[int, int]], str], Awaitable[RangesCancelled]]


class CampaignChanges:
    """The operations on campaigns, one at a time. Belongs to the event loop."""

    def __init__(
        self,
        mover: TableChanges,
        cancel_ranges: CancelRanges,
        *,
        clock: SchedulerClock,
        writer: LogWriter,
        campaigns: Campaigns,
        attach_state: AttachState,
        scheduler: Scheduler,
        outcomes: Outcomes,
    ) -> None:
        self._mover, self._cancel_ranges = mover, cancel_ranges
        self._clock, self._writer, self._campaigns = clock, writer, campaigns
        self._attach_state, self._scheduler = attach_state, scheduler
        self._outcomes = outcomes
        # One change at a time: a resume writes files for seconds, and a concurrent cancel would miss their rows.
        self._lock = asyncio.Lock()
        # Campaigns whose cancel is retried only by a command, not by `finish_cancels`.
        self._damaged: set[str] = set()

    def get(self, campaign: str) -> Campaign:
        """Return the state of a campaign. Raises InvalidMessage, NotFound."""
        return self._shown(campaign, self._campaigns.get(campaign))

    def all(self) -> list[Campaign]:
        """List all campaigns without their ranges, the newest last."""
        found = self._campaigns.all().items()
        return [self._shown(name, msgspec.structs.replace(facts, ranges=[])) for name, facts in found]

    async def plan(
        self, campaign: str, rows: int, at_ms: int | None = None, groups: Sequence[str] = ()
    ) -> Campaign:
        """Create a campaign for this number of rows. The next attach under its id brings the rows.

        The campaign may exist already. `at_ms` is the time at which its rows were validated. `groups` are the groups of
        the cluster that each have a part of it. Raises OutOfRange if rows were attached under this id before, and the
        id is no campaign any more.
        """
        self._writer.check_room()
        # The attach would be answered as a repeated one. The campaign would stay planned for ever, and its rows would
        # be lost.
        if not self._campaigns.is_known(campaign) and self._attach_state.has_attached(campaign):
            raise OutOfRange(
                f"rows were attached as {campaign} before, and no campaign is left of it: use another id"
            )
        planned_ms = self._clock.now_ms() if at_ms is None else at_ms
        self._campaigns.plan(
            campaign, rows, planned_ms, self._writer.next_seq, self._scheduler.settled_before_ms, groups
        )
        await self._writer.flushed()
        return self.get(campaign)

    async def pause(self, campaign: str) -> Campaign:
        """Hold all pending messages of a campaign."""
        async with self._lock, self._mover.lock:  # under this lock no attach is half done
            facts = self._campaigns.get_attached(campaign)
            if facts.state == "paused":
                return self._shown(campaign, facts, repeated=True)
            self._writer.check_room()
            # No await between the hold and the row: releases that were handed out before the hold precede the row in
            # the log.
            held_from_ms = self._scheduler.hold(campaign, facts.ranges)
            self._campaigns.put(campaign, self._as(facts, "paused", held_from_ms=held_from_ms))
            await self._writer.flushed()
            return self.get(campaign)

    async def resume(self, campaign: str, *, shift: bool) -> Campaign:
        """End the hold. Overdue messages are due now. With `shift`, all are due later by the length of the pause."""
        async with self._lock:
            facts = self._campaigns.get_attached(campaign)
            if facts.state != "paused":
                return self._shown(campaign, facts, repeated=True)
            # Never negative: after the clock was set back, a resume would release messages before their due times.
            shift_ms = max(0, self._clock.now_ms() - facts.since_ms) if shift else 0
            rows = await self._mover.resume(campaign, facts, shift_ms)
            return msgspec.structs.replace(self.get(campaign), count=rows, shift_ms=shift_ms)

    async def cancel(self, campaign: str) -> Campaign:
        """Cancel all pending and held messages of a campaign. Final on return. May be repeated."""
        counted = RangesCancelled(0, 0, 0, 0)
        async with self._lock:
            async with self._mover.lock:
                facts = self._campaigns.get(campaign)
                repeated = facts.state == "cancelled"
                if not repeated:
                    self._writer.check_room()
                    held_from_ms = facts.held_from_ms
                    if facts.ranges and held_from_ms is None:
                        held_from_ms = self._scheduler.hold(campaign, facts.ranges)
                    # Before the CANCEL rows: from now on no files of the campaign can be attached after them. A start
                    # that finds only this row releases nothing that was still to be cancelled.
                    first = msgspec.structs.replace(facts, state="cancelled", held_from_ms=held_from_ms)
                    self._campaigns.put(campaign, first)
            if facts.ranges:
                reason = f"campaign {campaign}"
                counted = await self._cancel_ranges(facts.ranges, reason)
            # After the last CANCEL row: until then held messages must not count as settled (released or cancelled).
            # `already_cancelled` is not added: these messages were cancelled or moved one by one. If this call finishes
            # an interrupted cancel, that cancel has ended them, so they do count.
            ended = facts.cancelled + counted.cancelled
            if repeated and facts.held_from_ms is not None:
                ended += counted.already_cancelled
            if not repeated or (ended, None) != (facts.cancelled, facts.held_from_ms):
                self._campaigns.put(
                    campaign, msgspec.structs.replace(self._as(facts, "cancelled"), cancelled=ended)
                )
                self._outcomes.holds.remove(campaign)
            await self._writer.flushed()
        return msgspec.structs.replace(self.get(campaign), count=counted.cancelled, repeated=repeated)

    async def finish_cancels(self) -> None:
        """Continue cancels that a crash or a full disk interrupted. A periodic duty of maintenance.py."""
        for campaign, facts in self._campaigns.all().items():
            if self._lock.locked():
                return  # a command is running, perhaps on this campaign
            is_cut_short = facts.state == "cancelled" and facts.held_from_ms is not None
            if is_cut_short and campaign not in self._damaged:
                try:
                    await self.cancel(campaign)
                except Corrupt as error:
                    # The rest of the campaign stays held, and the broker serves everything else. Do not retry
                    # automatically: each try reads the files before the damaged one, and readers would wait behind it
                    # for ever.
                    self._damaged.add(campaign)
                    logger.error(
                        "cancel not finished: restore the file, then cancel again campaign=%s reason=%s",
                        campaign,
                        error,
                    )

    def _as(self, facts: CampaignFacts, state: State, held_from_ms: int | None = None) -> CampaignFacts:
        now_ms = self._clock.now_ms()
        return msgspec.structs.replace(facts, state=state, since_ms=now_ms, held_from_ms=held_from_ms)

    def _shown(self, campaign: str, facts: CampaignFacts, *, repeated: bool = False) -> Campaign:
        # Derived and never written: a campaign ends with the last of its due times, without an event.
        is_finished = facts.is_finished(self._scheduler.settled_before_ms)
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
