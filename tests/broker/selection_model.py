"""The meaning of selections, as a model in plain Python, and a run of a broker beside it.

A message belongs to at most one selection. "Accept S" gives S all pending messages that belong to none and meet its
condition. "Undo S" takes them back. A message that is due ends: cancelled if it belongs to a selection, else released.
A cancel by name is final, and a message of a selection cannot be rescheduled. The resume of a campaign ends those of
its messages that belong to a selection, and changes the due times of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from tests.crash.world import World

from timeball.broker.registry.selections import SelectionFacts
from timeball.model.access import ANONYMOUS
from timeball.model.answers import PageRequest
from timeball.model.message import encode_properties

SECOND_MS, MINUTE_MS, HOUR_MS = 1_000, 60_000, 3_600_000
# In files and log, far and near, and due at the same time as others.
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
    owner: str | None = None  # the selection to which it belongs


Meets = Callable[[Message], bool]


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
    selections: list[str] = field(default_factory=list)
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
        return [m for m in self.pending() if m.owner is None]

    def let_pass(self) -> None:
        """End the messages that are due."""
        for message in self.pending():
            if message.due_ms <= self.now_ms and not self._is_held(message):
                message.state = "visible" if message.owner is None else "cancelled"

    # -- steps: each is taken by the broker and by the model -----------------------------------------------------

    async def send(self, topic: str, shapes: list[tuple[int, int]]) -> None:
        """Send messages, each with an index of DELAYS_MS and one of REGIONS."""
        sent = self._made(topic, shapes)
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

    async def select(self, condition: int) -> None:
        wanted, meets = conditions(self.base_ms)[condition]
        facts = SelectionFacts(seq=0, at_ms=0, **wanted)
        covered = [m for m in self.listed() if meets(m)]
        counted = await self.world.broker.selections.dry_run(facts, ANONYMOUS)
        assert counted.count == len(covered)
        if covered:
            due_ms = [m.due_ms for m in covered]
            assert (counted.first_due_ms, counted.last_due_ms) == (min(due_ms), max(due_ms))
            assert sum(rows for *_, rows in counted.hours) == len(covered)
            assert sum(before for _, before, _ in counted.hours) <= len(self.listed())
            first = sorted(due_ms)[: len(counted.samples)]
            assert [due for due, *_ in counted.samples] == first
            assert {key for *_, key, _ in counted.samples} <= {m.key for m in covered}
        name = await self.world.broker.selections.select(facts, ANONYMOUS)
        self.selections.append(name)
        for message in covered:
            message.owner = name

    async def undo(self, index: int) -> None:
        if self.selections:
            name = self.selections[index % len(self.selections)]
            await self.world.broker.selections.undo(name, ANONYMOUS)
            for message in self.pending():
                if message.owner == name:
                    message.owner = None

    async def cancel(self, index: int) -> None:
        if (message := self._pick(index)) is None:
            return
        (verdict,) = await self.world.broker.cancel(ids=[message.key])
        if message.state == "waiting":
            assert verdict.verdict == ("cancelled" if message.owner is None else "already_cancelled")
            message.state = "cancelled"
        else:
            assert verdict.verdict == {"visible": "released", "cancelled": "already_cancelled"}[message.state]

    async def reschedule(self, index: int, delay: int) -> None:
        if (message := self._pick(index)) is None:
            return
        due_ms = self.now_ms + DELAYS_MS[delay]
        (verdict,) = await self.world.broker.reschedule(ids=[message.key], due_ms=due_ms)
        if message.state == "waiting" and message.owner is None:
            assert verdict.verdict == "rescheduled"
            message.due_ms = due_ms
            message.is_member = False
        else:
            assert verdict.verdict == ("released" if message.state == "visible" else "already_cancelled")

    async def pause(self, index: int) -> None:
        if self.campaigns and (name := self.campaigns[index % len(self.campaigns)]) not in self.ended:
            await self.world.broker.change_campaign(name, "pause")
            self.paused_ms.setdefault(name, self.now_ms)

    async def resume(self, index: int, shift: bool) -> None:
        if not self.campaigns or (name := self.campaigns[index % len(self.campaigns)]) not in self.paused_ms:
            return
        await self.world.broker.change_campaign(name, "resume", shift=shift)
        paused_ms = self.paused_ms.pop(name)
        shift_ms = self.now_ms - paused_ms if shift else 0
        for message in self.pending():
            if message.campaign != name or not message.is_member:
                continue
            if message.owner is not None:
                message.state = "cancelled"
            else:
                message.due_ms = max(message.due_ms + shift_ms, self.now_ms)
        await self.advance(0)

    async def end_campaign(self, index: int) -> None:
        if self.campaigns:
            name = self.campaigns[index % len(self.campaigns)]
            await self.world.broker.change_campaign(name, "cancel")
            self.ended.add(name)
            self.paused_ms.pop(name, None)
            for message in self.pending():
                if message.campaign == name and message.is_member:
                    message.state = "cancelled"

    async def advance(self, delay_ms: int) -> None:
        await self.world.advance(delay_ms)
        self.let_pass()

    async def restart(self) -> None:
        await self.world.restart()

    async def compact(self) -> None:
        if self.world.broker.scheduling.compacts:
            await self.world.compact()

    async def merge(self) -> None:
        await self.world.merge()

    async def keep_house(self) -> None:
        """The periodic duties: counts, a checkpoint, and retention."""
        await self.world.broker.selections.count()
        await self.world.checkpoint()
        await self.world.let_go()
        assert self.world.broker.pending_messages == len(self.listed())

    # -- what the broker must tell -------------------------------------------------------------------------------

    async def check(self) -> None:
        """Compare pages, look-ups and counts with the model."""
        broker, listed = self.world.broker, self.listed()
        expected = sorted((m.due_ms, m.key) for m in listed)
        assert await self._page() == expected
        first_key = sorted((m.due_ms, m.key) for m in listed if m.number == 1)
        assert await self._page(key="key-1") == first_key
        for key, message in self.messages.items():
            places = await broker.find(key)
            state = "cancelled" if message.owner is not None and message.state == "waiting" else message.state
            assert [place.state for place in places] == [state], (key, message)
            if message.owner is not None and state == "cancelled" and message.state == "waiting":
                assert places[0].reason == f"selection {message.owner}"
        counted = await broker.forecast.counted("day", self.base_ms, self.base_ms + 4 * 24 * HOUR_MS)
        # Held messages are not due.
        free = [m for m in listed if not self._is_held(m)]
        assert sum(counted.topics.values()) == len(free)

    async def check_deliveries(self) -> None:
        """Let all become due, and compare the queues with the model."""
        for name in list(self.paused_ms):
            await self.resume(self.campaigns.index(name), False)
        await self.advance(3 * 24 * HOUR_MS)
        delivered = sorted(row.key for row in (await self.world.outcome()).rows)
        assert delivered == sorted(m.key for m in self.messages.values() if m.state == "visible")
        assert not self.pending()

    async def _page(self, **wanted: Any) -> list[tuple[int, str]]:
        found, after = list[tuple[int, str]](), None
        while True:
            page = await self.world.broker.listing.page(PageRequest(5, after=after, **wanted))
            found += [(one.due_ms, one.unique_key) for one in page.messages]
            if page.next_page is None:
                return sorted(found)
            after = page.next_page

    def _made(self, topic: str, shapes: list[tuple[int, int]]) -> list[Message]:
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

    def _pick(self, index: int) -> Message | None:
        return [*self.messages.values()][index % len(self.messages)] if self.messages else None


def _properties(message: Message) -> str:
    properties = {"number": str(message.number)}
    if message.region is not None:
        properties["region"] = message.region
    return encode_properties(properties)
