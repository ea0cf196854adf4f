"""A broker with one schedule, a record of its answers (`Known`), and a check of the log against them (`faults_of`).

The rule has a time every ten minutes and the schedule catches up with all of them. So each time after the put was
delivered once, or its message was cancelled. One occurrence is pending, never two.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from tests.crash.lives import run, until_cut
from tests.crash.world import HOUR_MS, SECOND_MS, CutFiles, World
from tests.crash_files import CrashFiles

from timeball.broker.recurring.rule import Rule
from timeball.broker.registry.schedules import Progress, ScheduleFacts, State
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.message import decode_properties

NAME, TOPIC = "tick", "ticks"
EVERY_MS = 600 * SECOND_MS
RULE = {"every": "10m"}
RETENTION = {"retention_ms": 1, "unread_retention_ms": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "hour_log": RETENTION,
    "timer_wheel": {**RETENTION, "strategy": "timer_wheel", "timer_wheel_ms": 60 * SECOND_MS},
    "level_cascade": {**RETENTION, "strategy": "level_cascade"},
}


def facts_of(rule: Mapping[str, object] = RULE, **changes: Any) -> ScheduleFacts:
    """Build a schedule that delivers every time of its rule, however late."""
    plain: dict[str, Any] = {
        "topic": TOPIC, "body": b"tick", "catch_up": "all", "catch_up_within_ms": 30 * limits.DAY_MS,
    }  # fmt: skip
    return ScheduleFacts(rule=msgspec.Raw(Rule.parse(rule).text.encode()), **(plain | changes))


def times_between(after_ms: int, until_ms: int) -> list[int]:
    """Return the times of RULE later than `after_ms` and not later than `until_ms`."""
    first = after_ms // EVERY_MS + 1
    return [number * EVERY_MS for number in range(first, until_ms // EVERY_MS + 1)]


def id_of(due_ms: int) -> str:
    return f"{NAME}.{due_ms}"


def progress(world: World, name: str = NAME) -> Progress:
    return world.broker.tables.schedules.get(name)[1]


async def compact(world: World) -> None:
    """Move pending messages to the table, if the strategy does so."""
    if world.broker.scheduling.compacts:
        await world.compact()


async def put(world: World, name: str = NAME, caller: Any = ANONYMOUS, **changes: Any) -> str:
    """Put the schedule `facts_of(**changes)`. Return its outcome: "created", "replaced" or "unchanged"."""
    return (await world.broker.schedules.put(name, facts_of(**changes), caller))[1]


async def released(world: World, topic: str = TOPIC) -> list[dict[str, Any]]:
    """Read all visible rows of a topic, in the order of the log."""
    rows_of_topic = []
    queues = world.broker.queues(topic) if topic in world.broker.topics() else {}
    for queue, (low, high) in queues.items():
        while low < high:
            rows = (await world.broker.read_queue(topic, queue, low, 1_000)).to_pylist()
            rows_of_topic += rows
            low += len(rows)
    return sorted(rows_of_topic, key=lambda row: row["seq"])


async def locals_of(world: World, topic: str = TOPIC) -> list[str]:
    """Return the local times that the delivered occurrences name."""
    return [decode_properties(row["properties"])["occurrence"] for row in await released(world, topic)]


@dataclass
class Known:
    """The requests and the answers to them while the power was on. The sets have ids of occurrences."""

    put_ms: int | None = None  # of the request
    is_put: bool = False
    cancel_asked: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)


class OneSchedule(World):
    """A world with one schedule, which records the requests and answers in `known`."""

    known: Known

    @classmethod
    def on(cls, files: CrashFiles, clock: ManualClock, known: Known, **settings: Any) -> OneSchedule:
        world = cls(files, clock, **settings)
        world.known = known
        return world

    async def put(self) -> None:
        """Put the schedule, and record whether it was answered."""
        if self.known.put_ms is None:
            self.known.put_ms = self.clock.wall
        await put(self)
        self.known.is_put = not self.files.cut

    async def cancel_next(self) -> None:
        """Cancel the pending occurrence, and record the request and the answer."""
        message_id = id_of(progress(self).due_ms)
        self.known.cancel_asked.add(message_id)
        [verdict] = await self.broker.cancel(ids=[message_id])
        if not self.files.cut and verdict.verdict in ("cancelled", "already_cancelled"):
            self.known.cancelled.add(message_id)

    async def move_next(self, delay_ms: int) -> None:
        """Reschedule the pending occurrence."""
        message_id = id_of(progress(self).due_ms)
        self.known.moved.add(message_id)
        await self.broker.reschedule(ids=[message_id], due_ms=self.clock.wall + delay_ms)

    async def pause(self) -> None:
        await self.broker.schedules.pause(NAME, ANONYMOUS)

    async def resume(self) -> None:
        await self.broker.schedules.resume(NAME, ANONYMOUS)


Step = Callable[[OneSchedule], Awaitable[object]]

# All ways in which an occurrence ends, and all places where it may be pending.
LIFE: list[Step] = [
    lambda w: w.start(),
    lambda w: w.put(),
    lambda w: w.send("a", [500, EVERY_MS, 2 * EVERY_MS]),
    lambda w: w.advance(EVERY_MS),  # from the tail
    lambda w: compact(w),
    lambda w: w.advance(EVERY_MS),  # from the table
    lambda w: w.consume(),
    lambda w: w.cancel_next(),
    lambda w: w.advance(EVERY_MS),
    lambda w: w.checkpoint(),
    lambda w: w.move_next(2 * EVERY_MS + SECOND_MS),
    lambda w: w.advance(EVERY_MS),
    lambda w: w.restart(),
    lambda w: w.advance(EVERY_MS),
    lambda w: w.pause(),
    lambda w: w.advance(EVERY_MS),
    lambda w: w.resume(),  # with a missed occurrence
    lambda w: w.settled(),
    lambda w: w.consume(),
    lambda w: w.apply_retention(),
    lambda w: w.put(),  # equal: nothing changes
    lambda w: w.advance(3 * EVERY_MS),
    lambda w: w.consume(),
    lambda w: w.checkpoint(),
    lambda w: w.stop(),
]


@dataclass(frozen=True)
class Cut:
    """The state when the power was cut, or at the end: the disk, the answers so far, the clock, and the settings."""

    files: CutFiles
    known: Known
    clock: ManualClock
    observed: Any
    settings: dict[str, Any]

    @property
    def at(self) -> str:
        """The call at which the power was cut, for messages of failed tests."""
        return "call {} ({} {})".format(self.files.calls, *self.files.trace[-1])


def live(settings: dict[str, Any], crash_at: int | None = None, steps: list[Step] = LIFE) -> Cut:
    """Carry out the steps, until the power is cut at call `crash_at` of the file system, or to their end."""
    files, clock, known = CutFiles(crash_at=crash_at), ManualClock(), Known()
    world = OneSchedule.on(files, clock, known, **settings)

    async def live_on() -> None:
        for step in steps:
            await step(world)

    run(until_cut(world, files, live_on))
    return Cut(files, known, clock, world.observed, settings)


def faults_after(cut: Cut, image: CrashFiles) -> list[str]:
    """Start on the disk `image`, let two hours pass, and compare the deliveries with the answers."""
    known = copy.deepcopy(cut.known)
    world = OneSchedule.on(
        image, replace(cut.clock), known, observed=copy.deepcopy(cut.observed), **cut.settings
    )

    async def main() -> list[str]:
        await world.start()
        try:
            await world.settled()
            schedule = world.broker.tables.schedules.find(NAME)
            if schedule is not None and schedule.progress.state == State.PAUSED:
                await world.resume()
            await world.advance(2 * HOUR_MS)
            await world.consume()
            faults = faults_of(world)
            await world.stop()
        finally:
            await world.abandon()
        return faults + world.unheard

    try:
        return run(main())
    except Exception as error:
        return [f"broken: {error!r}"]


def faults_of(world: OneSchedule) -> list[str]:
    """List the contradictions between the answers and the deliveries. A consumer has read everything."""
    known, now_ms = world.known, world.clock.wall
    places = Counter(row.key for row in world.observed.seen.values() if row.place.topic == TOPIC)
    schedule = world.broker.tables.schedules.find(NAME)
    if schedule is None:
        return ["lost: the schedule"] if known.is_put else [f"orphan: {key}" for key in places]
    assert known.put_ms is not None
    expected = [id_of(due_ms) for due_ms in times_between(known.put_ms, now_ms)]
    faults = [f"doubled: {key}" for key, count in places.items() if count > 1]
    faults += [f"unexpected: {key}" for key in places if key not in expected]
    # A put without an answer may have been stored later than it was requested, but before the next occurrence.
    faults += [f"lost: {key}" for key in expected if not places[key] and key not in known.cancel_asked]
    faults += [f"resurrected: {key}" for key in known.cancelled if places[key]]
    last = schedule.progress
    outcomes = world.broker.scheduling.outcomes
    if last.state != State.ACTIVE or last.due_ms <= now_ms:
        faults.append(f"not active: {last}")
    elif not outcomes._is_pending(last.due_ms, last.number):
        faults.append(f"not pending: {last}")
    if (count := world.broker.pending_messages) != 1:
        faults.append(f"pending: {count} messages, not one")
    return faults
