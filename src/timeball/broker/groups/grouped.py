"""The broker of one group of a cluster. Operations by id, key or handle apply to all groups of the cluster.

A producer's messages may be in any group, and its client may ask any node. So the node asks all groups at once, and its
own group as a single broker does. It merges the answers into one (revoking/group_questions.py). A recall handle names
its group, so only that group is asked. Sequence numbers belong to one log: operations by number apply to this group
only.

A group may be drained: its pending messages go to another group (draining.py). For these messages it answers `handed`,
or `unavailable` while they are on their way. The group that has them answers the rest.

A broker without a cluster is a plain Broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from timeball.broker.groups.drain_receiver import Adoption
from timeball.broker.groups.draining import LOOK_MS, Draining
from timeball.broker.policy import queues_to_read
from timeball.broker.registry.topic import MESSAGE_TYPE
from timeball.broker.revoking.group_questions import (
    AdoptHere,
    AnyQuestion,
    CancelHere,
    FindHere,
    GroupAnswer,
    GroupRoute,
    OtherGroups,
    RecallHere,
    Refusal,
    RescheduleHere,
    RouteHere,
    merge_places,
    merge_verdicts,
)
from timeball.broker.revoking.recall import SETTLED, RecallRefused, decode_handle
from timeball.broker.revoking.sent_states import sent_states
from timeball.broker.service import Broker
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.answers import SentState
from timeball.model.errors import StorageError, TimeballError, Unavailable, from_code
from timeball.model.wire import (
    HANDED,
    UNAVAILABLE,
    Attached,
    Campaign,
    CampaignChange,
    Drained,
    MessagePlace,
    RangesCancelled,
    Verdict,
)
from timeball.table.attachment import Attachment

T = TypeVar("T")

RECALL_REFUSED = "recall_refused"
# RocketMQ's clients wait 3 s for a route. A route without a group that does not answer is still useful.
ROUTE_S = 1.0


class GroupedBroker(Broker):
    """A broker that combines the answers of all groups of a cluster. Belongs to the event loop."""

    def __init__(self, *, others: OtherGroups, account: Callable[[str], Caller], **components: Any) -> None:
        """Create the broker. `account` finds the caller by name, for later work in its name. It raises Unauthorized."""
        super().__init__(**components)
        self.group, self.others = self.settings.group, others
        self.draining = Draining(
            self.policy, self.mover, self.snapshots, others, account, settings=self.settings, clock=self.clock,
            log=self.log, tables=self.tables, scheduling=self.scheduling, background=self.threads.background,
            gate=self.gate, pending_messages=lambda: self.pending_messages,
        )  # fmt: skip
        self.adoption = Adoption(
            self.policy, self.appender, settings=self.settings, clock=self.clock, writer=self.log.writer,
            drains=self.tables.drains,
        )  # fmt: skip
        # Run by maintenance.py in addition to its own duties.
        self.duties = [(LOOK_MS, self.draining.look)]

    # -- asked by clients ------------------------------------------------------------------------------------

    async def sent_states(self, numbers: Sequence[int]) -> list[SentState]:
        """Look up the states of scheduled messages. The state is `handed` if another group now has the message."""
        return await sent_states(self.look_ups, numbers, self._handed)

    async def cancel(
        self,
        *,
        ids: Sequence[str] = (),
        keys: Sequence[str] = (),
        seqs: Sequence[int] = (),
        topic: str | None = None,
        caller: Caller = ANONYMOUS,
    ) -> list[Verdict]:
        """Cancel the pending ones of these messages in all groups. See Broker.cancel."""
        if seqs:  # in another group's log, the same number is another message
            here = super().cancel(ids=ids, keys=keys, seqs=seqs, topic=topic, caller=caller)
            return self._handed(await here)
        return await self._settle(CancelHere(ids=list(ids), keys=list(keys), topic=topic), caller)

    async def reschedule(
        self,
        *,
        ids: Sequence[str] = (),
        keys: Sequence[str] = (),
        seqs: Sequence[int] = (),
        topic: str | None = None,
        caller: Caller = ANONYMOUS,
        due_ms: int | None = None,
        delay_ms: int | None = None,
    ) -> list[Verdict]:
        """Reschedule the pending ones of these messages in all groups. See Broker.reschedule."""
        if seqs:  # as in `cancel`
            here = super().reschedule(
                ids=ids, keys=keys, seqs=seqs, topic=topic, caller=caller, due_ms=due_ms, delay_ms=delay_ms
            )
            return self._handed(await here)
        question = RescheduleHere(
            ids=list(ids), keys=list(keys), topic=topic, due_ms=due_ms, delay_ms=delay_ms
        )
        return await self._settle(question, caller)

    async def find(
        self, message_id: str, topic: str | None = None, caller: Caller = ANONYMOUS
    ) -> list[MessagePlace]:
        """Find the messages with this id in all groups, and where they are. See Broker.find."""
        question = FindHere(id=message_id, topic=topic)
        for is_last in (False, True):
            told = await self._everywhere(question, caller, lambda answer: answer.places)
            here = [None if each is None else [p for p in each if p.state != HANDED] for each in told]
            found = merge_places(here)
            # All answers were "handed": perhaps the heir was asked before it had the message. It has it now, so ask
            # again.
            if found or is_last or here == told:
                break
        return found

    async def recall(self, topic: str, handle: str, caller: Caller = ANONYMOUS) -> str:
        """Cancel the message of a recall handle, in the group that created the handle. See Broker.recall."""
        # RocketMQ's handles contain the broker's name, which is the name of its group.
        named = decode_handle(handle)
        try:
            return await self._recall(topic, handle, named.broker_name, caller)
        except RecallRefused as refused:
            if refused.verdict != HANDED:
                raise
        # Its group has handed the message over. The group that has it now finds it by its id.
        verdicts = await self.cancel(ids=[named.unique_key], topic=topic, caller=caller)
        for verdict in verdicts:
            if verdict.verdict == UNAVAILABLE:
                raise Unavailable(
                    "a group of the cluster did not answer; recall the message again in a moment"
                )
            if verdict.verdict not in SETTLED and self.settings.recall_answers != "rocketmq":
                raise RecallRefused(verdict.verdict, verdict.at_ms, f"too late, it is {verdict.verdict}")
        return named.unique_key

    async def _recall(self, topic: str, handle: str, group: str, caller: Caller) -> str:
        if group == self.settings.broker_name or group not in self.others.names():
            return await super().recall(topic, handle, caller)
        self.policy.allow(caller, Verb.CANCEL, topic=topic)
        answer = await self.others.ask(group, RecallHere(topic=topic, handle=handle), caller)
        message_id = None if answer is None else _read(answer, lambda granted: granted.message_id)
        if message_id is None:
            raise Unavailable(f"group {group} did not answer; recall the message again in a moment")
        return message_id

    async def routes(
        self, topic: str, caller: Caller = ANONYMOUS, consumer_group: str | None = None
    ) -> dict[str, GroupRoute | None]:
        """Find the other groups that have a topic, and its queues there. None for a group that does not answer."""
        names, question = self.others.names(), RouteHere(topic=topic, consumer_group=consumer_group)
        answers = await asyncio.gather(*(self.others.ask(name, question, caller, ROUTE_S) for name in names))
        found: dict[str, GroupRoute | None] = {}
        for name, answer in zip(names, answers, strict=True):
            # The group refused a request that this group allowed, so it has other accounts. Its queues are unknown.
            if answer is None or answer.refusal is not None:
                found[name] = None
            elif answer.route is not None:
                found[name] = answer.route
        return found

    async def _settle(self, question: CancelHere | RescheduleHere, caller: Caller) -> list[Verdict]:
        # Twice: if the first answer is "handed", the heir may have the messages by now.
        for _ in range(2):
            told = await self._everywhere(question, caller, lambda answer: answer.verdicts)
            if len(told) == 1 and told[0] is not None:
                return told[0]  # the only group: same result as a single broker
            merged = merge_verdicts([*question.ids, *question.keys], told)
            if not any(verdict.verdict == HANDED for verdict in merged):
                return merged
        # The second try also returned "handed": the heir had the message, and has removed all its traces since.
        return [
            msgspec.structs.replace(each, verdict="expired") if each.verdict == HANDED else each
            for each in merged
        ]

    async def _everywhere(
        self, question: AnyQuestion, caller: Caller, read: Callable[[GroupAnswer], T]
    ) -> list[T | None]:
        """Ask this group and all others. A result is None if a group does not answer. Raises the first refusal."""
        asked: list[Coroutine[Any, Any, GroupAnswer | None]] = [
            self.others.ask(name, question, caller) for name in self.others.names()
        ]
        # Collect all outcomes before one of them raises, so that no task is left behind.
        told = await asyncio.gather(self._answer(question, caller), *asked, return_exceptions=True)
        answers = []
        for each in told:
            if isinstance(each, BaseException):
                raise each
            answers.append(each)
        return [None if each is None else _read(each, read) for each in answers]

    # -- a drain ---------------------------------------------------------------------------------------------

    async def drain(self, heir: str, *, dry_run: bool = False, caller: Caller = ANONYMOUS) -> Drained:
        """Hand over all pending messages of this group to another one, and report the progress (draining.py)."""
        return await self.draining.drain(heir, caller, dry_run=dry_run)

    async def reserve(self, rows: int, caller: Caller = ANONYMOUS) -> int:
        """Reserve sequence numbers, unless this group is drained. See Broker.reserve."""
        # Checked here as well as at the attach: otherwise a bulk job would first write all its files.
        self.policy.check_open()
        return await super().reserve(rows, caller)

    async def attach(self, attachment: Attachment, caller: Caller = ANONYMOUS) -> Attached:
        """Attach files to the pending table. A drained group refuses new files of bulk jobs. See Broker.attach."""
        if attachment.job == "bulk":
            self.policy.check_open()
        return await super().attach(attachment, caller)

    async def cancel_ranges(
        self, ranges: Sequence[tuple[int, int]], reason: str = "", caller: Caller = ANONYMOUS
    ) -> RangesCancelled:
        """Cancel the pending messages in a bulk job's ranges of numbers. See Broker.cancel_ranges."""
        self.draining.check_numbers()
        return await super().cancel_ranges(ranges, reason, caller)

    async def change_campaign(
        self, campaign: str, change: CampaignChange, *, caller: Caller = ANONYMOUS, **wanted: Any
    ) -> Campaign:
        """Plan, pause, resume or cancel a campaign. See Broker.change_campaign."""
        self.draining.check_numbers()
        return await super().change_campaign(campaign, change, caller=caller, **wanted)

    def _handed(self, verdicts: Iterable[Verdict]) -> list[Verdict]:
        """Change the verdict of messages that were handed over to `handed`, or to `unavailable` while they move."""
        drains, found = self.tables.drains, []
        for each in verdicts:
            if drains.was_handed(each.verdict, each.at_ms):
                word = UNAVAILABLE if drains.is_moving(each.at_ms) else HANDED
                found.append(msgspec.structs.replace(each, verdict=word))
            else:
                found.append(each)
        return found

    def _handed_places(self, places: list[MessagePlace]) -> list[MessagePlace]:
        """Change the state of messages that were handed over to `handed`. Raises Unavailable while one moves."""
        drains, found = self.tables.drains, []
        for each in places:
            if drains.was_handed(each.state, each.at_ms):
                if drains.is_moving(each.at_ms):
                    raise Unavailable("the message is on its way to another group; ask again in a moment")
                found.append(msgspec.structs.replace(each, state=HANDED))
            else:
                found.append(each)
        return found

    # -- asked by other groups -------------------------------------------------------------------------------

    async def answer(self, question: AnyQuestion, caller: Caller) -> GroupAnswer:
        """Answer another group's question from this group's log alone."""
        # A refusal is an answer, not an HTTP error: the asking group treats an HTTP error as no answer.
        try:
            return await self._answer(question, caller)
        except RecallRefused as error:
            refusal = Refusal(RECALL_REFUSED, error.sentence, error.verdict, error.at_ms)
        except TimeballError as error:
            refusal = Refusal(error.code, str(error))
        return GroupAnswer(refusal=refusal)

    async def _answer(self, question: AnyQuestion, caller: Caller) -> GroupAnswer:
        match question:
            case CancelHere(ids=ids, keys=keys, topic=topic):
                verdicts = await super().cancel(ids=ids, keys=keys, topic=topic, caller=caller)
                return GroupAnswer(verdicts=self._handed(verdicts))
            case RescheduleHere(ids=ids, keys=keys, topic=topic, due_ms=due_ms, delay_ms=delay_ms):
                verdicts = await super().reschedule(
                    ids=ids, keys=keys, topic=topic, caller=caller, due_ms=due_ms, delay_ms=delay_ms
                )
                return GroupAnswer(verdicts=self._handed(verdicts))
            case FindHere(id=message_id, topic=topic):
                return GroupAnswer(places=self._handed_places(await super().find(message_id, topic, caller)))
            case RecallHere(topic=topic, handle=handle):
                return GroupAnswer(message_id=await super().recall(topic, handle, caller))
            case RouteHere():
                return GroupAnswer(route=self._route(question, caller))
            case AdoptHere():
                await self.adoption.adopt(question, caller)
                return GroupAnswer()

    def _route(self, question: RouteHere, caller: Caller) -> GroupRoute | None:
        verb = Verb.LOOK if question.consumer_group is None else Verb.RECEIVE
        self.policy.allow(caller, verb, topic=question.topic, group=question.consumer_group)
        topic = self.tables.topics.find_topic(question.topic)
        if topic is None:
            return None
        in_order = False
        if question.consumer_group is not None:
            in_order = self.tables.groups.ensure(question.consumer_group).consume_message_orderly
        message_type = topic.config.attributes.get(MESSAGE_TYPE, "")
        name = self.settings.broker_name
        return GroupRoute(
            name, queues_to_read(topic), self.policy.queues_to_write(topic), message_type, in_order
        )


def _read(answer: GroupAnswer, read: Callable[[GroupAnswer], T]) -> T | None:
    """Read a group's answer. None if the group cannot serve now. Raises the refusal that the answer contains."""
    refusal = answer.refusal
    if refusal is None:
        return read(answer)
    if refusal.code == RECALL_REFUSED:
        raise RecallRefused(refusal.verdict, refusal.at_ms, refusal.text)
    error = from_code(refusal.code, refusal.text)
    # The node or its log is stopping. Another replica may lead soon.
    if isinstance(error, Unavailable | StorageError):
        return None
    raise error
