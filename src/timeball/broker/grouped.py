"""The broker of one group of a cluster: verbs that name messages by id, key or handle ask all groups.

A producer's messages may lie in any group, and its client may ask any node. So the node asks every group at once, its
own as a broker alone does, and makes one answer of what they say (revoking/merged.py). A recall handle names its group,
which alone is asked. Numbers are those of one log: the verbs take them as this group's own.

A broker alone is a Broker, and has none of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from timeball.access import ANONYMOUS, Caller, Verb
from timeball.broker.components import Components
from timeball.broker.policy import queues_to_read, queues_to_write
from timeball.broker.registry.topic import MESSAGE_TYPE
from timeball.broker.revoking.group_questions import (
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
from timeball.broker.revoking.recall import RecallRefused, decode_handle
from timeball.broker.service import Broker
from timeball.errors import StorageError, TimeballError, Unavailable, from_code
from timeball.wire import MessagePlace, Verdict

T = TypeVar("T")

RECALL_REFUSED = "recall_refused"
ROUTE_S = 1.0  # RocketMQ's clients wait 3 s for a route, and one without a group that hangs is of use to them


class GroupedBroker(Broker):
    """Belongs to the event loop."""

    def __init__(self, parts: Components, *, others: OtherGroups, **found: Any) -> None:
        super().__init__(parts, **found)
        self.group, self.others = parts.settings.group, others

    # -- asked by clients ------------------------------------------------------------------------------------

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
        here = super().cancel(ids=ids, keys=keys, seqs=seqs, topic=topic, caller=caller)
        if seqs:  # the same number is another message in another group's log
            return await here
        question = CancelHere(ids=list(ids), keys=list(keys), topic=topic)
        return await self._settle(here, question, caller)

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
        here = super().reschedule(
            ids=ids, keys=keys, seqs=seqs, topic=topic, caller=caller, due_ms=due_ms, delay_ms=delay_ms
        )
        if seqs:
            return await here
        question = RescheduleHere(
            ids=list(ids), keys=list(keys), topic=topic, due_ms=due_ms, delay_ms=delay_ms
        )
        return await self._settle(here, question, caller)

    async def find(
        self, message_id: str, topic: str | None = None, caller: Caller = ANONYMOUS
    ) -> list[MessagePlace]:
        """Return where the messages with this id are, of all groups; see Broker.find."""
        here, question = super().find(message_id, topic, caller), FindHere(id=message_id, topic=topic)
        return merge_places(await self._everywhere(here, question, caller, lambda answer: answer.places))

    async def recall(self, topic: str, handle: str, caller: Caller = ANONYMOUS) -> str:
        """Take back the message that a recall handle names, in the group that has made it; see Broker.recall."""
        # A group's name is its broker's, which RocketMQ's handles bear.
        group = decode_handle(handle).broker_name
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

    async def _settle(
        self,
        here: Coroutine[Any, Any, list[Verdict]],
        question: CancelHere | RescheduleHere,
        caller: Caller,
    ) -> list[Verdict]:
        told = await self._everywhere(here, question, caller, lambda answer: answer.verdicts)
        if len(told) == 1 and told[0] is not None:
            return told[0]  # the only group: as a broker alone says it
        return merge_verdicts([*question.ids, *question.keys], told)

    async def _everywhere(
        self,
        here: Coroutine[Any, Any, T],
        question: AnyQuestion,
        caller: Caller,
        read: Callable[[GroupAnswer], T],
    ) -> list[T | None]:
        """Return what this group and all others say, None for a silent one; raise what any has refused it for."""
        try:
            names = self.others.names()
        except Unavailable:
            here.close()  # not begun: nothing is settled of a request that is refused
            raise
        asked = (self.others.ask(name, question, caller) for name in names)
        # Of all the outcome, before one of them raises: no answer is left behind.
        own, *answers = await asyncio.gather(here, *asked, return_exceptions=True)
        for each in (own, *answers):
            if isinstance(each, BaseException):
                raise each
        told = [None if answer is None else _read(answer, read) for answer in answers]
        return [own, *told]

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
                return GroupAnswer(verdicts=verdicts)
            case RescheduleHere(ids=ids, keys=keys, topic=topic, due_ms=due_ms, delay_ms=delay_ms):
                verdicts = await super().reschedule(
                    ids=ids, keys=keys, topic=topic, caller=caller, due_ms=due_ms, delay_ms=delay_ms
                )
                return GroupAnswer(verdicts=verdicts)
            case FindHere(id=message_id, topic=topic):
                return GroupAnswer(places=await super().find(message_id, topic, caller))
            case RecallHere(topic=topic, handle=handle):
                return GroupAnswer(message_id=await super().recall(topic, handle, caller))
            case RouteHere():
                return GroupAnswer(route=self._route(question, caller))

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
        return GroupRoute(name, queues_to_read(topic), queues_to_write(topic), message_type, in_order)


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
