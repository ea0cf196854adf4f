"""Plan, pause, resume and cancel campaigns. One row of the log decides each change.

    pause     append a META row. From then on all messages of the campaign are held: the schedule does not load them
    resume    rewrite the data files with the campaign's messages: they are due later by the shift, and not before now.
              One frame contains the TABLE row that replaces the files and the META row that ends the hold
    cancel    append a META row: no more files of the campaign can be attached, and its messages are held. Then append
              CANCEL rows for all pending messages, and a META row that ends the hold

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
        # One change at a time: a resume writes files for seconds, and a concurrent cancel would miss their messages.
        self._lock = asyncio.Lock()
        # Campaigns with a damaged file: only a command retries their cancel, not `finish_cancels`.
        self._not_retried: set[str] = set()

    def get(self, campaign: str) -> Campaign:
        """Describe a campaign. Raises InvalidMessage, NotFound."""
        return self._describe(campaign, self._campaigns.get(campaign))

    def all(self) -> list[Campaign]:
        """List all campaigns without their ranges, the newest last."""
        campaigns = self._campaigns.all().items()
        return [self._describe(name, msgspec.structs.replace(facts, ranges=[])) for name, facts in campaigns]

    async def plan(
        self, campaign: str, rows: int, at_ms: int | None = None, groups: Sequence[str] = ()
    ) -> Campaign:
        """Create a campaign for this number of rows, unless it exists. The next attach with its id contains the rows.

        `at_ms` is the time at which the rows were validated. `groups` are the groups of the cluster that each have a
        part of the campaign. Raises OutOfRange if rows were attached under this id before, but the campaign was
        forgotten.
        """
        self._writer.check_admission()
        # The attach would count as repeated and be skipped. The campaign would stay planned for ever, and its rows
        # would be lost.
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
        async with self._lock, self._mover.lock:  # while the lock is held, no attach is half done
            facts = self._campaigns.get_attached(campaign)
            if facts.state == "paused":
                return self._describe(campaign, facts, repeated=True)
            self._writer.check_admission()
            # No await between the hold and the row: releases that began before the hold precede the row in the log.
            held_from_ms = self._scheduler.hold(campaign, facts.ranges)
            self._campaigns.put(campaign, self._with_state(facts, "paused", held_from_ms=held_from_ms))
            await self._writer.flushed()
            return self.get(campaign)

    async def resume(self, campaign: str, *, shift: bool) -> Campaign:
        """End the hold. Overdue messages are due now. With `shift`, all are due later by the length of the pause."""
        async with self._lock:
            facts = self._campaigns.get_attached(campaign)
            if facts.state != "paused":
                return self._describe(campaign, facts, repeated=True)
            # Never negative: after the clock was set back, a resume would release messages before their due times.
            shift_ms = max(0, self._clock.now_ms() - facts.since_ms) if shift else 0
            rows = await self._mover.resume(campaign, facts, shift_ms)
            return msgspec.structs.replace(self.get(campaign), count=rows, shift_ms=shift_ms)

    async def cancel(self, campaign: str) -> Campaign:
        """Cancel all pending and held messages of a campaign. The cancel is final on return, and may be repeated."""
        counted = RangesCancelled(0, 0, 0, 0)
        async with self._lock:
            async with self._mover.lock:
                facts = self._campaigns.get(campaign)
                repeated = facts.state == "cancelled"
                if not repeated:
                    self._writer.check_admission()
                    held_from_ms = facts.held_from_ms
                    if facts.ranges and held_from_ms is None:
                        held_from_ms = self._scheduler.hold(campaign, facts.ranges)
                    # This row precedes the CANCEL rows, so no files of the campaign can be attached after them. If the
                    # broker stops now, its next start holds the messages and finishes the cancel.
                    cancelled_facts = msgspec.structs.replace(
                        facts, state="cancelled", held_from_ms=held_from_ms
                    )
                    self._campaigns.put(campaign, cancelled_facts)
            if facts.ranges:
                reason = f"campaign {campaign}"
                counted = await self._cancel_ranges(facts.ranges, reason)
            # End the hold only after the last CANCEL row: until then held messages must not count as settled (released
            # or cancelled). Messages in `already_cancelled` were cancelled or moved one by one, so they are not added.
            # If this call finishes an interrupted cancel, that cancel has cancelled them, so they are added.
            cancelled_rows = facts.cancelled + counted.cancelled
            if repeated and facts.held_from_ms is not None:
                cancelled_rows += counted.already_cancelled
            if not repeated or (cancelled_rows, None) != (facts.cancelled, facts.held_from_ms):
                self._campaigns.put(
                    campaign,
                    msgspec.structs.replace(self._with_state(facts, "cancelled"), cancelled=cancelled_rows),
                )
                self._outcomes.holds.remove(campaign)
            await self._writer.flushed()
        return msgspec.structs.replace(self.get(campaign), count=counted.cancelled, repeated=repeated)

    async def finish_cancels(self) -> None:
        """Continue cancels that a crash or a full disk interrupted. maintenance.py calls this periodically."""
        for campaign, facts in self._campaigns.all().items():
            if self._lock.locked():
                return  # a command is running, perhaps on this campaign
            was_interrupted = facts.state == "cancelled" and facts.held_from_ms is not None
            if was_interrupted and campaign not in self._not_retried:
                try:
                    await self.cancel(campaign)
                except Corrupt as error:
                    # A file is damaged. The rest of the campaign stays held. Do not retry automatically: each attempt
                    # reads all files before the damaged one, which would delay other readers again and again.
                    self._not_retried.add(campaign)
                    logger.error(
                        "cancel not finished: restore the file, then cancel again campaign=%s reason=%s",
                        campaign,
                        error,
                    )

    def _with_state(
        self, facts: CampaignFacts, state: State, held_from_ms: int | None = None
    ) -> CampaignFacts:
        now_ms = self._clock.now_ms()
        return msgspec.structs.replace(facts, state=state, since_ms=now_ms, held_from_ms=held_from_ms)

    def _describe(self, campaign: str, facts: CampaignFacts, *, repeated: bool = False) -> Campaign:
        """Build the description of a campaign for users."""
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
