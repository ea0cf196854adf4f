"""A data folder with content of every kind, and a complete look at it, which shows the effect of damage.

`lived` runs a broker until a clean stop. Its folder then has messages, scheduled messages in log and table, delay
levels, receipts, half messages, groups, offsets, cancelled and moved scheduled messages, a campaign in each state,
several segments, and several versions of the table. `look` starts a broker on such a folder, uses it like users until
all is due, and returns everything visible meanwhile. Two folders with the same content give equal looks.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.broker.accepting.test_transacting import commit, prepare
from tests.crash.checker import Observed, check
from tests.crash.lives import AFTER_MS, run
from tests.crash.world import GROUP, HOUR_MS, SECOND_MS, CutFiles, World
from tests.crash_files import CrashFiles

from timeball.broker.consuming.leases import Lease, QueueLeases
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.registry.groups import RequestMode, SubscriptionGroup
from timeball.broker.registry.topics import TopicConfig
from timeball.broker.tables import compact
from timeball.io.clock import ManualClock, SchedulerClock
from timeball.table import catalog

POPS, RECEIVES, AGAIN = "poppers", "receivers", "%RETRY%"
MINUTE_MS = 60_000
VARIANTS: dict[str, dict[str, Any]] = {
    "hour_log": {},
    "retained": {"retention_ms": 1, "unread_retention_ms": 1},  # the log's beginning is gone
    "timer_wheel": {"strategy": "timer_wheel"},
    "level_cascade": {"strategy": "level_cascade"},
}


@dataclass(frozen=True)
class Kept:
    """A folder after a clean stop, and the answers that its clients have received."""

    files: CrashFiles
    clock: ManualClock
    observed: Observed
    settings: dict[str, Any]
    keys: dict[str, list[str]]  # of scheduled messages to be cancelled, moved and resumed during the look
    halves: list[int]  # sequence numbers of open half messages

    def world(self, files: CrashFiles) -> World:
        """Return a machine on the disk `files`, with copies of the clock and the observer."""
        world = World(files, replace(self.clock), deepcopy(self.observed), **self.settings)
        world.keys = 1_000  # so that its new messages have other keys than those of `lived`
        return world

    def copy(self) -> CrashFiles:
        """Return a copy of the disk, which a test may damage."""
        return self.files.crash(survival="everything")


def lived(variant: str) -> Kept:
    """Fill a folder of one of VARIANTS, and stop cleanly."""
    world = World(CutFiles(), ManualClock(), **VARIANTS[variant])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "CHECKPOINT_EVERY", 3)
        keys, halves = run(_live(world))
    return Kept(world.files, world.clock, world.observed, VARIANTS[variant], keys, halves)


async def _live(world: World) -> tuple[dict[str, list[str]], list[int]]:
    """Fill the folder. Return the keys for the look (`Kept.keys`) and the sequence numbers of open half messages."""
    await world.start()
    broker, compacts = world.broker, world.settings.strategy == "hour_log"
    await world.create_topic("a", 2)
    broker.tables.topics.configure("c", TopicConfig(3, 3, attributes={"message.type": "DELAY"}))
    broker.tables.groups.update(SubscriptionGroup("configured", retry_max_times=3))
    broker.tables.request_modes.set(RequestMode("a", POPS, "POP"))
    far = await world.send("a", [HOUR_MS, HOUR_MS + 1, 2 * HOUR_MS, 3 * HOUR_MS, 40 * MINUTE_MS])
    await world.send("a", [None] * 6, 20_000)
    table = await world.bulk("b", [HOUR_MS, 2 * HOUR_MS, 5 * HOUR_MS, SECOND_MS], 1)
    held = await world.campaign("paused", "b", [2 * SECOND_MS, 3 * SECOND_MS, HOUR_MS, 2 * HOUR_MS])
    moved = await world.campaign("resumed", "b", [MINUTE_MS, HOUR_MS])
    await world.campaign("running", "a", [HOUR_MS])
    ended = await world.campaign("cancelled", "a", [HOUR_MS, 2 * HOUR_MS])
    await world.advance(2 * SECOND_MS)  # the first message of campaign `paused` is released
    for name in ("paused", "resumed"):
        await world.broker.change_campaign(name, "pause")
    await world.advance(3 * SECOND_MS)
    await world.cancel(held[3:])
    await world.resume("resumed", moved, shift=True)
    world.observed.cancel_asked.update(ended)
    await world.broker.change_campaign("cancelled", "cancel")
    await world.broker.change_campaign("planned", "plan", rows=3)
    for round_ in range(4):
        if compacts:
            await world.compact()
        far += await world.send("c", [HOUR_MS + round_, 30 * MINUTE_MS, 4 * HOUR_MS], 60_000)
        await world.send("b", [None, None, 500, None], 90_000)
        await world.advance(2 * SECOND_MS)
        await world.consume()
        await world.cancel([far[-1]])
        if compacts:
            await world.compact()
        await world.checkpoint()
    # These messages come after the first segments, which the variant `retained` removes. They keep the later segments.
    await world.send_levels("b", [1, 5, 9, 14, 18])
    halves = [await prepare(world, topic=["half"]), await prepare(world, topic=["half"], unique_key=["B0"])]
    await world.reschedule([far[1]], 90 * MINUTE_MS)
    await world.save_offsets()
    await world.apply_retention()
    tail = await world.send("a", [HOUR_MS, 2 * HOUR_MS, 50 * MINUTE_MS])
    await world.send_levels("b", [4, 10])
    await world.send("a", [None] * 4)
    await broker.consuming.receive(ReceiveRequest(POPS, "a", rows=2, invisible_ms=10 * MINUTE_MS), 0)
    received = await broker.consuming.receive(
        ReceiveRequest(RECEIVES, "a", rows=2, invisible_ms=10 * MINUTE_MS), 0
    )
    assert await broker.consuming.nack(received.receipts[0], 10 * MINUTE_MS, "not yet")
    assert (broker.log.reader.first_seq > 1) == (world.settings.retention_ms == 1)
    await world.stop()
    keys = {"cancel": [far[3], table[1], tail[1]], "move": [far[4], table[2], tail[2]], "held": held[1:3]}
    return keys, halves


Look = dict[str, Any]


def look(kept: Kept, files: CrashFiles) -> Look:
    """Return everything visible of a folder from a start until all is due. Raises the errors that a user would get."""

    async def main() -> Look:
        world = kept.world(files)
        try:
            return await _look(world, kept)
        except Exception:
            if world.failure is not None:
                raise world.failure from None
            raise
        finally:
            await world.abandon()

    return run(main())


async def _look(world: World, kept: Kept) -> Look:
    """Start, read everything, use it, and let all become due. Each entry of the result is one view of the content."""
    await world.start()
    await world.settled()
    views, new_seq = known(world), world.broker.log.writer.next_seq
    views["visible"] = [(row.place, row.key, row.body) for row in (await world.outcome()).rows]
    await world.consume()
    views["seen"] = [(row.place, row.key) for row in sorted(world.observed.seen.values())]
    views["verdicts"] = [verdict.verdict for verdict in await world.broker.cancel(ids=kept.keys["cancel"])]
    world.observed.cancel_asked.update(kept.keys["cancel"])
    await world.reschedule(kept.keys["move"], 70 * MINUTE_MS)
    views["resumed"] = await world.resume("paused", kept.keys["held"])
    views["committed"] = str(await commit(world, kept.halves[0]))
    await world.send("a", [None, SECOND_MS])
    await world.advance(11 * MINUTE_MS)
    world.broker.consuming.wake()
    windows = world.broker.consuming.leases.all()
    await world.until(
        lambda: not any(window.in_flight for window in windows), "messages that POP handed out are back"
    )
    await world.consume()
    await world.advance(AFTER_MS)
    await world.consume()
    outcome = await world.outcome()
    views["rows"] = sorted((row.place.topic, row.key, row.body, str(row.due_ms)) for row in outcome.rows)
    views["waited"] = sorted((row.key, row.body) for row in outcome.waited)
    # Messages that come back to a group are also in its retry topic, and half messages are not in the observer's list.
    observed = world.observed
    outcome.rows = [row for row in outcome.rows if not row.place.topic.startswith(AGAIN)]
    outcome.ranges = {queue: ends for queue, ends in outcome.ranges.items() if not queue[0].startswith(AGAIN)}
    outcome.offsets = {
        group_topic: offsets
        for group_topic, offsets in outcome.offsets.items()
        if not group_topic[1].startswith(AGAIN)
    }
    observed.seen = {place: row for place, row in observed.seen.items() if not place.topic.startswith(AGAIN)}
    views["faults"] = [fault for fault in check(world.observed, outcome) if fault.kind != "unexpected"]
    # Rows of this run have different numbers each time: the offsets of groups are a row, once a second.
    views["settled"] = sorted(min(seq, new_seq) for seq in outcome.settled)
    if world.failure is not None:
        raise world.failure  # it would have ended the process
    await world.stop()
    return views


def known(world: World) -> Look:
    """Return the state of the broker itself after a start."""
    broker = world.broker
    adds = DeltaTable(world.broker.pending_table.catalog.uri).get_add_actions(flatten=True)
    # The rewriter of small files begins its epoch when it looks at them: on a busy machine some rows later.
    epochs = {
        job: epoch for job, epoch in world.broker.attach_state.epochs.items() if job != compact.REWRITE_JOB_ID
    }
    return {
        "topics": [
            (topic.name, topic.config, topic.filter_type, topic.perm) for topic in world.broker.tables.topics.all()
        ],
        "queues": {topic: broker.queues(topic) for topic in broker.topics()},
        "groups": world.broker.tables.groups.all(),
        "offsets": {
            (group, topic): broker.offsets(group, topic)
            for group in (GROUP, POPS, RECEIVES) for topic in broker.topics()
        },
        "modes": world.broker.tables.request_modes.get("a", POPS),
        "secret": world.broker.tables.receipt_secret.get() if world.broker.tables.receipt_secret.is_made else None,
        "held": [held(queue, broker.clock) for queue in broker.consuming.leases.all() if not queue.is_idle],
        "redeliveries": broker.redeliveries.counts(),
        "campaigns": [broker.campaigns(listed.campaign)[0] for listed in broker.campaigns()],
        "halves": sorted(broker.transactions.open()),
        "ledger": (epochs, world.broker.attach_state.reserved, world.broker.attach_state.attach_seq),
        "files": sorted(str(entry) for entry in world.broker.scheduling.hour_log.pending.live_entries()),
        "delta": sorted(str({**add, "modification_time": 0}) for add in pa.table(adds).to_pylist()),
    }  # fmt: skip


def held(queue: QueueLeases, clock: SchedulerClock) -> Look:
    """Return the leases of one group in one queue, with their deadlines as times of the wall clock."""

    def positions(leases: dict[int, Lease]) -> dict[int, Lease]:
        """Return leases by offset, with deadlines of the wall clock."""
        return {
            offset: msgspec.structs.replace(lease, deadline_ms=clock.as_wall(lease.deadline_ms))
            for offset, lease in sorted(leases.items())
        }

    return {
        "queue": (queue.group, queue.topic, queue.queue_id),
        "offsets": (queue.stored_offset, queue.first_open, queue.next_offset, sorted(queue.acked_ahead)),
        "in_order": (queue.last_pop_ms, queue.attempt_id),
        "leases": (positions(queue.in_flight), positions(queue.returned)),
    }
