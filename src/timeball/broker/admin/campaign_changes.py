"""Changes of campaigns and of push subscriptions, and notifications about them.

One row of the log decides each change of a campaign:

    pause     append a META row. From then on all messages of the campaign are held: the schedule does not load them
    resume    append CANCEL rows for its messages that a selection has cancelled, and take its messages out of
              other selections, because a selection finds messages by their due times. Then rewrite the data files with
              the campaign's messages: they are due later by the shift, and not before now. One frame contains the TABLE
              row that replaces the files and the META row that ends the hold
    cancel    append a META row: no more files of the campaign can be attached, and its messages are held. Then append
              CANCEL rows for all pending messages, and a META row that ends the hold

Numbers, ids and recall handles stay the same through pause and resume. If a command stops between its steps, the
campaign stays as it was. It is paused until the frame of the resume is in the log, and cancelled as soon as the first
META row of the cancel is in the log. If a cancel stops after that row, the remaining messages are held, so none is
released, and the broker cancels them later (`finish_cancels`).

A change of a push subscription is durable when the operation returns, and the edge that delivers its messages is
notified.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from timeball.broker.filters.compiler import SQL92, TAG, compile_filter
from timeball.broker.policy import Policy
from timeball.broker.registry.campaigns import AttachState, CampaignFacts, Campaigns, State
from timeball.broker.registry.push_subscriptions import (
    FilterKind,
    PushSubscription,
    PushSubscriptions,
    secret_text,
)
from timeball.broker.registry.selections import Selected, Selections
from timeball.broker.tables.table_changes import TableChanges
from timeball.io.clock import SchedulerClock
from timeball.log.writer import LogWriter
from timeball.model.access import Caller, Verb
from timeball.model.addresses import Allowed
from timeball.model.answers import Campaign, RangesCancelled
from timeball.model.config import Settings
from timeball.model.errors import Corrupt, NotFound, OutOfRange, RequestError
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)


class CancelRanges(Protocol):
    """Cancels the pending messages in ranges of numbers (first_seq, rows), for a reason (Broker.cancel_ranges)."""

    def __call__(
        self, ranges: Sequence[tuple[int, int]], reason: str, *, only: Selected | None = None
    ) -> Awaitable[RangesCancelled]:
        """`only`: cancel only the messages that belong to these selections."""


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
        selections: Selections,
    ) -> None:
        self._mover, self._cancel_ranges, self._selections = mover, cancel_ranges, selections
        self._clock, self._writer, self._campaigns = clock, writer, campaigns
        self._attach_state, self._scheduler = attach_state, scheduler
        self._outcomes = outcomes
        # One change at a time: a resume writes files for seconds, and a concurrent cancel would miss their messages.
        self._lock = asyncio.Lock()
        # Campaigns with a damaged file: only a command retries their cancel, not `finish_cancels`.
        self._not_retried: set[str] = set()
        # True while a resume changes due times. Then no selection is accepted.
        self.is_resuming = False

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

        `at_ms` is the time at which the rows were validated, None for now. `groups` are the groups of the cluster that
        each have a part of the campaign. Durable on return. Raises OutOfRange if rows were attached under this id
        before but the campaign was deleted since, InvalidMessage, and OverLimit.
        """
        self._writer.check_admission()
        # The attach would count as a repetition and be skipped. So the campaign would stay planned for ever, and its
        # rows would be lost.
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
        """Hold all pending messages of a campaign. Durable on return.

        Raises InvalidMessage, NotFound, OutOfRange (Campaigns.get_attached), OverLimit.
        """
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
        """End the hold. Overdue messages are due now. With `shift`, all are due later by the length of the pause.

        Returns the campaign with the number of its messages and the shift. Durable on return. Raises as `pause`.
        """
        async with self._lock:
            facts = self._campaigns.get_attached(campaign)
            if facts.state != "paused":
                return self._describe(campaign, facts, repeated=True)
            # Never negative: after the clock was set back, a resume would release messages before their due times.
            shift_ms = max(0, self._clock.now_ms() - facts.since_ms) if shift else 0
            self.is_resuming = True
            try:
                if not (selected := self._selections.selected).is_empty:
                    await self._cancel_ranges(facts.ranges, "", only=selected)
                    self._selections.exclude(facts.ranges)
                rows = await self._mover.resume(campaign, facts, shift_ms)
            finally:
                self.is_resuming = False
            return msgspec.structs.replace(self.get(campaign), count=rows, shift_ms=shift_ms)

    async def cancel(self, campaign: str) -> Campaign:
        """Cancel all pending and held messages of a campaign. The cancel is final on return, and may be repeated.

        Returns the campaign with the number of messages that this call has cancelled. Raises InvalidMessage, NotFound,
        OverLimit, and Corrupt if a file with its messages is damaged.
        """
        ranges_cancelled = RangesCancelled(0, 0, 0, 0)
        async with self._lock:
            async with self._mover.lock:
                facts = self._campaigns.get(campaign)
                is_repeated = facts.state == "cancelled"
                if not is_repeated:
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
                ranges_cancelled = await self._cancel_ranges(facts.ranges, reason)
            # End the hold only after the last CANCEL row: until then held messages must not count as settled (released
            # or cancelled). `already_cancelled` counts messages that were cancelled or moved one by one before. They
            # are added only if this call finishes an interrupted cancel, which has cancelled them.
            cancelled_rows = facts.cancelled + ranges_cancelled.cancelled
            if is_repeated and facts.held_from_ms is not None:
                cancelled_rows += ranges_cancelled.already_cancelled
            if not is_repeated or (cancelled_rows, None) != (facts.cancelled, facts.held_from_ms):
                self._campaigns.put(
                    campaign,
                    msgspec.structs.replace(self._with_state(facts, "cancelled"), cancelled=cancelled_rows),
                )
                self._outcomes.holds.remove(campaign)
            await self._writer.flushed()
        return msgspec.structs.replace(
            self.get(campaign), count=ranges_cancelled.cancelled, repeated=is_repeated
        )

    async def finish_cancels(self) -> None:
        """Continue cancels that a crash or a full disk interrupted. maintenance.py calls this periodically.

        Raises OverLimit if the disk is full.
        """
        for campaign, facts in self._campaigns.all().items():
            if self._lock.locked():
                return  # a command is running, perhaps on this campaign
            was_interrupted = facts.state == "cancelled" and facts.held_from_ms is not None
            if was_interrupted and campaign not in self._not_retried:
                try:
                    await self.cancel(campaign)
                except Corrupt as error:
                    # A file is damaged. The messages that are not cancelled yet stay held. Do not retry: each attempt
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
        """Build facts with a new state that begins now."""
        now_ms = self._clock.now_ms()
        return msgspec.structs.replace(facts, state=state, since_ms=now_ms, held_from_ms=held_from_ms)

    def _describe(self, campaign: str, facts: CampaignFacts, *, repeated: bool = False) -> Campaign:
        """Build the description of a campaign for users."""
        # "finished" is computed and never stored: a campaign ends with the last of its due times, without an event.
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


# ---- push subscriptions --------------------------------------------------------------------------------------
# Only administrators change subscriptions. An account that may look at the topic and group of a subscription can see
# it, but never its secret. The edge that delivers messages registers with `watch`, and receives the name of each
# changed subscription.

EXPRESSION_TYPES: dict[FilterKind, str] = {"tag": TAG, "sql": SQL92}


class PushPut(NamedTuple):
    """The result of `put`. `secret` is the new secret as text, if one was created. It is not shown again."""

    subscription: PushSubscription
    is_new: bool
    secret: str | None


class PushChanges:
    """The operations on push subscriptions. Belongs to the event loop."""

    def __init__(
        self,
        policy: Policy,
        *,
        settings: Settings,
        clock: SchedulerClock,
        writer: LogWriter,
        push_subscriptions: PushSubscriptions,
    ) -> None:
        self._policy = policy
        self._clock, self._writer = clock, writer
        self._subscriptions, self._allowed_urls = push_subscriptions, Allowed.parse(settings.push_allow)
        self._watcher: Callable[[str], None] | None = None

    def watch(self, changed: Callable[[str], None]) -> None:
        """Call `changed` with the name of each subscription that changes from now on. There is only one watcher."""
        self._watcher = changed

    def all(self, caller: Caller) -> dict[str, PushSubscription]:
        """List the subscriptions whose topic and group the caller may look at, by name."""
        self._policy.allow(caller, Verb.LOOK)
        return {
            name: subscription
            for name, subscription in self._subscriptions.all().items()
            if self._may_look(subscription, caller)
        }

    def get(self, name: str, caller: Caller) -> PushSubscription:
        """Find a subscription. Raises Forbidden, and NotFound, also if the caller may not look at this subscription."""
        self._policy.allow(caller, Verb.LOOK)
        subscription = self._subscriptions.get(name)
        if not self._may_look(subscription, caller):
            # The same error in both cases, so it does not reveal names.
            raise NotFound(f"no subscription {name!r}")
        return subscription

    async def put(
        self, name: str, subscription: PushSubscription, caller: Caller, *, rotates: bool = False
    ) -> PushPut:
        """Create or change a subscription. A change keeps its paused state. Durable on return.

        `rotates` creates a new secret. Raises Forbidden, InvalidMessage, InvalidName, InvalidFilter, OutOfRange,
        OverLimit, RequestError.
        """
        self._policy.allow(caller, Verb.ADMIN)
        self._allowed_urls.check_url(subscription.url)
        # Refuse an invalid filter before any change.
        compile_filter(subscription.filter, EXPRESSION_TYPES[subscription.filter_type])
        self._check_same_filter(name, subscription)
        current = self._subscriptions.find(name)
        if current is not None:
            # A change of the URL must not resume a subscription that an administrator has paused.
            subscription = msgspec.structs.replace(
                subscription, paused=current.paused, paused_by=current.paused_by
            )
        new_secret = self._subscriptions.put(name, subscription, self._clock.now_ms(), rotates=rotates)
        await self._notify_and_flush(name)
        return PushPut(subscription, current is None, None if new_secret is None else secret_text(new_secret))

    async def delete(self, name: str, caller: Caller) -> None:
        """Delete a subscription, durably on return. Its consumer group and the group's offsets stay.

        Raises Forbidden, NotFound.
        """
        self._policy.allow(caller, Verb.ADMIN)
        self._subscriptions.remove(name)
        await self._notify_and_flush(name)

    async def pause(
        self, name: str, caller: Caller, by: Literal["operator", "receiver"] = "operator"
    ) -> PushSubscription:
        """Stop sending messages for a subscription. `by`: who stops it.

        Durable on return. Raises Forbidden, NotFound.
        """
        self._policy.allow(caller, Verb.ADMIN)
        return await self._set_paused(name, paused=True, paused_by=by)

    async def resume(self, name: str, caller: Caller) -> PushSubscription:
        """Resume sending at once, even if the receiver has just failed.

        Durable on return. Raises Forbidden, NotFound.
        """
        self._policy.allow(caller, Verb.ADMIN)
        return await self._set_paused(name, paused=False, paused_by="operator")

    async def _set_paused(
        self, name: str, *, paused: bool, paused_by: Literal["operator", "receiver"]
    ) -> PushSubscription:
        """Change the paused state of a subscription. Durable on return. Raises NotFound."""
        changed = msgspec.structs.replace(self._subscriptions.get(name), paused=paused, paused_by=paused_by)
        self._subscriptions.put(name, changed, self._clock.now_ms())
        await self._notify_and_flush(name)
        return changed

    async def _notify_and_flush(self, name: str) -> None:
        """Notify the watcher of a changed subscription, and wait until the change is durable."""
        if self._watcher is not None:
            # The watcher reads the change from memory at once. The caller waits until it is durable.
            self._watcher(name)
        await self._writer.flushed()

    def _check_same_filter(self, name: str, subscription: PushSubscription) -> None:
        """Raise RequestError if another subscription of this group and topic has a different filter."""
        group_topic = subscription.group, subscription.topic
        filter_and_type = subscription.filter, subscription.filter_type
        for other_name, other in self._subscriptions.all().items():
            is_shared = other_name != name and (other.group, other.topic) == group_topic
            # Both share the group's offsets, so each would skip messages that only the other one selects.
            if is_shared and (other.filter, other.filter_type) != filter_and_type:
                raise RequestError(
                    f"subscription {other_name!r} of the same group has the filter {other.filter[:200]!r} "
                    f"({other.filter_type}): give both the same, or this one another group"
                )

    def _may_look(self, subscription: PushSubscription, caller: Caller) -> bool:
        """Check whether the caller may look at the topic and the group of a subscription."""
        topic, group = subscription.topic, subscription.group
        return self._policy.allows(caller, Verb.LOOK, topic=topic, group=group)
