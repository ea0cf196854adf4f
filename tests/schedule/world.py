"""The broker around one strategy: a real log, real files, clocks that move when told, and a model that knows better.

`World` writes promises, releases, cancels and attaches to the log, takes what is due, restarts from checkpoints,
and compares every answer with `stage.Model`. Any difference is an AssertionError. It does in their order the
steps of the broker's verbs, and none of what the edges add to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from tests.crash_files import CrashFiles
from tests.schedule.stage import (
    BEGINNING,
    NOTHING_SETTLED,
    Model,
    Restart,
    Rig,
    Saved,
    StepExecutor,
    is_covered,
)
from tests.schedule.table_files import table_rows

from timeball.broker import compacting, rewriting
from timeball.clock import ManualClock, SchedulerClock
from timeball.files import Files
from timeball.log.format import with_seq
from timeball.log.reader import LogReader
from timeball.log.recovery import open_log
from timeball.log.writer import LogWriter
from timeball.message import Int64Array, Kind, build_rows
from timeball.schedule.strategy import Settled, Strategy
from timeball.table import attachment as att
from timeball.table import layout
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.data_file import DataFile

T = TypeVar("T")

TURNS_MAX = 100_000  # of the loop; a strategy that is not quiet after so many never will be
SEGMENT_BYTES = 256 * 1024
ALL = 1_000_000
IDLE_CALLS_MAX = 3  # calls in a row, at one instant, that hand out nothing: room may have to be made first


class World:
    """One strategy in its surroundings; see the module. All methods are called from outside the loop."""

    def __init__(self, rig: Rig, files: Files | None = None, *, reader_is_open: bool = True) -> None:
        self.rig = rig
        self.files: Files = CrashFiles() if files is None else files
        self.loop = asyncio.new_event_loop()
        self.manual = ManualClock()
        self.clock = SchedulerClock(self.manual)
        self.reader_thread = StepExecutor(is_open=reader_is_open)
        self.model = Model()
        self.checkpoints: list[Saved] = []
        self.attached: list[tuple[int, Attachment]] = []
        self.failures: list[BaseException] = []
        self.watermark = 1
        self._counter = 0
        # What a ticker would sleep until (None: until woken), and whether it has been woken since.
        self._asleep_until: int | None = None
        self._woken = True
        self.strategy: Strategy
        self.run(self._open(Restart()))

    # -- the broker's part: deciding, writing, telling the strategy ----------------------------------------

    def admit(self, dues: Sequence[int]) -> list[int]:
        """Promises with these instants become durable; returns their sequence numbers."""
        return self.run(self._admit(list(dues)))

    async def _admit(self, dues: list[int]) -> list[int]:
        bodies = [f"body {self._counter + i}".encode() for i in range(len(dues))]
        self._counter += len(dues)
        rows = build_rows(
            len(dues), kind=int(Kind.PROMISE), topic="t", queue_id=-1, body=bodies,
            unique_key=[body.decode() for body in bodies], store_ms=self.now_ms, due_ms=dues,
        )  # fmt: skip
        rows = self.rig.dress(rows)
        first_seq = self.writer.next_seq
        seqs = list(range(first_seq, first_seq + len(dues)))

        def on_durable() -> None:
            self.model.waiting.update({s: (d, b) for s, d, b in zip(seqs, dues, bodies, strict=True)})
            self.rig.kept(rows, first_seq)
            self.strategy.admit(with_seq(rows, first_seq))

        await self.writer.append(rows, on_durable=on_durable)[1]
        return seqs

    def take(self, limit: int = ALL) -> list[tuple[int, int]] | None:
        """One hand-out, checked: its (due_ms, seq); None when there is none."""
        return self.run(self._take(limit))

    async def _take(self, limit: int) -> list[tuple[int, int]] | None:
        now_ms = self.now_ms
        for _ in range(IDLE_CALLS_MAX):
            batch = self.strategy.due(now_ms, limit)
            if batch is not None:
                self._woken = True
                return self.model.hand_out(batch, now_ms, limit)
            until = self._asleep_until = self.strategy.next_due_ms()
            self._woken = False
            if until is None or until > now_ms or self.rig.is_busy(self.strategy):
                return None
        raise AssertionError(f"turns in place: nothing is due at {now_ms}, yet next is {until}")

    def release(self, batches: int = ALL) -> None:
        """The oldest hand-outs' release records become durable."""
        while self.model.in_flight and batches > 0:
            batches -= 1
            self.release_part(len(self.model.in_flight[0]))

    def release_part(self, rows: int) -> None:
        """A frame with the first `rows` rows of the oldest hand-out becomes durable."""
        if self.model.in_flight:
            self.run(self._release(list(self.model.in_flight[0])[:rows]))

    async def _release(self, seqs: list[int]) -> None:
        handed_out = self.model.in_flight[0]
        seq = _column(seqs)
        due = _column(handed_out[s][0] for s in seqs)
        await self._settle_rows(Kind.RELEASE, due, seq, lambda: self.strategy.released(due, seq))
        self.model.released.update((s, handed_out.pop(s)[0]) for s in seqs)
        if not handed_out:
            self.model.in_flight.popleft()

    def cancel(self, seqs: Sequence[int]) -> list[bool]:
        """Cancel these, each known to the log; the answer is checked against the model."""
        return self.run(self._cancel(list(seqs)))

    async def _cancel(self, seqs: list[int]) -> list[bool]:
        await self._pump(self.loop.create_task(self.rig.ready_to_cancel(self.strategy)))
        due = _column(self.model.due_of(seq) for seq in seqs)
        answers = self.strategy.cancel(due, _column(seqs)).tolist()
        chosen = self.model.cancel(seqs, answers)
        if chosen:
            await self._settle_rows(Kind.CANCEL, _column(map(self.model.due_of, chosen)), _column(chosen))
        return answers

    def was_cancelled(self, seqs: Sequence[int]) -> list[bool]:
        """What the strategy remembers."""
        due = _column(map(self.model.due_of, seqs))
        return [bool(answer) for answer in self.strategy.was_cancelled(due, _column(seqs))]

    async def _settle_rows(
        self, kind: Kind, due: Int64Array, seq: Int64Array, on_durable: Callable[[], None] = lambda: None
    ) -> None:
        rows = build_rows(
            len(seq), kind=int(kind), topic="t", queue_id=0, store_ms=self.now_ms, due_ms=due, source_seq=seq
        )
        await self.writer.append(rows, on_durable=on_durable)[1]

    # -- moving what waits ---------------------------------------------------------------------------------

    def prepare_compact(self, share: float = 1.0) -> Attachment | None:
        """Write the files for the first `share` of the tail; nothing is attached yet."""
        high = self.reader.next_seq
        to_seq = self.watermark + round((high - self.watermark) * share)
        if to_seq <= self.watermark:
            return None
        attachment = compacting.compact(
            self.files, self.reader, from_seq=self.watermark, to_seq=to_seq,
            settled_before_ms=self.rig.settled_before_ms(self.strategy), now_ms=self.now_ms,
        )  # fmt: skip
        return self._synced(attachment)

    def prepare_rewrite(self) -> Attachment | None:
        """Write the live files anew, without what is settled; nothing is attached yet."""
        chosen = self.live_files()
        if not chosen:
            return None
        settled = self.rig.settled(self.strategy)
        attachment = rewriting.rewrite(
            self.files, [file.entry for file in chosen], settled.seq,
            settled_before_ms=self.rig.settled_before_ms(self.strategy), now_ms=self.now_ms, epoch=self.reader.next_seq,
        )  # fmt: skip
        return self._synced(attachment)

    def prepare_bulk(self, dues: Sequence[int]) -> Attachment:
        """Write the files of a bulk job; its promises wait from the attach on."""
        first_seq = self.run(self._reserve(len(dues)))
        ordered = np.sort(np.array(dues, dtype=np.int64))
        seqs = np.arange(first_seq, first_seq + len(dues), dtype=np.int64)
        rows = table_rows(ordered.tolist(), seqs.tolist(), self.now_ms)
        return self._synced(
            Attachment(
                job="bulk", job_id=f"bulk-{first_seq}", epoch=0, ranges=[(first_seq, len(dues))],
                files=compacting.write_files(self.files, rows, self.now_ms),
            )
        )  # fmt: skip

    async def _reserve(self, rows: int) -> int:
        row = build_rows(1, kind=int(Kind.RESERVE), body=str(rows).encode(), store_ms=self.now_ms)
        seq, durable = self.writer.append(row, span=1 + rows)
        await durable
        return seq + 1

    def _synced(self, attachment: Attachment) -> Attachment:
        for entry in attachment.files:
            self.files.sync_file(f"{layout.FOLDER}/{entry.path}")
            self.files.sync_dir(f"{layout.FOLDER}/{entry.path.rpartition('/')[0]}")
        return attachment

    def attach_now(self, attachment: Attachment | None) -> None:
        """As `attach`, of something that is there."""
        assert attachment is not None
        self.attach(attachment)

    def attach(self, attachment: Attachment) -> None:
        """The ATTACH row becomes durable and the strategy takes the files over."""
        self.run(self._attach(attachment))

    async def _attach(self, attachment: Attachment) -> None:
        bulk = {}
        for entry in attachment.files if attachment.job == "bulk" else ():
            rows = rows_of(self.files, entry)
            for seq, due, body in zip(*(rows[c].to_pylist() for c in ("seq", "due_ms", "body")), strict=True):
                bulk[seq] = (due, body)
        row = build_rows(1, kind=int(Kind.ATTACH), body=att.encode(attachment), store_ms=self.now_ms)
        seq, durable = self.writer.append(row)
        await durable
        self.attached.append((seq, attachment))
        self.model.waiting.update(bulk)
        if attachment.job == "compact":
            self.watermark = attachment.to_seq
        await self._pump(self.loop.create_task(self.rig.attach(self.strategy, attachment)))

    # -- time, and dying -----------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """The scheduler's instant."""
        return self.clock.now_ms()

    def advance(self, ms: int) -> None:
        """Real time passes."""
        self.manual.advance(ms)

    def save(self) -> Saved:
        """A checkpoint; what it says is checked."""
        settled = self.rig.settled(self.strategy)
        self.model.check_settled(settled)
        self.model.check_settled_before(self.rig.settled_before_ms(self.strategy))
        saved = Saved(self.reader.next_seq, settled, self.rig.state(self.strategy))
        self.checkpoints.append(saved)
        return saved

    def restart(self, *, back: int = 0, power_cut: int | None = None) -> None:
        """Start again from the checkpoint `back` before the last one, or from the log's beginning.

        Hand-outs whose release records were not durable wait again. `power_cut` is a seed for what the disk lost.
        """
        self.reader_thread.is_open, was_open = True, self.reader_thread.is_open
        self.settle()
        self.run(self.writer.close())
        if power_cut is not None:
            assert isinstance(self.files, CrashFiles)
            self.files = self.files.crash(power_cut)
        while self.model.in_flight:
            self.model.waiting.update(self.model.in_flight.popleft())
        self.checkpoints = self.checkpoints[: max(0, len(self.checkpoints) - back)]
        self.run(self._open(None))
        self.reader_thread.is_open = was_open

    async def _open(self, restart: Restart | None) -> None:
        opened = open_log(self.files, segment_bytes=SEGMENT_BYTES, now_ms=self.manual.wall_ms())
        self.reader = LogReader(opened.segments)
        self.writer = LogWriter(
            self.files, opened.segments, opened.file, self.manual, StepExecutor(),
            segment_bytes=SEGMENT_BYTES, on_failure=self.failures.append,
        )  # fmt: skip
        self.strategy = self.rig.start(self, self._read_back() if restart is None else restart)
        self._asleep_until, self._woken = None, True

    def _read_back(self) -> Restart:
        """What the broker's recovery would find (broker/recovery.py has tests of its own)."""
        saved = self.checkpoints[-1] if self.checkpoints else Saved(1, NOTHING_SETTLED)
        pairs = dict(zip(saved.settled.seq.tolist(), saved.settled.due_ms.tolist(), strict=True))
        promises: dict[int, int] = {}
        settled_since: list[int] = []
        for rows in self.reader.rows(1, self.reader.next_seq):
            for row in rows.select(["seq", "kind", "due_ms", "source_seq"]).to_pylist():
                if row["kind"] == self.rig.kind and row["seq"] >= self.watermark:
                    promises[row["seq"]] = row["due_ms"]
                elif row["kind"] in (Kind.RELEASE, Kind.CANCEL) and row["seq"] >= saved.seq:
                    pairs[row["source_seq"]] = row["due_ms"]
                    settled_since.append(row["source_seq"])
        live: dict[str, FileEntry] = {}
        for _, attachment in self.attached:
            live = {path: e for path, e in live.items() if path not in attachment.removes}
            live |= {entry.path: entry for entry in attachment.files}
        since = [a for seq, a in self.attached if seq >= saved.seq]
        settled = Settled(
            saved.settled.before_ms, _column(pairs.values()), _column(pairs),
            before_seq=min(saved.seq, saved.settled.before_seq),
            late=(*saved.settled.late, *(given for a in since for given in a.ranges)),
        )  # fmt: skip
        tail = {s: due for s, due in promises.items() if s not in pairs and not is_covered(settled, due, s)}
        return Restart(
            settled,
            _column(tail.values()),
            _column(tail),
            list(live.values()),
            saved.state,
            _column(settled_since),
        )

    # -- waiting for what runs behind the strategy's back --------------------------------------------------

    def wake(self) -> None:
        """`on_change`: the ticker is woken."""
        self._woken = True

    def settle(self) -> None:
        """Let the reader thread finish whatever it has been asked for."""
        self.run(self._pump(None))

    async def _pump(self, task: asyncio.Task[None] | None) -> None:
        """Run the reader thread until `task` is done, or without one until nothing is left to do."""
        for _ in range(TURNS_MAX):
            self.reader_thread.step()
            await asyncio.sleep(0)
            if task is not None and task.done():
                return task.result()
            if task is None and not len(self.reader_thread) and not self.rig.is_busy(self.strategy):
                assert not self.failures, self.failures
                return None
        raise AssertionError("the strategy never came to rest")

    def drain(self, limit: int = ALL) -> list[tuple[int, int]]:
        """All that is due now, as the ticker would take it; afterwards nothing due may be left."""
        taken: list[tuple[int, int]] = []
        for _ in range(TURNS_MAX):
            self.settle()
            pairs = self.take(limit)
            if pairs is not None:
                assert not taken or taken[-1] < pairs[0], f"{pairs[0]} handed out after {taken[-1]}"
                taken += pairs
            elif not self.rig.is_busy(self.strategy):
                break
        self.model.check_nothing_overdue(self.now_ms)
        return taken

    def check_sleep(self) -> None:
        """A ticker that has gone to sleep and was not woken wakes in time for the first promise."""
        first = self.model.first_due_ms
        if first is None or self.rig.is_busy(self.strategy):
            return
        now_ms = self.now_ms
        upcoming = self.strategy.next_due_ms()
        assert upcoming is not None and upcoming <= max(first, now_ms), f"{upcoming} is after {first}"
        if not self._woken:
            until = self._asleep_until
            assert until is not None and until <= max(first, now_ms), f"asleep until {until}, missing {first}"

    # -- small things --------------------------------------------------------------------------------------

    def turn(self) -> None:
        """What is ready on the loop runs; nothing is waited for."""
        self.run(asyncio.sleep(0))

    def live_files(self) -> list[DataFile]:
        """The files of the table."""
        return self.rig.live_files(self.strategy)

    def memory(self) -> int:
        """Promises that cost memory now."""
        return self.rig.rows_in_memory(self.strategy)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The outcome of a coroutine on the world's loop."""
        return self.loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Let go of everything."""
        self.reader_thread.is_open = True
        self.settle()
        self.run(self.writer.close())
        self.loop.close()


def rows_of(files: Files, entry: FileEntry) -> pa.Table:
    """All rows of a data file."""
    return DataFile(files, entry).rows_between((BEGINNING, 0), (1 << 62, 0))


def _column(values: Iterable[int]) -> Int64Array:
    return np.array(list(values), dtype=np.int64)
