"""The broker of one group of a cluster. Operations by id, key or handle apply to all groups of the cluster.

A producer's messages may be in any group, and its client may ask any node. So the node asks all groups at the same
time, including its own, and merges the answers (revoking/group_questions.py). A recall handle names its group, so only
that group is asked. Sequence numbers belong to one log: operations by number apply to this group only.

A group may be drained: its pending messages go to another group (draining.py). For these messages it answers `handed`,
or `unavailable` while they are on their way. The group that adopted them gives the final answer.

A broker without a cluster is a plain Broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from timeball.broker.groups.draining import HAND_OVER_EVERY_MS, Draining, DrainReceiver
from timeball.broker.policy import queues_to_read
from timeball.broker.registry.selections import Selected
from timeball.broker.registry.topics import MESSAGE_TYPE
from timeball.broker.revoking.cancel import SETTLED, RecallRefused, decode_handle
from timeball.broker.revoking.find_message import limit_contents, sent_states
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
from timeball.broker.service import Broker
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.answers import (
    HANDED,
    UNAVAILABLE,
    Attached,
    Campaign,
    CampaignChange,
    Drained,
    MessagePlace,
    RangesCancelled,
    SentState,
    Verdict,
)
from timeball.model.errors import NotLeader, StorageError, TimeballError, Unavailable, from_code
from timeball.table.attachment import Attachment

T = TypeVar("T")

RECALL_REFUSED = "recall_refused"
# RocketMQ's clients wait 3 s for a route. A route that lacks a silent group is still useful.
ROUTE_S = 1.0


class GroupedBroker(Broker):
    """A broker that combines the answers of all groups of a cluster. Belongs to the event loop."""

    def __init__(self, *, others: OtherGroups, account: Callable[[str], Caller], **components: Any) -> None:
        """Create the broker. `account` maps an account's name to a caller, for drains. It raises Unauthorized."""
        super().__init__(**components)
        self.group, self.others = self.settings.group, others
        self.draining = Draining(
            self.policy, self.mover, self.snapshots, others, account, settings=self.settings, clock=self.clock,
            log=self.log, tables=self.tables, scheduling=self.scheduling, background=self.threads.background,
            gate=self.gate, pending_messages=lambda: self.pending_messages,
        )  # fmt: skip
        self.adoption = DrainReceiver(
            self.policy, self.appender, settings=self.settings, clock=self.clock, writer=self.log.writer,
            drains=self.tables.drains, on_adopted=self.unique_sends.forget,
        )  # fmt: skip
        # Periodic tasks as (interval in ms, function). maintenance.py runs them in addition to its own.
        self.duties = [(HAND_OVER_EVERY_MS, self.draining.hand_over)]

    # -- requests of clients ---------------------------------------------------------------------------------

    async def sent_states(self, numbers: Sequence[int]) -> list[SentState]:
        """Look up the states of scheduled messages. The state is `handed` if another group now has the message."""
        return await sent_states(self.look_ups, numbers, self._mark_handed_verdicts)

    async def cancel(
        self,
        *,
        ids: Sequence[str] = (),
        keys: Sequence[str] = (),
        seqs: Sequence[int] = (),
        topic: str | None = None,
        caller: Caller = ANONYMOUS,
    ) -> list[Verdict]:
        """Cancel these messages in all groups, as far as they are pending. See Broker.cancel."""
        if seqs:  # in another group's log, the same number is another message
            own_verdicts = super().cancel(ids=ids, keys=keys, seqs=seqs, topic=topic, caller=caller)
            return self._mark_handed_verdicts(await own_verdicts)
        return await self._settle_in_all_groups(
            CancelHere(ids=list(ids), keys=list(keys), topic=topic), caller
        )

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
        """Reschedule these messages in all groups, as far as they are pending. See Broker.reschedule."""
        if seqs:  # as in `cancel`
            own_verdicts = super().reschedule(
                ids=ids, keys=keys, seqs=seqs, topic=topic, caller=caller, due_ms=due_ms, delay_ms=delay_ms
            )
            return self._mark_handed_verdicts(await own_verdicts)
        question = RescheduleHere(
            ids=list(ids), keys=list(keys), topic=topic, due_ms=due_ms, delay_ms=delay_ms
        )
        return await self._settle_in_all_groups(question, caller)

    async def find(
        self, message_id: str, topic: str | None = None, caller: Caller = ANONYMOUS
    ) -> list[MessagePlace]:
        """Find the messages with this id in all groups, and where they are. See Broker.find."""
        question = FindHere(id=message_id, topic=topic)
        # Ask at most twice: if all states were `handed`, the heir may have answered before it had the message.
        for is_last in (False, True):
            group_places = await self._ask_all_groups(question, caller, lambda answer: answer.places)
            not_handed = [
                None if answer is None else [place for place in answer if place.state != HANDED]
                for answer in group_places
            ]
            places = merge_places(not_handed)
            if places or is_last or not_handed == group_places:  # the last: no state was `handed`
                break
        return limit_contents(places)

    async def recall(self, topic: str, handle: str, caller: Caller = ANONYMOUS) -> str:
        """Cancel the message of a recall handle, in the group that created the handle. See Broker.recall."""
        # RocketMQ's handles contain the broker's name, which is the name of its group.
        decoded_handle = decode_handle(handle)
        try:
            return await self._recall(topic, handle, decoded_handle.broker_name, caller)
        except RecallRefused as refused:
            if refused.verdict != HANDED:
                raise
        # The handle's group has handed the message over. Cancel it by its id in the group that has it now.
        verdicts = await self.cancel(ids=[decoded_handle.unique_key], topic=topic, caller=caller)
        for verdict in verdicts:
            if verdict.verdict == UNAVAILABLE:
                raise Unavailable(
                    "a group of the cluster did not answer; recall the message again in a moment"
                )
            if verdict.verdict not in SETTLED:
                raise RecallRefused(verdict.verdict, verdict.at_ms, f"too late, it is {verdict.verdict}")
        return decoded_handle.unique_key

    async def _recall(self, topic: str, handle: str, group: str, caller: Caller) -> str:
        """Cancel the message of a handle in the group that created it. Returns the message's id."""
        if group == self.settings.broker_name or group not in self.others.names():
            return await super().recall(topic, handle, caller)
        self.policy.allow(caller, Verb.CANCEL, topic=topic)
        answer = await self.others.ask(group, RecallHere(topic=topic, handle=handle), caller)
        message_id = None if answer is None else _unwrap(answer, lambda own_answer: own_answer.message_id)
        if message_id is None:
            raise Unavailable(f"group {group} did not answer; recall the message again in a moment")
        return message_id

    async def routes(
        self, topic: str, caller: Caller = ANONYMOUS, consumer_group: str | None = None
    ) -> dict[str, GroupRoute | None]:
        """Find the other groups that have a topic, and its queues there, by the group's name.

        None for a group that does not answer or refuses. A group without the topic is left out.
        """
        names, question = self.others.names(), RouteHere(topic=topic, consumer_group=consumer_group)
        answers = await asyncio.gather(*(self.others.ask(name, question, caller, ROUTE_S) for name in names))
        routes: dict[str, GroupRoute | None] = {}
        for name, answer in zip(names, answers, strict=True):
            # A refusal means that the group has other accounts than this one. Its queues are unknown.
            if answer is None or answer.refusal is not None:
                routes[name] = None
            elif answer.route is not None:
                routes[name] = answer.route
        return routes

    async def _settle_in_all_groups(
        self, question: CancelHere | RescheduleHere, caller: Caller
    ) -> list[Verdict]:
        """Ask all groups to cancel or reschedule messages, and merge their verdicts."""
        # Ask again after a verdict `handed`, because the heir may have the message by now.
        for _ in range(2):
            group_verdicts = await self._ask_all_groups(question, caller, lambda answer: answer.verdicts)
            if len(group_verdicts) == 1 and group_verdicts[0] is not None:
                return group_verdicts[0]  # there is only this group, so there is nothing to merge
            merged = merge_verdicts([*question.ids, *question.keys], group_verdicts)
            if not any(verdict.verdict == HANDED for verdict in merged):
                return merged
        # Still `handed` after the second try: the heir had the message, and retention has removed its rows since.
        return [
            msgspec.structs.replace(verdict, verdict="expired") if verdict.verdict == HANDED else verdict
            for verdict in merged
        ]

    async def _ask_all_groups(
        self, question: AnyQuestion, caller: Caller, read: Callable[[GroupAnswer], T]
    ) -> list[T | None]:
        """Ask this group and all other groups at the same time. `read` reads a result from each answer.

        A result is None if the group does not answer. Raises the first refusal or error.
        """
        requests: list[Coroutine[Any, Any, GroupAnswer | None]] = [
            self.others.ask(name, question, caller) for name in self.others.names()
        ]
        # Wait for all outcomes before an error is raised, so that no task keeps running.
        outcomes = await asyncio.gather(self._answer(question, caller), *requests, return_exceptions=True)
        answers = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            answers.append(outcome)
        return [None if outcome is None else _unwrap(outcome, read) for outcome in answers]

    # -- a drain ---------------------------------------------------------------------------------------------

    async def drain(self, heir: str, *, dry_run: bool = False, caller: Caller = ANONYMOUS) -> Drained:
        """Hand over all pending messages of this group to the group `heir`, and report the progress (draining.py)."""
        return await self.draining.drain(heir, caller, dry_run=dry_run)

    async def reserve(self, rows: int, caller: Caller = ANONYMOUS) -> int:
        """Reserve sequence numbers, unless this group is drained. See Broker.reserve."""
        # Also checked at the attach. Here it spares a bulk job from writing all its files first.
        self.policy.check_open()
        return await super().reserve(rows, caller)

    async def attach(self, attachment: Attachment, caller: Caller = ANONYMOUS) -> Attached:
        """Attach files to the pending table. A drained group refuses new files of bulk jobs. See Broker.attach."""
        if attachment.job == "bulk":
            self.policy.check_open()
        return await super().attach(attachment, caller)

    async def cancel_ranges(
        self,
        ranges: Sequence[tuple[int, int]],
        reason: str = "",
        caller: Caller = ANONYMOUS,
        *,
        only: Selected | None = None,
    ) -> RangesCancelled:
        """Cancel the pending messages in a bulk job's ranges. Raises Conflict in a drained group.

        See Broker.cancel_ranges.
        """
        self.draining.check_numbers()
        return await super().cancel_ranges(ranges, reason, caller, only=only)

    async def change_campaign(
        self, campaign: str, change: CampaignChange, *, caller: Caller = ANONYMOUS, **options: Any
    ) -> Campaign:
        """Plan, pause, resume or cancel a campaign. Raises Conflict in a drained group. See Broker.change_campaign."""
        self.draining.check_numbers()
        return await super().change_campaign(campaign, change, caller=caller, **options)

    def _mark_handed_verdicts(self, verdicts: Iterable[Verdict]) -> list[Verdict]:
        """Change the verdict of messages that were handed over to `handed`, or to `unavailable` while they move."""
        drains, mapped = self.tables.drains, []
        for verdict in verdicts:
            if drains.was_handed_over(verdict.verdict, verdict.at_ms):
                word = UNAVAILABLE if drains.is_moving(verdict.at_ms) else HANDED
                mapped.append(msgspec.structs.replace(verdict, verdict=word))
            else:
                mapped.append(verdict)
        return mapped

    def _mark_handed_places(self, places: list[MessagePlace]) -> list[MessagePlace]:
        """Change the state of messages that were handed over to `handed`. Raises Unavailable while one moves."""
        drains, mapped = self.tables.drains, []
        for place in places:
            if drains.was_handed_over(place.state, place.at_ms):
                if drains.is_moving(place.at_ms):
                    raise Unavailable("the message is on its way to another group; ask again in a moment")
                mapped.append(msgspec.structs.replace(place, state=HANDED))
            else:
                mapped.append(place)
        return mapped

    # -- questions of other groups ---------------------------------------------------------------------------

    async def answer(self, question: AnyQuestion, caller: Caller) -> GroupAnswer:
        """Answer another group's question from this group's log alone. Raises NotLeader."""
        # A refusal is sent as an answer, because the asking group treats an HTTP error as no answer.
        try:
            return await self._answer(question, caller)
        except NotLeader:
            raise  # the asking group asks the next leader
        except RecallRefused as error:
            refusal = Refusal(RECALL_REFUSED, error.sentence, error.verdict, error.at_ms)
        except TimeballError as error:
            refusal = Refusal(error.code, str(error))
        return GroupAnswer(refusal=refusal)

    async def _answer(self, question: AnyQuestion, caller: Caller) -> GroupAnswer:
        """Answer a question from this group's log alone. Raises the errors of the operation."""
        match question:
            case CancelHere(ids=ids, keys=keys, topic=topic):
                verdicts = await super().cancel(ids=ids, keys=keys, topic=topic, caller=caller)
                return GroupAnswer(verdicts=self._mark_handed_verdicts(verdicts))
            case RescheduleHere(ids=ids, keys=keys, topic=topic, due_ms=due_ms, delay_ms=delay_ms):
                verdicts = await super().reschedule(
                    ids=ids, keys=keys, topic=topic, caller=caller, due_ms=due_ms, delay_ms=delay_ms
                )
                return GroupAnswer(verdicts=self._mark_handed_verdicts(verdicts))
            case FindHere(id=message_id, topic=topic):
                return GroupAnswer(
                    places=self._mark_handed_places(await super().find(message_id, topic, caller))
                )
            case RecallHere(topic=topic, handle=handle):
                return GroupAnswer(message_id=await super().recall(topic, handle, caller))
            case RouteHere():
                return GroupAnswer(route=self._route(question, caller))
            case AdoptHere():
                await self.adoption.adopt(question, caller)
                return GroupAnswer()

    def _route(self, question: RouteHere, caller: Caller) -> GroupRoute | None:
        """Build the route of a topic in this group, for a producer or for a consumer group. None without the topic."""
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


def _unwrap(answer: GroupAnswer, read: Callable[[GroupAnswer], T]) -> T | None:
    """Read a result from a group's answer. Raises the refusal that the answer contains.

    None if the refusal means that the group cannot serve now.
    """
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
