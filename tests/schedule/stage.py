"""The surroundings of a strategy under test: a reader thread that the test steps, a model, and `Rig`.

The reader thread is a queue of jobs (`StepExecutor`) that run when the test says so. So a test can choose each
interleaving of a gather with other steps, and none happens by chance.

Each strategy has a `Rig`. `Restart` contains the data from which a strategy starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from timeball.log.disk_thread import Disk
from timeball.model.message import Kind
from timeball.schedule.backlog import Backlog
from timeball.schedule.hour_log import HourLog
from timeball.schedule.locations import NOTHING, Waiting
from timeball.schedule.outcomes import NOTHING_SETTLED, Outcomes, Settled
from timeball.schedule.scheduler import Scheduler
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile

if TYPE_CHECKING:
    from tests.schedule.world import World

T = TypeVar("T")

BEGINNING = -(1 << 62)
NONE = np.empty(0, np.int64)


class StepExecutor(Disk):
    """An executor whose jobs wait until `step`, or run at once while it is `open`."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.is_open = is_open
        self._jobs: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See Executor."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            # As in a thread pool, the caller that waits for the result gets any error.
            except BaseException as error:
                future.set_exception(error)

        self._jobs.append(run)
        while self.is_open and self.step():
            pass
        return future

    def step(self) -> bool:
        """Run the oldest job. Returns false if there is none."""
        if not self._jobs:
            return False
        self._jobs.popleft()()
        return True


@dataclass(frozen=True)
class Restart:
    """The data from which a backlog starts. Each backlog uses the part that it needs.

    A backlog with a saved state uses `state` and `since`. Without a state, or with an unusable one, it uses `waiting`.
    If `state` is None, both are the same.
    """

    settled: Settled = NOTHING_SETTLED  # of the checkpoint and of the rows after it
    entries: list[FileEntry] = field(default_factory=list)  # files of the table
    state: object = None  # the backlog's own state in the checkpoint
    since: Waiting = NOTHING  # messages that arrived or were rewritten since the checkpoint
    waiting: Waiting = NOTHING  # all messages that are not in files of the table


@dataclass(frozen=True)
class Built:
    """A backlog and the arguments for its `restore`."""

    backlog: Backlog
    state: msgspec.Struct | None
    waiting: Waiting
    table: HourLog | None = None


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the settled messages when the log ended before `seq`."""

    seq: int
    settled: Settled
    state: object = None


class Rig(Protocol):
    """How the tests build a backlog, and how its scheduled messages are stored in the log."""

    name: str
    has_table: bool  # whether files can be attached
    has_files: bool  # whether it keeps files of its own
    kind: Kind  # of the rows of its scheduled messages
    ahead_ms: int
    gather_bytes: int
    scheduler: type[Scheduler]

    def build(self, world: World, restart: Restart, outcomes: Outcomes) -> Built:
        """Build a backlog with the files, reader and reader thread of `world`. Call it on the loop."""

    def encode(self, rows: pa.RecordBatch, backlog: Backlog) -> pa.RecordBatch:
        """Convert scheduled messages to rows of the log."""

    def keep(self, rows: pa.RecordBatch, first_seq: int) -> None:
        """Called when these rows are durable, before `Scheduler.add`."""

    def state(self, state: msgspec.Struct | None) -> object:
        """Convert the state of a backlog to the form that a checkpoint contains."""

    def rows_in_memory(self, backlog: Any) -> int:
        """Count the messages that take memory in the backlog."""

    def live_files(self, backlog: Any) -> list[DataFile]:
        """List the files of the table."""


@dataclass
class Model:
    """The expected state: seq -> (due_ms, body) of pending messages, and all comparisons with a strategy."""

    waiting: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    # Messages in `waiting` that are being rewritten, the oldest batch first.
    moving: deque[list[int]] = field(default_factory=deque)
    in_flight: deque[dict[int, tuple[int, bytes]]] = field(default_factory=deque)  # hand-outs, oldest first
    released: dict[int, int] = field(default_factory=dict)  # seq -> due_ms
    cancelled: dict[int, int] = field(default_factory=dict)  # seq -> due_ms
    # Messages in `cancelled` whose cancel is not acknowledged yet.
    cancelling: dict[int, tuple[int, bytes]] = field(default_factory=dict)

    accepted: dict[int, int] = field(default_factory=dict)  # seq -> store_ms, of all messages
    at: dict[int, int] = field(default_factory=dict)  # seq -> the current row, of messages in the log
    forgotten: set[int] = field(default_factory=set)
    moved_rows: int = 0

    @property
    def first_due_ms(self) -> int | None:
        return min((due for due, _ in self.waiting.values()), default=None)

    @property
    def wake_by_ms(self) -> int | None:
        """The latest time at which the ticker must wake. None if the first message is being rewritten."""
        moving_ms = [self.waiting[seq][0] for seq in self.being_rewritten if seq in self.waiting]
        first_ms = self.first_due_ms
        return None if first_ms is None or first_ms in moving_ms else first_ms

    @property
    def being_rewritten(self) -> set[int]:
        """The messages that are being rewritten."""
        return {seq for batch in self.moving for seq in batch}

    @property
    def known(self) -> list[int]:
        """The numbers of all messages that have existed, except forgotten ones."""
        handed_out = (seq for batch in self.in_flight for seq in batch)
        return sorted({*self.waiting, *self.released, *self.cancelled, *handed_out} - self.forgotten)

    def state_of(self, seq: int) -> str:
        if any(seq in batch for batch in self.in_flight):
            return "in flight"
        for name in ("waiting", "released", "cancelled"):
            if seq in getattr(self, name):
                return name
        return "unknown"

    def due_of(self, seq: int) -> int:
        for batch in (self.waiting, *self.in_flight):
            if seq in batch:
                return batch[seq][0]
        return (self.released | self.cancelled)[seq]

    def hand_out(self, batch: pa.RecordBatch, now_ms: int, limit: int) -> list[tuple[int, int]]:
        """Check a hand-out and apply it to the model. Returns its (due_ms, seq)."""
        assert 0 < batch.num_rows <= limit, f"{batch.num_rows} rows, asked for at most {limit}"
        pairs = list(zip(batch["due_ms"].to_pylist(), batch["seq"].to_pylist(), strict=True))
        assert pairs == sorted(set(pairs)), f"out of order or repeated: {pairs}"
        being_rewritten = self.being_rewritten
        for due_ms, seq in pairs:
            state = "being rewritten" if seq in being_rewritten else self.state_of(seq)
            assert state == "waiting", f"seq {seq} handed out while {state}"
            assert due_ms <= now_ms, f"seq {seq} handed out {due_ms - now_ms} ms early"
        self.check_unchanged(batch)
        self.in_flight.append({seq: self.waiting.pop(seq) for _, seq in pairs})
        return pairs

    def move(self, batch: pa.RecordBatch, limit: int) -> None:
        """Check the messages to rewrite. They are still pending."""
        assert 0 < batch.num_rows <= limit, f"{batch.num_rows} rows, asked for at most {limit}"
        seqs, being_rewritten = batch["seq"].to_pylist(), self.being_rewritten
        assert len(set(seqs)) == len(seqs), f"rewritten twice in one call: {seqs}"
        for seq in seqs:
            state = "being rewritten" if seq in being_rewritten else self.state_of(seq)
            assert state == "waiting", f"seq {seq} to be rewritten while {state}"
        self.check_unchanged(batch)
        self.moving.append(seqs)

    def mark_rewritten(self, row_seqs: list[int]) -> None:
        """Record that the oldest of the messages being rewritten are durable in these rows."""
        batch = self.moving[0]
        self.at.update(zip(batch, row_seqs, strict=False))
        del batch[: len(row_seqs)]
        self.moved_rows += len(row_seqs)
        if not batch:
            self.moving.popleft()

    def apply_retention(self, first_seq: int) -> None:
        """Record that the log begins at `first_seq` now. Messages settled before need not be known any more."""
        self.forgotten |= {seq for seq, at in self.at.items() if at < first_seq}

    def check_unchanged(self, batch: pa.RecordBatch) -> None:
        """Check that the pending scheduled messages are the admitted ones, with their due times."""
        columns = (batch[name].to_pylist() for name in ("seq", "due_ms", "body", "store_ms", "kind"))
        for seq, due_ms, body, accepted_ms, kind in zip(*columns, strict=True):
            assert self.waiting[seq] == (due_ms, body), f"seq {seq} has changed: {due_ms}, {body!r}"
            expected_ms = self.accepted[seq]
            assert accepted_ms == expected_ms, f"seq {seq} accepted at {expected_ms}, not {accepted_ms}"
            assert kind != Kind.MOVED, f"seq {seq} is a row of the log, not the message in it"

    def cancel(self, seqs: list[int], answers: list[bool]) -> list[int]:
        """Check the answers to a cancel and apply them to the model. Returns the cancelled messages."""
        states = {seq: self.state_of(seq) for seq in seqs}
        expected = [states[seq] == "waiting" for seq in seqs]
        assert answers == expected, f"cancel of {states} answered {answers}"
        chosen = [seq for seq, answer in zip(seqs, answers, strict=True) if answer]
        self.cancelling |= {seq: self.waiting.pop(seq) for seq in chosen}
        self.cancelled |= {seq: self.cancelling[seq][0] for seq in chosen}
        return chosen

    def check_settled(self, settled: Settled) -> None:
        """Check that `settled` names or covers exactly the durably settled messages."""
        pairs = set(zip(settled.due_ms.tolist(), settled.seq.tolist(), strict=True))
        done = {(due, seq) for index in (self.released, self.cancelled) for seq, due in index.items()}
        assert pairs <= done, f"said to be settled, but is not: {sorted(pairs - done)}"
        left_out = {pair for pair in done - pairs if not is_covered(settled, *pair)}
        left_out = {(due, seq) for due, seq in left_out if seq not in self.forgotten}
        assert not left_out, f"settled, but left out: {sorted(left_out)}"
        for batch in (self.waiting, *self.in_flight):
            for seq, (due, _) in batch.items():
                assert not is_covered(settled, due, seq), f"seq {seq} is not settled, yet covered by the mark"

    def check_settled_before(self, before_ms: int) -> None:
        """Check the figures of `status`: no message due before `before_ms` is open."""
        for batch in (self.waiting, *self.in_flight):
            for seq, (due, _) in batch.items():
                assert due >= before_ms, f"seq {seq} due {due} is open, yet all is settled before {before_ms}"

    def check_nothing_overdue(self, now_ms: int) -> None:
        """Check that no due message is left or being moved."""
        lost = sorted((due, seq) for seq, (due, _) in self.waiting.items() if due <= now_ms)
        assert not lost, f"due at {now_ms} and not handed out: {lost}"


def is_covered(settled: Settled, due_ms: int, seq: int) -> bool:
    """Check whether the mark, without a listed pair, makes this message settled."""
    is_late = any(first_seq <= seq < first_seq + rows for first_seq, rows in settled.late)
    return due_ms < settled.before_ms and seq < settled.before_seq and not is_late
