"""The broker of one group of a cluster: verbs that name messages by id, key or handle ask all groups.

A producer's messages may lie in any group, and its client may ask any node. So the node asks every group at once, its
own as a broker alone does, and makes one answer of what they say (revoking/merged.py). A recall handle names its group,
which alone is asked. Numbers are those of one log: the verbs take them as this group's own.

A group may be drained: what waits in it goes to another group (draining.py). It says of such messages `handed`, or
`unavailable` while they are on their way, and the group that has them says the rest.

A broker alone is a Broker, and has none of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from timeball.access import ANONYMOUS, Caller, Verb
from timeball.answers import SentState
from timeball.broker.adoption import Adoption
from timeball.broker.components import Components
from timeball.broker.draining import LOOK_MS, Draining
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
)
from timeball.broker.revoking.merged import merge_places, merge_verdicts
from timeball.broker.revoking.recall import SETTLED, RecallRefused, decode_handle
from timeball.broker.revoking.sent_states import sent_states
from timeball.broker.service import Broker
from timeball.errors import StorageError, TimeballError, Unavailable, from_code
from timeball.table.attachment import Attachment
from timeball.wire import (
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

T = TypeVar("T")

RECALL_REFUSED = "recall_refused"
ROUTE_S = 1.0  # RocketMQ's clients wait 3 s for a route, and one without a group that hangs is of use to them


class GroupedBroker(Broker):
    """Belongs to the event loop."""

    def __init__(
        self, parts: Components, *, others: OtherGroups, account: Callable[[str], Caller], **found: Any
    ) -> None:
        """`account`: return the caller of this name, for what is done in its name later; raises Unauthorized."""
        super().__init__(parts, **found)
        self.group, self.others = parts.settings.group, others
        self.draining = Draining(parts, self.policy, self.mover, others, account)
        self.adoption = Adoption(parts, self.policy, self.appender)
        self.duties = [(LOOK_MS, self.draining.look)]

    # -- asked by clients ------------------------------------------------------------------------------------

    async def sent_states(self, numbers: Sequence[int]) -> list[SentState]:
        """Return the states of scheduled messages; `handed` of those that another group has now."""
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
        """Settle what waits of these in all groups; see Broker.cancel."""
        if seqs:  # the same number is another message in another group's log
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
        """Move what waits of these in all groups; see Broker.reschedule."""
        if seqs:
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
        """Return where the messages with this id are, of all groups; see Broker.find."""
        question = FindHere(id=message_id, topic=topic)
        for is_last in (False, True):
            told = await self._everywhere(question, caller, lambda answer: answer.places)
            here = [None if each is None else [p for p in each if p.state != HANDED] for each in told]
            found = merge_places(here)
            # The heir was perhaps asked before it had the message, and has it now.
            if found or is_last or here == told:
                break
        return found

    async def recall(self, topic: str, handle: str, caller: Caller = ANONYMOUS) -> str:
        """Take back the message that a recall handle names, in the group that has made it; see Broker.recall."""
        # A group's name is its broker's, which RocketMQ's handles bear.
        named = decode_handle(handle)
        try:
            return await self._recall(topic, handle, named.broker_name, caller)
        except RecallRefused as refused:
            if refused.verdict != HANDED:
                raise
        # Its group has handed it over: the group that has it now finds it by its id.
        verdicts = await self.cancel(ids=[named.unique_key], topic=topic, caller=caller)
        for verdict in verdicts:
            if verdict.verdict == UNAVAILABLE:
                raise Unavailable(
                    "a group of the cluster did not answer; recall the message again in a moment"
                )
            if verdict.verdict not in SETTLED and self.parts.settings.recall_answers != "rocketmq":
                raise RecallRefused(verdict.verdict, verdict.at_ms, f"too late, it is {verdict.verdict}")
        return named.unique_key

    async def _recall(self, topic: str, handle: str, group: str, caller: Caller) -> str:
        if group == self.parts.settings.broker_name or group not in self.others.names():
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
        """Return the other groups that have a topic, and its queues there; None for a group that is silent."""
        names, question = self.others.names(), RouteHere(topic=topic, consumer_group=consumer_group)
        answers = await asyncio.gather(*(self.others.ask(name, question, caller, ROUTE_S) for name in names))
        found: dict[str, GroupRoute | None] = {}
        for name, answer in zip(names, answers, strict=True):
            # Refused there, though it was allowed here: its accounts are others, and its queues are not known.
            if answer is None or answer.refusal is not None:
                found[name] = None
            elif answer.route is not None:
                found[name] = answer.route
        return found

    async def _settle(self, question: CancelHere | RescheduleHere, caller: Caller) -> list[Verdict]:
        for _ in range(2):
            told = await self._everywhere(question, caller, lambda answer: answer.verdicts)
            if len(told) == 1 and told[0] is not None:
                return told[0]  # the only group: as a broker alone says it
            merged = merge_verdicts([*question.ids, *question.keys], told)
            if not any(verdict.verdict == HANDED for verdict in merged):
                return merged
        # Asked once more: the heir has had it, and knows nothing of it any more.
        return [
            msgspec.structs.replace(each, verdict="expired") if each.verdict == HANDED else each
            for each in merged
        ]

    async def _everywhere(
        self, question: AnyQuestion, caller: Caller, read: Callable[[GroupAnswer], T]
    ) -> list[T | None]:
        """Return what this group and all others say, None for a silent one; raise what any has refused it for."""
        asked: list[Coroutine[Any, Any, GroupAnswer | None]] = [
            self.others.ask(name, question, caller) for name in self.others.names()
        ]
        # Of all the outcome, before one of them raises: no answer is left behind.
        told = await asyncio.gather(self._answer(question, caller), *asked, return_exceptions=True)
        answers = []
        for each in told:
            if isinstance(each, BaseException):
                raise each
            answers.append(each)
        return [None if each is None else _read(each, read) for each in answers]

    # -- a drain ---------------------------------------------------------------------------------------------

    async def drain(self, heir: str, *, dry_run: bool = False, caller: Caller = ANONYMOUS) -> Drained:
        """Hand over all that waits here to another group; return how far that is (draining.py)."""
        return await self.draining.drain(heir, caller, dry_run=dry_run)

    async def reserve(self, rows: int, caller: Caller = ANONYMOUS) -> int:
        """Set sequence numbers aside, unless this group is drained; see Broker.reserve."""
        # Here and not at the attach alone: a bulk job would write all its files first.
        self.policy.check_open()
        return await super().reserve(rows, caller)

    async def attach(self, attachment: Attachment, caller: Caller = ANONYMOUS) -> Attached:
        """Make files part of the pending table; nothing new of a group that is drained. See Broker.attach."""
        if attachment.job == "bulk":
            self.policy.check_open()
        return await super().attach(attachment, caller)

    async def cancel_ranges(
        self, ranges: Sequence[tuple[int, int]], reason: str = "", caller: Caller = ANONYMOUS
    ) -> RangesCancelled:
        """Settle what waits of a bulk job's numbers; see Broker.cancel_ranges."""
        self.draining.check_numbers()
        return await super().cancel_ranges(ranges, reason, caller)

    async def change_campaign(
        self, campaign: str, change: CampaignChange, *, caller: Caller = ANONYMOUS, **wanted: Any
    ) -> Campaign:
        """Plan, pause, resume or cancel a campaign; see Broker.change_campaign."""
        self.draining.check_numbers()
        return await super().change_campaign(campaign, change, caller=caller, **wanted)

    def _handed(self, verdicts: Iterable[Verdict]) -> list[Verdict]:
        """Return verdicts of this log, as a drained group tells them of messages that were handed over."""
        drains, found = self.parts.drains, []
        for each in verdicts:
            if drains.was_handed(each.verdict, each.at_ms):
                word = UNAVAILABLE if drains.is_moving(each.at_ms) else HANDED
                found.append(msgspec.structs.replace(each, verdict=word))
            else:
                found.append(each)
        return found

    def _handed_places(self, places: list[MessagePlace]) -> list[MessagePlace]:
        """Return the places that this log knows; raise Unavailable for a message that is on its way."""
        drains, found = self.parts.drains, []
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
        """Answer a question of another group from this group's log alone."""
        # As an answer, not as a status: what is not an answer is a silence, and asked again or told as one.
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
        topic = self.parts.topics.find_topic(question.topic)
        if topic is None:
            return None
        in_order = False
        if question.consumer_group is not None:
            in_order = self.parts.groups.ensure(question.consumer_group).consume_message_orderly
        message_type = topic.config.attributes.get(MESSAGE_TYPE, "")
        name = self.parts.settings.broker_name
        return GroupRoute(
            name, queues_to_read(topic), self.policy.queues_to_write(topic), message_type, in_order
        )


def _read(answer: GroupAnswer, read: Callable[[GroupAnswer], T]) -> T | None:
    """Return what a group has answered; None if it cannot serve now; raise what it has refused the request for."""
    refusal = answer.refusal
    if refusal is None:
        return read(answer)
    if refusal.code == RECALL_REFUSED:
        raise RecallRefused(refusal.verdict, refusal.at_ms, refusal.text)
    error = from_code(refusal.code, refusal.text)
    # It stops, or its log has stopped: another replica may lead soon.
    if isinstance(error, Unavailable | StorageError):
        return None
    raise error
