"""The operations on selections: select, look at, undo (registry/selections.py).

One META row decides each operation, so its time does not depend on the number of messages. It is appended while no
request that looks up, cancels or moves messages is between its search and its decision (`Gate.alone`). So such a
request sees a selection either during all of its steps or not at all. Requests that hold the gate for seconds (the
resume of a campaign, a cancel of ranges) exclude changes of selections, which are then refused: waiting for them would
make all look-ups wait, too.

A bulk attach that is not answered yet counts as later than a selection. Its numbers are still reserved, and a selection
excludes reserved numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec

from timeball.broker.accepting.waiters import Gate
from timeball.broker.filters.compiler import SQL92, compile_filter
from timeball.broker.policy import Policy
from timeball.broker.registry.campaigns import AttachState
from timeball.broker.registry.selections import Selected, SelectionFacts, Survey
from timeball.broker.registry.tables import Tables
from timeball.broker.registry.topics import check_topic
from timeball.io.clock import SchedulerClock
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.access import Caller, Verb
from timeball.model.errors import (
    Conflict,
    Corrupt,
    Forbidden,
    InvalidMessage,
    OutOfRange,
    OverLimit,
    Unavailable,
)
from timeball.schedule.scheduler import Scheduling

logger = logging.getLogger(__name__)

DRY_RUN = "dry run"  # no id, because ids are numbers

# Surveys.survey (broker/pending/survey.py). It counts the pending messages of a selection, in a snapshot.
# First argument: builds the selections from the number at the end of the log, and returns them with the id of the
# selection to count. Second argument: called when the snapshot is taken.
CountMessages = Callable[[Callable[[int], tuple[Selected, str]], Callable[[], None]], Awaitable[Survey]]


class SelectionChanges:
    """The operations on selections. Belongs to the event loop."""

    def __init__(
        self,
        policy: Policy,
        count_messages: CountMessages,
        is_blocked: Callable[[], bool],
        *,
        gate: Gate,
        clock: SchedulerClock,
        writer: LogWriter,
        tables: Tables,
        attach_state: AttachState,
        scheduling: Scheduling,
        delay_ms_max: int,
    ) -> None:
        """Create the operations. `is_blocked` tells whether a request holds the gate for long.

        `delay_ms_max`: the longest shift, earlier or later.
        """
        self._delay_ms_max = delay_ms_max
        self._policy, self._count_messages, self._is_blocked = policy, count_messages, is_blocked
        self._gate, self._clock, self._writer = gate, clock, writer
        self._tables, self._selections = tables, tables.selections
        self._attach_state, self._scheduling = attach_state, scheduling
        # The ids of selections that cannot be counted, because a file with their messages is damaged.
        self._uncountable: set[str] = set()

    # -- queries -------------------------------------------------------------------------------------------------

    def get(self, name: str, caller: Caller) -> SelectionFacts:
        """Find a selection. Raises NotFound, Forbidden."""
        self._policy.allow(caller, Verb.LOOK)
        facts = self._selections.get(name)
        if not self._may_cancel(facts.topics, caller):
            # Without the topics: a caller that tries ids must not learn the names of other accounts' topics.
            raise Forbidden(f"account {caller.name!r} may not take back messages of all topics of {name!r}")
        return facts

    def all(self, caller: Caller) -> dict[str, SelectionFacts]:
        """List the selections whose topics the caller may change, by id."""
        self._policy.allow(caller, Verb.LOOK)
        return {
            name: facts
            for name, facts in self._selections.all().items()
            if self._may_cancel(facts.topics, caller)
        }

    def state(self, name: str) -> str:
        """Find the state of a selection: "active", "undone" or "over" (all of its messages are settled)."""
        facts = self._selections.get(name)
        return "undone" if facts.is_undone else "over" if self._selections.is_over(name) else "active"

    # -- changes -------------------------------------------------------------------------------------------------

    async def dry_run(self, new_facts: SelectionFacts, caller: Caller) -> Survey:
        """Count the messages that a selection would cover now.

        Raises Forbidden, InvalidFilter, InvalidName, InvalidMessage, OutOfRange, OverLimit.
        """
        self._check(new_facts, caller)
        await self._writer.flushed()  # releases that have begun count as pending until they are durable

        def plan(to_seq: int) -> tuple[Selected, str]:
            """Build the selections with the planned one, which is counted (see `CountMessages`)."""
            # A dry run counts as the newest selection, so a message of an earlier selection stays with that selection.
            planned = self._complete(new_facts, to_seq, caller)
            facts_by_name = {**self._selections.selected_facts(), DRY_RUN: planned}
            return Selected(facts_by_name, self._selections.woken), DRY_RUN

        return await self._count_messages(plan, lambda: None)

    async def select(self, new_facts: SelectionFacts, caller: Caller) -> str:
        """Accept a selection of the messages that are pending now. Durable on return. Returns its id.

        `new_facts` has the condition and the bounds. Raises Forbidden, InvalidFilter, InvalidMessage, OutOfRange,
        OverLimit, Conflict in a drained group, and Unavailable while a campaign is being resumed or cancelled.
        """
        self._check(new_facts, caller)
        self._check_not_blocked()
        if new_facts.to_topic:
            self._policy.ensure_topics([new_facts.to_topic], caller)
        async with self._gate.alone():
            self._check_not_blocked()  # again, because a campaign may be resumed meanwhile
            if self._tables.drains.out is not None:
                raise Conflict("this group is drained, and its messages get other numbers: cancel them there")
            # No await from here on: the row comes in the log after the releases of all messages that it does not
            # cover, and before every later row.
            seq = self._writer.next_seq
            name = str(seq)
            self._selections.put(name, self._complete(new_facts, seq, caller))
        await self._writer.flushed()
        return name

    async def undo(self, name: str, caller: Caller) -> bool:
        """Make the messages of a selection pending again, except messages that were due since. Durable on return.

        Returns False if the selection was undone before. Raises NotFound, Forbidden, OverLimit, and Unavailable as for
        `select`.
        """
        self.get(name, caller)  # raises NotFound and Forbidden
        self._check_not_blocked()
        async with self._gate.alone():
            # Read again, because another request may have undone it meanwhile.
            facts = self._selections.get(name)
            is_change = not facts.is_undone
            if is_change:
                undone_seq = self._writer.next_seq
                self._selections.put(
                    name,
                    msgspec.structs.replace(facts, undone_seq=undone_seq, undone_ms=self._clock.now_ms()),
                )
        await self._writer.flushed()
        return is_change

    async def count(self) -> None:
        """Count the messages of new selections, and mark selections that are over. A periodic duty (maintenance.py)."""
        scheduling = self._scheduling
        # Messages of a paused campaign are pending although their due times have passed.
        settled_before_ms = min(scheduling.scheduler.settled_before_ms, scheduling.outcomes.holds.from_ms)
        self._selections.mark_over(settled_before_ms)
        self._selections.woken.forget_before(settled_before_ms)
        for name, facts in self._selections.all().items():
            # An undone cancel need not be counted again. Another undone selection must be: it may have changed which
            # messages later selections cover.
            is_done = self._selections.is_over(name) or (facts.is_undone and facts.action == "cancel")
            if (is_done and facts.count is not None) or name in self._uncountable:
                continue
            try:
                if self._selections.needs_count(name, settled_before_ms):
                    await self._count(name)
                if self._selections.is_settled(name, settled_before_ms):
                    facts = self._selections.get(name)
                    self._selections.put(name, msgspec.structs.replace(facts, is_settled=True))
            except Unavailable as error:
                logger.warning("selection not counted, trying again id=%s reason=%s", name, error)
            except Corrupt as error:
                # Do not try again, because each try reads all files before the damaged one.
                self._uncountable.add(name)
                logger.error("selection not counted id=%s reason=%s", name, error)

    async def _count(self, name: str) -> None:
        """Count the messages of a selection that are pending, and those that it has cancelled since it was accepted."""
        ended_rows = 0
        # The rows before that of the selection are durable then, so the messages that it does not cover are settled.
        await self._writer.flushed()

        def plan(_: int) -> tuple[Selected, str]:
            # Includes later events, because they decide when the messages will be settled.
            return Selected(self._selections.selected_facts(name), self._selections.woken, keep=name), name

        def on_snapshot() -> None:
            nonlocal ended_rows
            ended_rows = self._selections.ended_rows(name)

        survey = await self._count_messages(plan, on_snapshot)
        self._selections.record_count(name, survey.count + ended_rows, survey.last_ms)
        facts = self._selections.get(name)
        if facts.count is None:
            # `ended_rows` counts the messages that became due before the survey: each CANCEL row was counted.
            self._selections.put(
                name,
                msgspec.structs.replace(
                    facts, count=survey.count + ended_rows, first_due_ms=survey.first_due_ms,
                    last_due_ms=survey.last_due_ms, until_ms=survey.last_ms,
                ),
            )  # fmt: skip

    def _check_not_blocked(self) -> None:
        """Raise OverLimit if the disk is full, and Unavailable if a request holds the gate for long."""
        self._writer.check_admission()
        if self._is_blocked():
            raise Unavailable("a campaign is being resumed or cancelled; ask again when that is done")

    # -- inside --------------------------------------------------------------------------------------------------

    def _check(self, new_facts: SelectionFacts, caller: Caller) -> None:
        """Raise an error (see `dry_run`) unless the selection is valid and the caller may make it."""
        if len(new_facts.topics) > limits.SELECTION_TOPICS_MAX:
            raise OutOfRange(f"{len(new_facts.topics)} topics: at most {limits.SELECTION_TOPICS_MAX}")
        for topic in new_facts.topics:
            check_topic(topic)
        self._check_may_cancel(new_facts.topics, caller)
        if (new_facts.action == "shift") != (new_facts.shift_ms != 0) or (new_facts.action == "move") != bool(
            new_facts.to_topic
        ):
            raise InvalidMessage(
                "a shift needs a duration other than 0, a move needs a topic, and other actions take neither"
            )
        if abs(new_facts.shift_ms) > self._delay_ms_max:
            raise OutOfRange(f"a shift by {new_facts.shift_ms} ms: at most {self._delay_ms_max}")
        if new_facts.to_topic:
            # The messages will be sent to this topic, so the caller needs the permission. Reserved names are refused.
            self._policy.find_destination(new_facts.to_topic, caller)
        if not new_facts.from_ms < new_facts.to_ms:
            raise InvalidMessage("the window of due times is empty: it must end after it begins")
        if new_facts.where:
            compile_filter(new_facts.where, SQL92)  # raises InvalidFilter

    def _complete(self, new_facts: SelectionFacts, seq: int, caller: Caller) -> SelectionFacts:
        """Add the state of the broker that decides which messages a selection covers. Raises OutOfRange, OverLimit."""
        self._check_shifts(new_facts)
        campaigns = {}
        if "campaign" in new_facts.where:
            campaigns = {
                name: facts.ranges for name, facts in self._tables.campaigns.all().items() if facts.ranges
            }
            if sum(map(len, campaigns.values())) > limits.SELECTION_RANGES_MAX:
                raise OverLimit(
                    "too many campaigns for a condition: bound the due time, or cancel a campaign"
                )
        return msgspec.structs.replace(
            new_facts, seq=seq, at_ms=self._clock.now_ms(), by=caller.name, campaigns=campaigns,
            absent=[*self._attach_state.reserved.items(), *self._paused_ranges(new_facts)],
        )  # fmt: skip

    def _check_shifts(self, new_facts: SelectionFacts) -> None:
        """Raise OutOfRange if active selections would shift a message by more than `delay_ms_max`."""
        if new_facts.shift_ms <= 0:
            return
        # The sum over all topics is a bound for each message, and needs no look at the messages.
        active = map(self._selections.get, self._selections.active)
        later_ms = new_facts.shift_ms + sum(max(0, facts.shift_ms) for facts in active)
        if later_ms > self._delay_ms_max:
            raise OutOfRange(
                f"active shifts add up to {later_ms} ms: at most {self._delay_ms_max}; undo one of them, "
                "or wait until one is over"
            )

    def _paused_ranges(self, new_facts: SelectionFacts) -> list[tuple[int, int]]:
        """List the ranges of paused campaigns, whose resume changes due times."""
        if new_facts.action == "cancel":
            return []
        campaigns = self._tables.campaigns.all().values()
        return [each for facts in campaigns if facts.held_from_ms is not None for each in facts.ranges]

    def _may_cancel(self, topics: list[str], caller: Caller) -> bool:
        """Check whether the caller may cancel messages of all of these topics, or of every topic if there are none."""
        if self._policy.allows(caller, Verb.ADMIN):
            return True
        # Without topics, a selection also covers topics that the caller may not see.
        return bool(topics) and all(self._policy.allows(caller, Verb.CANCEL, topic=topic) for topic in topics)

    def _check_may_cancel(self, topics: list[str], caller: Caller) -> None:
        """Raise Forbidden unless the caller may cancel messages of these topics, or of all topics if there are none."""
        if not topics:
            self._policy.allow(caller, Verb.ADMIN)
        for topic in topics:
            if not self._policy.allows(caller, Verb.ADMIN):
                self._policy.allow(caller, Verb.CANCEL, topic=topic)
