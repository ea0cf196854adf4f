"""A whole broker on a disk whose power can be cut, and an observer outside that records all answers.

`World` drives a real `Node` (no sockets) on `CrashFiles` and a `ManualClock`. Its operations send, cancel, pull
or move. The observer records an answer only if it came while the power was on. After a cut every thread of the node
gets `PowerCut` at its next disk call. `abandon` waits for the threads and discards the node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tests.bounds import BOUND_S
from tests.crash.checker import Fault, Observed, Outcome, Place, Row, Sent
from tests.crash_files import CrashFiles, PowerCut

from timeball.broker.registry.selections import SelectionFacts
from timeball.io.clock import ManualClock
from timeball.model.access import ANONYMOUS
from timeball.model.config import MIB, Settings
from timeball.model.message import SCHEDULE_TOPIC, TABLE_SCHEMA, Kind
from timeball.node.node import Node
from timeball.schedule.loaded import LoadBounds
from timeball.table import layout
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.data_file import DataFile

GROUP = "readers"
SECOND_MS = 1_000
HOUR_MS = 3_600_000
SELECTED = "already_cancelled"  # the verdict of a message of a selection


class CutFiles(CrashFiles):
    """Notifies a callback of the power cut, so that no polling is necessary."""

    on_cut: Callable[[], None] | None = None

    def about_to_cut(self) -> None:
        super().about_to_cut()
        if self.on_cut is not None:
            self.on_cut()


class Unheard(AssertionError):
    """An exception that only the event loop has seen: some code swallowed it."""


class World:
    """One node at a time on one disk. The disk, the clock and the observer outlive the node."""

    def __init__(
        self,
        files: CrashFiles,
        clock: ManualClock,
        observed: Observed | None = None,
        load_bounds: LoadBounds = LoadBounds(),  # noqa: B008  # frozen, so it can be shared
        **settings: Any,
    ) -> None:
        self.files, self.clock = files, clock
        self.observed = observed or Observed()
        self.settings = Settings(
            data=Path("in-memory"),
            **{"segment_bytes": MIB, "queues_per_topic": 2, "compact_rows": 0, **settings},
        )
        self._load_bounds = load_bounds
        self.node: Node | None = None
        self.unheard: list[str] = []
        self.keys = 0
        self.selections: list[str] = []  # ids, in the order of their acceptance

    # -- life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start a node on the disk."""
        asyncio.get_running_loop().set_exception_handler(self._hear)
        self.node = Node(self.settings, clock=self.clock, files=self.files, load_bounds=self._load_bounds)
        await self.build(self.node)

    async def build(self, node: Node) -> None:
        """Start this node. Subclasses build it in another way."""
        await node.start(listen=False)

    async def stop(self) -> None:
        """Stop the node in order."""
        assert self.node is not None
        node, self.node = self.node, None
        await node.stop()
        self._retrieve(node)

    async def restart(self, **settings: Any) -> None:
        """Stop in order, and start again, optionally with other settings."""
        await self.stop()
        self.settings = replace(self.settings, **settings)
        await self.start()

    async def abandon(self) -> None:
        """End the node as a power cut does: cancel its tasks, and wait for its threads."""
        current = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.node is not None:
            for thread in self.node._threads:
                thread.shutdown(wait=True, cancel_futures=True)
            self._retrieve(self.node)
            self.node = None
        await asyncio.sleep(0)  # runs the last callbacks that the threads have scheduled

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the node, if any."""
        failed = self.node._failed if self.node is not None else None
        return failed.exception() if failed is not None and failed.done() else None

    @property
    def broker(self) -> Any:
        """The broker of the running node."""
        assert self.node is not None
        return self.node.broker

    # -- requests: the observer records each answer ------------------------------------------------------------

    def fresh_keys(self, count: int) -> list[str]:
        """Return keys that no message has yet."""
        self.keys += count
        return [f"k{number:05d}" for number in range(self.keys - count, self.keys)]

    async def send(self, topic: str, delays_ms: Iterable[int | None], body_bytes: int = 20) -> list[str]:
        """Send one batch. A delay of None makes an ordinary message. Returns the keys."""
        sent = self._ask(topic, list(delays_ms), body_bytes)
        batch = pa.record_batch(
            {
                "topic": [one.topic for one in sent],
                "body": [one.body for one in sent],
                "unique_key": [one.key for one in sent],
                "keys": ["every " + one.key[:3] for one in sent],
                "tag": ["even" if i % 2 else None for i in range(len(sent))],
                "due_ms": pa.array([one.due_ms for one in sent], pa.int64()),
            }
        )
        await self.broker.send(batch)
        self._answered(sent)
        return [one.key for one in sent]

    async def send_levels(self, topic: str, levels: Iterable[int], body_bytes: int = 20) -> list[str]:
        """Send one batch of messages with these delay levels. Returns the keys."""
        levels = list(levels)
        durations = self.broker.scheduling.levels.table.durations_ms
        sent = self._ask(topic, [durations[level - 1] for level in levels], body_bytes)
        batch = pa.record_batch(
            {
                "topic": [one.topic for one in sent],
                "body": [one.body for one in sent],
                "unique_key": [one.key for one in sent],
                "tag": ["even" if i % 2 else None for i in range(len(sent))],
                "properties": [f"UNIQ_KEY\x01{one.key}\x02" for one in sent],
                "delay_level": pa.array(levels, pa.int32()),
            }
        )
        await self.broker.send(batch)
        self._answered(sent)
        return [one.key for one in sent]

    async def send_at_once(self, topic: str, batches: Sequence[Sequence[int | None]]) -> None:
        """Send several batches whose commits overlap."""
        await asyncio.gather(*(self.send(topic, batch) for batch in batches))

    async def cancel(self, keys: Iterable[str]) -> None:
        """Cancel by ids. From now on the messages may be cancelled, with or without an answer."""
        ids = list(keys)
        self.observed.cancel_asked.update(ids)
        for verdict in await self.broker.cancel(ids=ids):
            if not self.files.cut:
                self.observed.verdicts.setdefault(verdict.subject, []).append(verdict.verdict)

    async def reschedule(self, keys: Iterable[str], delay_ms: int) -> None:
        """Reschedule relative to now. Until the answer is there, the messages may be due at either time."""
        ids, due_ms = list(keys), self.clock.wall + delay_ms
        for key in ids:
            if key in self.observed.sent:
                self.observed.sent[key].maybe_due.add(max(due_ms, self.clock.wall))
        for verdict in await self.broker.reschedule(ids=ids, due_ms=due_ms):
            if not self.files.cut:
                self.observed.verdicts.setdefault(verdict.subject, []).append(verdict.verdict)
                if verdict.verdict == "rescheduled":
                    self.observed.sent[verdict.subject].move(verdict.due_ms)

    async def consume(self) -> None:
        """Read every queue once from the group's offsets on, and commit after the rows."""
        for topic in self.broker.topics().keys() - {SCHEDULE_TOPIC}:
            stored, kept = self.broker.offsets(GROUP, topic), self.broker.queues(topic)
            offsets = {queue: max(low, stored.get(queue, low)) for queue, (low, _) in kept.items()}
            while (rows := await self.broker.pull(topic, offsets, 100, 0)).num_rows:
                for row in as_rows(rows):
                    if not self.files.cut:
                        self.observed.see(row, self.clock.wall)
                    offsets[row.place.queue_id] = row.place.queue_offset + 1
            await self.broker.commit_offsets(GROUP, topic, offsets)

    async def save_offsets(self) -> None:
        """Save the groups' offsets, which a later start must not lose."""
        assert self.node is not None
        saved = {(GROUP, topic): self.broker.offsets(GROUP, topic) for topic in self.broker.topics()}
        await self.node.maintenance.save_offsets()
        if not self.files.cut:
            self.observed.saved_offsets.update(saved)

    async def create_topic(self, topic: str, queues: int) -> None:
        """Create a topic."""
        await self.broker.create_topic(topic, queues)
        if not self.files.cut:
            self.observed.topics[topic] = queues

    async def advance(self, ms: int) -> None:
        """Let time pass, and wait until all that is due is settled."""
        self.clock.advance(ms)
        self.broker.ticker.wake()
        await self.settled()

    async def settled(self) -> None:
        """Wait until all that is due is settled."""
        scheduler = self.broker.scheduling.scheduler
        await self.until(lambda: scheduler.settled_before_ms > self.clock.wall, "all that is due is settled")

    async def compact(self) -> None:
        """Move scheduled messages from the log to the table."""
        await self.broker.compact()

    async def merge(self) -> None:
        """Run the broker's own rewrite of many files."""
        await self.broker.mover.rewrite()

    async def checkpoint(self) -> None:
        """Write a checkpoint."""
        assert self.node is not None
        await self.node.maintenance.checkpoint()

    async def apply_retention(self) -> None:
        """Remove segments and files that are no longer needed."""
        assert self.node is not None
        await self.node.maintenance.apply_retention()

    async def bulk(self, topic: str, delays_ms: Sequence[int], epoch: int, job: str = "bulk") -> list[str]:
        """Attach scheduled messages in data files, which are not in the log. The attach acknowledges them."""
        sent = sorted(self._ask(topic, list(delays_ms), 20), key=lambda one: one.due_ms or 0)
        first_seq = await self.broker.reserve(len(sent))
        rows = table_rows(sent, first_seq, self.clock.wall)
        attachment = Attachment(
            job="bulk",
            job_id=job,
            epoch=epoch,
            files=self._write_files(rows),
            ranges=[(first_seq, len(sent))],
        )
        await self.broker.attach(attachment)
        self._answered(sent)
        return [one.key for one in sent]

    async def campaign(self, name: str, topic: str, delays_ms: Sequence[int]) -> list[str]:
        """Plan a campaign and attach its messages. Return their keys."""
        await self.broker.change_campaign(name, "plan", rows=len(delays_ms))
        keys = self.observed.campaigns[name] = await self.bulk(topic, delays_ms, 0, name)
        return keys

    async def pause(self, name: str) -> None:
        """Pause a campaign. After the answer none of its messages may become visible."""
        await self.broker.change_campaign(name, "pause")
        if not self.files.cut:
            self.observed.paused_ms[name] = self.clock.wall

    async def end_campaign(self, name: str) -> None:
        """Cancel all pending messages of a campaign."""
        self.observed.cancel_asked.update(self.observed.campaigns.get(name, []))
        await self.broker.change_campaign(name, "cancel")

    async def select(self, keys: Iterable[str], **fields: Any) -> None:
        """Cancel by a selection. `keys`: the messages that it covers."""
        covered = list(keys)
        self.observed.cancel_asked.update(covered)
        facts = SelectionFacts(seq=0, at_ms=0, **fields)
        self.selections.append(await self.broker.selections.select(facts, ANONYMOUS))
        if not self.files.cut:
            for key in covered:
                self.observed.verdicts.setdefault(key, []).append(SELECTED)

    async def undo(self, index: int, keys: Iterable[str]) -> None:
        """Undo a selection. `keys`: its messages that are not settled. Until the answer they are cancelled or not."""
        covered = list(keys)
        for key in covered:
            self.observed.verdicts[key].remove(SELECTED)
        await self.broker.selections.undo(self.selections[index], ANONYMOUS)
        if not self.files.cut:
            self.observed.cancel_asked.difference_update(covered)

    async def operate(self, keys: Iterable[str], **fields: Any) -> None:
        """Change messages by a selection. `keys`: the messages that it covers."""
        covered = [self.observed.sent[key] for key in keys]
        facts, now_ms = SelectionFacts(seq=0, at_ms=0, **fields), self.clock.wall
        overdue = list[Sent]()
        if facts.action in ("resume", "release"):
            overdue = await self._end_hold(covered, facts.action)
        for sent in covered:
            if facts.action == "shift":
                sent.maybe_due.add((sent.due_ms or 0) + facts.shift_ms)
                sent.former_ms.add(sent.due_ms or 0)
            elif facts.action == "move":
                sent.maybe_topics.add(facts.to_topic)
        self.selections.append(await self.broker.selections.select(facts, ANONYMOUS))
        if not self.files.cut:
            for sent in covered:
                if facts.action == "shift":
                    sent.move((sent.due_ms or 0) + facts.shift_ms)
                elif facts.action == "move":
                    sent.topic, sent.maybe_topics = facts.to_topic, set()
                elif facts.action == "pause":
                    self.observed.held_ms[sent.key] = now_ms
        await self.wake()
        if not self.files.cut:
            for sent in overdue:  # released now, and not before
                sent.due_ms, sent.is_at_least, sent.maybe_due = now_ms, False, set()

    async def _end_hold(self, covered: list[Sent], action: str) -> list[Sent]:
        """Return the messages that are due at once when their pause ends.

        A message that became visible during its pause is a fault, which the observer records.
        """
        visible = {row.key: row.store_ms for row in (await self.outcome()).rows}
        overdue = list[Sent]()
        for sent in covered:
            held_ms = self.observed.held_ms.pop(sent.key, None)
            if sent.key in visible:
                if held_ms is not None and visible[sent.key] > held_ms:
                    text = f"{sent.key} became visible at {visible[sent.key]}, paused at {held_ms}"
                    self.observed.early.append(Fault("early", text))
                continue
            due_ms = min({sent.due_ms or 0} | sent.maybe_due)
            if action == "release" or due_ms <= self.clock.wall:
                sent.due_ms, sent.is_at_least = min(due_ms, self.clock.wall), True
                overdue.append(sent)
        return overdue

    async def take_back(self, index: int, keys: Iterable[str]) -> None:
        """Undo a shift. `keys`: the messages that it covers."""
        name = self.selections[index]
        shift_ms = self.broker.selections.get(name, ANONYMOUS).shift_ms
        before_ms = {key: (self.observed.sent[key].due_ms or 0) - shift_ms for key in keys}
        for key, due_ms in before_ms.items():
            self.observed.sent[key].maybe_due.add(due_ms)
        await self.broker.selections.undo(name, ANONYMOUS)
        if not self.files.cut:
            for key, due_ms in before_ms.items():
                self.observed.sent[key].move(due_ms)
        await self.wake()

    async def wake(self) -> None:
        """Write the wake-ups of messages that selections have made due earlier."""
        await self.broker.wakers.wake()
        await self.settled()

    async def resume_all(self) -> None:
        """Continue after a restart: the broker completes cancels, and an operator resumes campaigns and messages."""
        if any(facts.action == "pause" for facts in self.broker.selections.all(ANONYMOUS).values()):
            await self.operate(list(self.observed.sent), where="TRUE", action="resume")
        await self.wake()
        for name in [campaign.campaign for campaign in self.broker.campaigns()]:
            campaign = self.broker.campaigns(name)[0]
            keys = self.observed.campaigns.get(campaign.campaign, [])
            visible = {row.key: row.store_ms for row in (await self.outcome()).rows if row.key in keys}
            paused_ms = self.observed.paused_ms.get(campaign.campaign)
            if paused_ms is not None:
                self.observed.early += [
                    Fault("early", f"{key} became visible at {store_ms}, paused at {paused_ms}")
                    for key, store_ms in visible.items()
                    if store_ms > paused_ms
                ]
            if campaign.state == "cancelled":
                # No command is needed: messages that are not visible by now must stay so.
                for key in keys if campaign.ranges else ():
                    if key not in visible:
                        self.observed.verdicts.setdefault(key, []).append("already_cancelled")
                await self.broker.campaign_changes.finish_cancels()
                assert self.broker.campaigns(campaign.campaign)[0].held_from_ms is None
            elif campaign.held_from_ms is not None:
                await self.resume(campaign.campaign, [key for key in keys if key not in visible])

    async def resume(self, name: str, keys: Iterable[str], *, shift: bool = False) -> int:
        """Resume a campaign. `keys`: its held messages, each due at its own or its new time until the answer."""
        paused_ms = self.broker.campaigns(name)[0].since_ms
        shift_ms = self.clock.wall - paused_ms if shift else 0
        held = [self.observed.sent[key] for key in keys]
        moved_ms = [max(sent.due_ms + shift_ms, self.clock.wall) for sent in held]
        for sent, due_ms in zip(held, moved_ms, strict=True):
            sent.maybe_due.add(due_ms)
        self.observed.paused_ms.pop(name, None)
        resumed = await self.broker.change_campaign(name, "resume", shift=shift)
        if not self.files.cut:
            for sent, due_ms in zip(held, moved_ms, strict=True):
                sent.move(due_ms)
        return int(resumed.count)

    async def rewrite(self, epoch: int) -> None:
        """Put a live file's rows into a new file in its place."""
        file: DataFile = self.broker.scheduling.hour_log.pending.all()[0]
        rows = file.rows_between((0, 0), (1 << 62, 0))
        attachment = Attachment(
            job="rewrite",
            job_id="rewriter",
            epoch=epoch,
            files=self._write_files(rows),
            removes=[file.entry.path],
        )
        await self.broker.attach(attachment)

    # -- the final state ---------------------------------------------------------------------------------------------

    async def outcome(self) -> Outcome:
        """Read all queues and the whole log."""
        broker, outcome = self.broker, Outcome()
        for topic in broker.topics():
            outcome.offsets[(GROUP, topic)] = broker.offsets(GROUP, topic)
            for queue, (low, high) in broker.queues(topic).items():
                outcome.ranges[(topic, queue)] = (low, high)
                rows_read = outcome.waited if topic == SCHEDULE_TOPIC else outcome.rows
                while low < high:
                    rows = as_rows(await broker.read_queue(topic, queue, low, 1_000))
                    rows_read += rows
                    low += max(1, len(rows))
        for rows in broker.read_log(broker.log.reader.first_seq, broker.log.reader.next_seq):
            kinds = rows.column("kind").to_numpy()
            has_due_time = np.asarray(rows.column("due_ms").is_valid())  # half messages have none
            is_scheduled = (kinds == Kind.SCHEDULED) & has_due_time
            outcome.scheduled_rows.update(rows.column("seq").to_numpy()[is_scheduled].tolist())
            is_settled = np.isin(kinds, [Kind.RELEASE, Kind.CANCEL]) & has_due_time
            outcome.settled += rows.column("source_seq").filter(pa.array(is_settled)).to_pylist()
        return outcome

    async def until(self, condition: Callable[[], object], description: str) -> None:
        """Wait for a condition that other threads bring about. Fails at once if the node has failed."""
        try:
            async with asyncio.timeout(BOUND_S):
                while not condition():
                    failure = self.failure
                    if failure is not None:
                        raise failure
                    await asyncio.sleep(0.000_5)
        except TimeoutError:
            raise AssertionError(f"did not happen in {BOUND_S} s: {description}") from None

    # -- inside -------------------------------------------------------------------------------------------------

    def _ask(self, topic: str, delays_ms: list[int | None], body_bytes: int) -> list[Sent]:
        """Return new messages to send, which the observer has from now on: they may be stored without an answer."""
        now_ms, sent = self.clock.wall, []
        for key, delay_ms in zip(self.fresh_keys(len(delays_ms)), delays_ms, strict=True):
            due_ms = None if delay_ms is None else now_ms + delay_ms
            body = (key * (body_bytes // len(key) + 1)).encode()[:body_bytes]
            sent.append(Sent(key, topic, body, due_ms))
            self.observed.sent[key] = sent[-1]
        return sent

    def _answered(self, sent: list[Sent]) -> None:
        """Record that these messages were acknowledged, unless the power was cut."""
        for one in sent:
            one.acked = not self.files.cut

    def _write_files(self, rows: pa.Table) -> list[FileEntry]:
        """Write rows as data files of the pending table, and return their entries for an attach."""
        entries = []
        for entry, data in layout.cut_files(layout.sort_rows(rows), self.clock.wall):
            name = f"{layout.FOLDER}/{entry.path}"
            self.files.make_dir(name.rpartition("/")[0])
            with contextlib.closing(self.files.create(name)) as file:
                file.write_at(0, data)
            entries.append(entry)
        return entries

    def _hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Record an exception that only the event loop has seen."""
        if not isinstance(context.get("exception"), PowerCut):
            self.unheard.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _retrieve(self, node: Node) -> None:
        """Read the exceptions of a stopped node, so that the event loop does not report them as never retrieved."""
        if node._failed is not None and node._failed.done():
            node._failed.exception()
        for task in node._ticker_tasks:
            if task.done() and not task.cancelled():
                task.exception()


def as_rows(batch: pa.RecordBatch) -> list[Row]:
    """Convert READ_SCHEMA rows to the checker's form."""
    names = [
        "topic",
        "queue_id",
        "queue_offset",
        "unique_key",
        "body",
        "due_ms",
        "store_ms",
        "seq",
        "source_seq",
    ]
    return [
        Row(Place(topic, queue, offset), key, body, due, stored, seq, source)
        for topic, queue, offset, key, body, due, stored, seq, source in zip(
            *(batch.column(name).to_pylist() for name in names), strict=True
        )
    ]


def table_rows(sent: list[Sent], first_seq: int, now_ms: int) -> pa.Table:
    """Return rows of the pending table for a bulk job, numbered in the given order."""
    count = len(sent)
    columns: dict[str, Any] = {
        "seq": range(first_seq, first_seq + count),
        "due_ms": [one.due_ms for one in sent],
        "topic": [one.topic for one in sent],
        "queue_id": [-1] * count,
        "unique_key": [one.key for one in sent],
        "body": [one.body for one in sent],
        "born_ms": [now_ms] * count,
        "born_host": ["bulk"] * count,
        "flag": [0] * count,
        "sys_flag": [0] * count,
        "reconsume_times": [0] * count,
        "accepted_ms": [now_ms] * count,
    }
    arrays = [pa.array(columns.get(field.name, [None] * count), field.type) for field in TABLE_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=TABLE_SCHEMA)
