"""The meaning of selections, as a model in plain Python, and a run of a broker beside it.

Each operation is applied message by message. "Accept S" adds S to the operations of all pending messages that are not
cancelled and meet its condition. "Undo S" takes it out. What a message is follows from its operations in their order. A
message that is due and not held ends: cancelled or released. A cancel by name is final, and so is a reschedule by name.
The resume of a campaign ends those of its messages that a selection has cancelled, and changes the due times of the
others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from tests.crash.world import World

from timeball.broker.registry.selections import SelectionFacts
from timeball.model.access import ANONYMOUS
from timeball.model.answers import PageRequest
from timeball.model.message import encode_properties

SECOND_MS, MINUTE_MS, HOUR_MS = 1_000, 60_000, 3_600_000
# The delays of messages: short and long delays, and a delay that occurs twice.
DELAYS_MS = [2 * SECOND_MS, 8 * SECOND_MS, MINUTE_MS, MINUTE_MS, HOUR_MS, 3 * HOUR_MS]
REGIONS = [None, "eu", "us"]


@dataclass
class Message:
    """One message as its sender knows it."""

    key: str
    topic: str
    due_ms: int
    tag: str | None
    region: str | None
    number: int  # the n-th message of its send
    campaign: str | None = None
    is_member: bool = False  # of the campaign, until it is rescheduled
    state: str = "waiting"  # waiting, visible, cancelled
    selections: list[str] = field(
        default_factory=list
    )  # the ids of its selections, in the order of their acceptance
    delivered_to: str | None = None


@dataclass(frozen=True)
class View:
    """A message as its operations have changed it."""

    due_ms: int
    topic: str
    owner: str | None = None  # the selection that has cancelled it
    is_held: bool = False


Meets = Callable[[Message], bool]


# The arguments of the operations that change messages.
ACTIONS: list[dict[str, Any]] = [
    {"action": "cancel"},
    {"action": "shift", "shift_ms": 2 * HOUR_MS},
    {"action": "shift", "shift_ms": 5 * SECOND_MS},
    {"action": "shift", "shift_ms": -HOUR_MS},
    {"action": "shift", "shift_ms": -3 * SECOND_MS},
    {"action": "pause"},
    {"action": "resume"},
    {"action": "release"},
    {"action": "move", "to_topic": "b"},
    {"action": "move", "to_topic": "c"},
]
# Indexes of ACTIONS.
SHIFT_LATER, PAUSE, RESUME, RELEASE = 1, 5, 6, 7
# Indexes of `conditions`.
TOPIC_A, ALL, REGION_EU, DUE_LATER = 0, 1, 2, 5


def conditions(base_ms: int) -> list[tuple[dict[str, Any], Meets]]:
    """The arguments of some selections, each with its meaning."""
    middle_ms = base_ms + 30 * SECOND_MS
    return [
        ({"topics": ["a"]}, lambda m: m.topic == "a"),
        ({"where": "TRUE"}, lambda m: True),
        ({"where": "region = 'eu'"}, lambda m: m.region == "eu"),
        ({"where": "region <> 'eu'", "topics": ["a", "b"]}, lambda m: m.region == "us"),
        ({"where": "tag = 'even' OR number > 2"}, lambda m: m.tag == "even" or m.number > 2),
        ({"from_ms": middle_ms}, lambda m: m.due_ms >= middle_ms),
        ({"where": f"due_ms < {middle_ms}"}, lambda m: m.due_ms < middle_ms),
        ({"to_ms": middle_ms, "topics": ["b"]}, lambda m: m.due_ms < middle_ms and m.topic == "b"),
        ({"where": "keys ENDSWITH '-1' AND topic = 'a'"}, lambda m: m.number == 1 and m.topic == "a"),
        ({"where": "campaign IS NOT NULL"}, lambda m: m.campaign is not None),
        ({"where": "campaign = 'c0' OR campaign = 'c2'"}, lambda m: m.campaign in ("c0", "c2")),
    ]


@dataclass
class Model:
    """A broker beside the model of its messages."""

    world: World
    messages: dict[str, Message] = field(default_factory=dict)
    selections: dict[str, SelectionFacts] = field(default_factory=dict)  # in their order
    paused_ms: dict[str, int] = field(default_factory=dict)  # paused campaigns
    campaigns: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)  # cancelled campaigns
    base_ms: int = 0

    def __post_init__(self) -> None:
        self.base_ms = self.world.clock.wall

    @property
    def now_ms(self) -> int:
        return self.world.clock.wall

    def pending(self) -> list[Message]:
        return [m for m in self.messages.values() if m.state == "waiting"]

    def listed(self) -> list[Message]:
        """The messages that a page shows."""
        return [m for m in self.pending() if self.view(m).owner is None]

    def view(self, message: Message) -> View:
        """Apply the operations of a message that are not undone."""
        view = View(message.due_ms, message.topic)
        for name in message.selections:
            facts = self.selections[name]
            if facts.action == "cancel":
                view = replace(view, owner=name)
            elif facts.action == "shift":
                due_ms = view.due_ms + facts.shift_ms
                # Not before the time of the operation, unless the message was due before it (a held message).
                if facts.shift_ms < 0:
                    due_ms = max(due_ms, min(view.due_ms, facts.at_ms))
                view = replace(view, due_ms=due_ms)
            elif facts.action in ("pause", "resume"):
                view = replace(view, is_held=facts.action == "pause")
            elif facts.action == "release":
                view = replace(view, due_ms=min(view.due_ms, facts.at_ms), is_held=False)
            else:
                view = replace(view, topic=facts.to_topic)
        return view

    def seen(self, message: Message) -> Message:
        """Build the message as a condition sees it: with its present due time and topic."""
        view = self.view(message)
        return replace(message, due_ms=view.due_ms, topic=view.topic)

    def let_pass(self) -> None:
        """End the messages that are due."""
        for message in self.pending():
            view = self.view(message)
            if view.due_ms <= self.now_ms and not (view.is_held or self._is_held(message)):
                message.state = "visible" if view.owner is None else "cancelled"
                message.delivered_to = view.topic

    # -- steps: each is taken by the broker and by the model -----------------------------------------------------

    async def send(self, topic: str, shapes: list[tuple[int, int]]) -> None:
        """Send messages, each with an index of DELAYS_MS and one of REGIONS."""
        sent = self._build_messages(topic, shapes)
        batch = pa.RecordBatch.from_pylist(
            [
                {
                    "topic": m.topic, "body": b"x", "unique_key": m.key, "keys": f"key-{m.number}", "tag": m.tag,
                    "due_ms": m.due_ms, "properties": _properties(m),
                }
                for m in sent
            ]
        )  # fmt: skip
        await self.world.broker.send(batch)
        self.messages |= {m.key: m for m in sent}

    async def bulk(self, topic: str, shapes: list[tuple[int, int]]) -> None:
        """A campaign: its messages come in a file, which has neither tags nor properties."""
        name = f"c{len(self.campaigns)}"
        delays_ms = [DELAYS_MS[delay] for delay, _ in shapes]
        keys = await self.world.campaign(name, topic, delays_ms)
        self.campaigns.append(name)
        for number, key in enumerate(keys):
            due_ms = self.world.observed.sent[key].due_ms
            assert due_ms is not None
            self.messages[key] = Message(key, topic, due_ms, None, None, -1 - number, name, True)

    async def select(self, condition: int, action: int = 0) -> None:
        """Accept the selection of a condition (an index of `conditions`) and an action (an index of ACTIONS).

        First compares a dry run with the model.
        """
        arguments, meets = conditions(self.base_ms)[condition]
        facts = SelectionFacts(seq=0, at_ms=0, **ACTIONS[action], **arguments)
        covered = [m for m in self.listed() if meets(self.seen(m)) and self._has_effect(facts, self.view(m))]
        before = self._hours(self.listed())
        survey = await self.world.broker.selections.dry_run(facts, ANONYMOUS)
        assert survey.count == len(covered)
        due_ms = sorted(self.view(m).due_ms for m in covered)
        if covered:
            assert (survey.first_due_ms, survey.last_due_ms) == (due_ms[0], due_ms[-1])
            assert [due for due, *_ in survey.samples] == due_ms[: len(survey.samples)]
            assert {key for *_, key, _ in survey.samples} <= {m.key for m in covered}
        hours = self._hours(covered)
        name = await self.world.broker.selections.select(facts, ANONYMOUS)
        self.selections[name] = self.world.broker.selections.get(name, ANONYMOUS)
        for message in covered:
            message.selections.append(name)
        hours |= self._hours(covered)
        after = self._hours(self.listed())
        assert survey.hours == [(hour, before[hour], after[hour]) for hour in sorted(hours)]
        await self.advance(0)

    async def undo(self, index: int) -> None:
        """Undo a selection. `index`, here and below: chooses one of the present ones."""
        if self.selections:
            name = [*self.selections][index % len(self.selections)]
            await self.world.broker.selections.undo(name, ANONYMOUS)
            for message in self.pending():
                if name in message.selections:
                    message.selections.remove(name)
            await self.advance(0)

    async def cancel(self, index: int) -> None:
        """Cancel a message by its id."""
        if (message := self._pick(index)) is None:
            return
        (verdict,) = await self.world.broker.cancel(ids=[message.key])
        if message.state == "waiting":
            assert verdict.verdict == (
                "cancelled" if self.view(message).owner is None else "already_cancelled"
            )
            message.state = "cancelled"
        else:
            assert verdict.verdict == {"visible": "released", "cancelled": "already_cancelled"}[message.state]

    async def reschedule(self, index: int, delay: int) -> None:
        """Reschedule a message to a delay (an index of DELAYS_MS) from now."""
        if (message := self._pick(index)) is None:
            return
        due_ms = self.now_ms + DELAYS_MS[delay]
        (verdict,) = await self.world.broker.reschedule(ids=[message.key], due_ms=due_ms)
        if message.state == "waiting" and self.view(message).owner is None:
            assert verdict.verdict == "rescheduled"
            # The later operation wins: only the topic stays.
            message.topic, message.selections = self.view(message).topic, []
            message.due_ms = due_ms
            message.is_member = False
        else:
            assert verdict.verdict == ("released" if message.state == "visible" else "already_cancelled")

    async def pause(self, index: int) -> None:
        """Pause a campaign, unless it is cancelled."""
        if self.campaigns and (name := self.campaigns[index % len(self.campaigns)]) not in self.ended:
            await self.world.broker.change_campaign(name, "pause")
            self.paused_ms.setdefault(name, self.now_ms)

    async def resume(self, index: int, shift: bool) -> None:
        """Resume a campaign, if it is paused."""
        if not self.campaigns or (name := self.campaigns[index % len(self.campaigns)]) not in self.paused_ms:
            return
        await self.world.broker.change_campaign(name, "resume", shift=shift)
        paused_ms = self.paused_ms.pop(name)
        shift_ms = self.now_ms - paused_ms if shift else 0
        for message in self.pending():
            if message.campaign != name or not message.is_member:
                continue
            if self.view(message).owner is not None:
                message.state = "cancelled"
            else:
                message.selections = []
                message.due_ms = max(message.due_ms + shift_ms, self.now_ms)
        await self.advance(0)

    async def end_campaign(self, index: int) -> None:
        """Cancel a campaign."""
        if self.campaigns:
            name = self.campaigns[index % len(self.campaigns)]
            await self.world.broker.change_campaign(name, "cancel")
            self.ended.add(name)
            self.paused_ms.pop(name, None)
            for message in self.pending():
                if message.campaign == name and message.is_member:
                    message.state = "cancelled"

    async def advance(self, delay_ms: int) -> None:
        """Advance the clock, write wake-ups, and end the messages that are due."""
        await self.world.advance(delay_ms)
        await self.world.broker.wakers.wake()
        await self.world.settled()
        self.let_pass()

    async def restart(self) -> None:
        await self.world.restart()
        await self.world.broker.wakers.wake()

    async def compact(self) -> None:
        if self.world.broker.scheduling.compacts:
            await self.world.compact()

    async def merge(self) -> None:
        await self.world.merge()

    async def keep_house(self) -> None:
        """The periodic duties: counts, a checkpoint, and retention."""
        await self.world.broker.selections.count()
        await self.world.checkpoint()
        await self.world.apply_retention()
        assert self.world.broker.pending_messages == len(self.listed())

    # -- comparisons of the broker with the model ----------------------------------------------------------------

    async def check(self) -> None:
        """Compare pages, look-ups and counts with the model."""
        broker, listed = self.world.broker, self.listed()
        expected = sorted((self.view(m).due_ms, m.key) for m in listed)
        assert await self._page() == expected
        first_key = [due for due in expected if self.messages[due[1]].number == 1]
        assert await self._page(key="key-1") == first_key
        middle_ms = self.base_ms + 30 * SECOND_MS
        assert await self._page(from_ms=middle_ms) == [due for due in expected if due[0] >= middle_ms]
        assert await self._page(to_ms=middle_ms) == [due for due in expected if due[0] < middle_ms]
        for topic in "abc":
            in_topic = [due for due in expected if self.view(self.messages[due[1]]).topic == topic]
            if in_topic:
                assert await self._page(topic=topic) == in_topic
            if first_key := [due for due in in_topic if self.messages[due[1]].number == 1]:
                assert await self._page(topic=topic, key="key-1") == first_key
        for key, message in self.messages.items():
            places = await broker.find(key)
            view = self.view(message)
            state = "cancelled" if view.owner is not None and message.state == "waiting" else message.state
            assert [place.state for place in places] == [state], (key, message)
            if view.owner is not None and message.state == "waiting":
                assert places[0].reason == f"selection {view.owner}"
            elif message.state == "waiting":
                assert (places[0].due_ms, places[0].topic) == (view.due_ms, view.topic)
                assert (places[0].reason is not None) == view.is_held
            if message.state == "waiting" and view.topic != message.topic:
                for topic in "abc":
                    is_found = bool(await broker.find(key, topic))
                    assert is_found == (topic in (message.topic, view.topic)), (topic, message)
        counted = await broker.forecast.counted("day", self.base_ms, self.base_ms + 4 * 24 * HOUR_MS)
        # Held messages are not due.
        free = [m for m in listed if not (self._is_held(m) or self.view(m).is_held)]
        assert counted.topics == Counter(self.view(m).topic for m in free)

    async def check_deliveries(self) -> None:
        """Let all messages become due, and compare the queues with the model."""
        for name in list(self.paused_ms):
            await self.resume(self.campaigns.index(name), False)
        await self.advance(3 * 24 * HOUR_MS)
        for _ in range(2):  # held messages wait, and are released after the resume
            delivered = sorted((row.key, row.place.topic) for row in (await self.world.outcome()).rows)
            visible = [m for m in self.messages.values() if m.state == "visible"]
            assert delivered == sorted((m.key, m.delivered_to) for m in visible)
            assert all(self.view(m).is_held for m in self.pending())
            await self.select(ALL, RESUME)
            await self.advance(SECOND_MS)
        assert not self.listed()

    async def _page(self, **options: Any) -> list[tuple[int, str]]:
        messages, after = list[tuple[int, str]](), None
        while True:
            page = await self.world.broker.listing.page(PageRequest(5, after=after, **options))
            for listed in page.messages:
                message = self.messages[listed.unique_key]
                # As in the forecast, which leaves out held messages.
                assert listed.is_held == (self._is_held(message) or self.view(message).is_held), message
            messages += [(listed.due_ms, listed.unique_key) for listed in page.messages]
            if page.next_page is None:
                return sorted(messages)
            after = page.next_page

    def _build_messages(self, topic: str, shapes: list[tuple[int, int]]) -> list[Message]:
        keys = self.world.fresh_keys(len(shapes))
        return [
            Message(
                key, topic, self.now_ms + DELAYS_MS[delay], "even" if number % 2 == 0 else None,
                REGIONS[region], number,
            )
            for number, (key, (delay, region)) in enumerate(zip(keys, shapes, strict=True))
        ]  # fmt: skip

    def _is_held(self, message: Message) -> bool:
        return message.is_member and message.campaign in self.paused_ms

    def _hours(self, messages: list[Message]) -> Counter[int]:
        """Count the messages by hour, without held and cancelled messages."""
        views = map(self.view, messages)
        return Counter(v.due_ms - v.due_ms % HOUR_MS for v in views if not (v.is_held or v.owner))

    @staticmethod
    def _has_effect(facts: SelectionFacts, view: View) -> bool:
        """Check whether an operation changes a message: a pause of a held message, for example, changes nothing."""
        if facts.action in ("pause", "resume"):
            return view.is_held == (facts.action == "resume")
        return facts.action != "move" or view.topic != facts.to_topic

    def _pick(self, index: int) -> Message | None:
        return [*self.messages.values()][index % len(self.messages)] if self.messages else None


def _properties(message: Message) -> str:
    properties = {"number": str(message.number)}
    if message.region is not None:
        properties["region"] = message.region
    return encode_properties(properties)
