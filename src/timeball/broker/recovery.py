"""Rebuild every cache from the log: from the checkpoint on, or from the last snapshot, or from the first row.

"The checkpoint" below is the one of these that a start begins with; a snapshot says the same, in the log.

    1. the checkpoint gives the state at sequence number C; the files of the queue index say where the messages
       before it stand, and where these are damaged or missing, the log does
    2. rows from C on are replayed: visible rows into the queue indexes, releases and cancels into the set of
       settled promises, TABLE rows into the state of attaches and reservations
    3. the data files that live are those of the checkpoint, changed by the attaches from C on; each must be
       there; the Delta table, which is a cache of this list, is brought up to it or made anew
    4. promises from the watermark W on that are not settled are what waits in the tail, each in the last of its
       rows; a strategy that has files of its own and finds them as the checkpoint says needs only those from C on
    5. a release or cancel record settles a promise wherever it waits, in a level's queue as anywhere else
    6. the tick goes on from the checkpoint's with every release record of an instant since
    7. a MOVED row to another instant settles the version it names, and is the newest one of its promise
    8. promises without an instant (half messages) of the checkpoint's list and from C on, named by no row from C on,
       are open
    9. how many promises wait, and which leases the log keeps: the checkpoint's, changed by the rows from C on

    settled(p)  =  p is named by a release or cancel record from C on, or by the checkpoint's list,
                   or p is covered by the checkpoint's mark: below settled_before_seq, due before
                   settled_before_ms, and not of a bulk attach that came later than the mark

Invariant: the same log gives the same state, however often a recovery was itself interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.components import Tables
from timeball.broker.queue_entries import BATCH_ROWS
from timeball.broker.registry.lease_counts import LeaseCounts
from timeball.broker.tables.attach import AttachState
from timeball.broker.transactions import Half, load
from timeball.errors import Corrupt
from timeball.log import checkpoint as cp
from timeball.log.checkpoint import last_snapshot
from timeball.log.reader import LogReader
from timeball.log.segment import Segments, segment_name
from timeball.message import NO_INSTANT_MS, SNAPSHOT_KEY, Int64Array, Kind, pairs_of
from timeball.schedule import locations
from timeball.schedule.holds import Holds
from timeball.schedule.locations import Waiting
from timeball.schedule.outcomes import ReleaseCursor, Settled
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry, live_files
from timeball.table.catalog import Catalog

_EMPTY = np.empty(0, np.int64)


@dataclass(slots=True)
class Replayed:
    """The facts in the rows behind the checkpoint."""

    snapshot_seq: int  # the last snapshot's, or the checkpoint's
    promises: list[Waiting] = field(
        default_factory=list
    )  # in log order; a promise may be there several times
    settled: list[tuple[Int64Array, Int64Array]] = field(default_factory=list)
    released: list[tuple[Int64Array, Int64Array]] = field(default_factory=list)  # of those settled
    attaches: list[tuple[int, Attachment]] = field(default_factory=list)  # (row, attach), in log order
    halves: list[Int64Array] = field(default_factory=list)  # numbers, ended ones included
    ended: list[Int64Array] = field(default_factory=list)  # halves that have been published or rolled back
    moved: list[tuple[int, int, int, int]] = field(default_factory=list)  # see schedule/moved.py
    leases: LeaseCounts = field(default_factory=LeaseCounts)
    waiting_rows: int = 0  # promises that came


@dataclass(frozen=True, slots=True)
class Recovered:
    """State for the schedule."""

    settled: Settled
    cursor: ReleaseCursor
    waiting: Waiting  # in the tail, each in the last of its rows
    files: list[FileEntry]  # that live now, by the log
    promises_since_watermark: int  # settled ones included: compaction looks at all
    waiting_rows: int  # promises for an instant that wait anywhere
    leases: LeaseCounts
    halves: list[Half]
    moved: list[tuple[int, int, int, int]]
    levels: dict[int, cp.LevelFacts]
    snapshot_seq: int
    resumes: bool  # whether the strategy may go on with the state it saved


def starting_point(checkpoint: cp.Checkpoint | None, segments: Segments) -> cp.Checkpoint:
    """Return what to begin with: the checkpoint when it fits the log, else the last snapshot, else nothing at all.

    Raises Corrupt when the log lacks rows that retention has not let go.
    """
    if checkpoint is not None and segments.first_seq <= checkpoint.facts.log_from_seq:
        return checkpoint
    # A checkpoint of a log that retention has shortened since knows less than its snapshot, so it is not used.
    known = last_snapshot(segments) or cp.Checkpoint(cp.Facts(seq=1), _EMPTY, _EMPTY)
    if segments.first_seq > known.facts.log_from_seq:
        raise Corrupt(
            f"{segment_name(segments.all[0].ordinal - 1)} is missing: the log begins with seq {segments.first_seq}, "
            f"but retention has let go nothing from seq {known.facts.log_from_seq} on; restore the file from a copy"
        )
    return known


def recover(
    known: cp.Checkpoint,
    reader: LogReader,
    tables: Tables,
    ledger: AttachState,
    catalog: Catalog,
    now_ms: int,
    *,
    resumes: bool = False,
) -> Recovered:
    """Fill `tables` and `ledger`, and return the promises that wait. Blocking.

    The pending table's Delta log is brought up to the commit log.

    `resumes`: the strategy finds promises before the checkpoint in files of its own.
    """
    facts = known.facts
    topics = tables.topics
    # META first: topics must be there before the queues of the checkpoint and the replayed messages name them.
    tables.meta.restore((key, bytes(value)) for key, value in facts.meta.items())
    topics.load(reader, facts.queues, facts.seq)
    ledger.watermark, ledger.attach_seq = facts.watermark, facts.attach_seq
    ledger.epochs, ledger.jobs = dict(facts.epochs), dict(facts.jobs)
    ledger.reserved = dict(facts.reserved)
    # What the checkpoint has settled; before the replay, which may end holds that it still knows.
    before = _Before.of(known, tables)
    replayed = _replay(reader, facts, tables, ledger)
    if reader.first_seq > 1:
        # Retention may have gone on after the checkpoint was saved, and what it let go must not be offered.
        topics.forget(reader.first_seq)
    files = live_files(msgspec.convert(facts.files or [], list[FileEntry]), replayed.attaches)
    # Before the Delta log is changed: a file that is missing must stop the start while all is as it was.
    catalog.check_data(files)
    catalog.bring_up(files, replayed.attaches, ledger.attach_seq, ledger.watermark, now_ms)
    # Another strategy ran meanwhile and ended without a checkpoint: the table has promises which that state holds, too.
    resumes = resumes and ledger.watermark == facts.watermark
    # The rest of the tail, between watermark and checkpoint, is read only when no files of the strategy hold it.
    earlier = [] if resumes else _promises(reader, ledger.watermark, facts.seq)
    # After the replay, which may have moved the watermark: rows below it are in the table.
    tail = locations.latest([*earlier, *replayed.promises], ledger.watermark)
    due_ms, seq = _unique(_concat([(known.settled_due, known.settled_seq), *replayed.settled]))
    # Those that were released come last. What the log has let go is told apart by the checkpoint alone.
    cut = len(known.settled_seq) - facts.settled_released
    is_released = np.isin(seq, np.concatenate([known.settled_seq[cut:], _concat(replayed.released)[1]]))
    order = np.argsort(is_released, kind="stable")
    settled = Settled(
        facts.settled_before_ms,
        due_ms[order],
        seq[order],
        released=int(np.count_nonzero(is_released)),
        # The mark speaks of rows below the checkpoint only; rows behind it are settled by name.
        before_seq=min(facts.seq, facts.settled_before_seq),
        late=(*facts.late, *(reserved for _, a in replayed.attaches for reserved in a.ranges)),
    )
    # By number alone: numbers are never used twice, so the instant need not be compared.
    waiting = ~np.isin(tail.seq, settled.seq)
    waiting &= (tail.due_ms >= settled.before_ms) | settled.may_wait(tail.seq)
    opened, ended = (np.concatenate([_EMPTY, *seqs]) for seqs in (replayed.halves, replayed.ended))
    halves = load(reader, facts.halves, opened, ended)
    cursor = ReleaseCursor(*facts.tick).after(_concat(replayed.released)[0])
    moved = [*facts.moved, *replayed.moved]
    return Recovered(
        settled,
        cursor,
        tail.part(waiting),
        files,
        len(tail),
        facts.waiting_rows + replayed.waiting_rows - before.count_new(replayed.settled),
        replayed.leases,
        halves,
        moved,
        facts.levels,
        replayed.snapshot_seq,
        resumes,
    )


@dataclass(frozen=True, slots=True)
class _Before:
    """The promises that a checkpoint counts as settled.

    A row behind it may settle one of them once more: a decision counts at once, and its row may be durable later.
    """

    settled: Settled
    holds: Holds

    @classmethod
    def of(cls, known: cp.Checkpoint, tables: Tables) -> _Before:
        facts, holds = known.facts, Holds()
        for name, campaign in tables.campaigns.all().items():
            if campaign.held_from_ms is not None:
                holds.add(name, campaign.ranges, campaign.held_from_ms)
        mark = Settled(
            facts.settled_before_ms, known.settled_due, known.settled_seq,
            before_seq=min(facts.seq, facts.settled_before_seq), late=tuple(facts.late),
        )  # fmt: skip
        return cls(mark, holds)

    def count_new(self, settled: list[tuple[Int64Array, Int64Array]]) -> int:
        """Return how many of these pairs it does not count as settled."""
        due_ms, seq = _concat(settled)
        if (is_half := due_ms == NO_INSTANT_MS).any():
            due_ms, seq = due_ms[~is_half], seq[~is_half]
        by_mark = (due_ms < self.settled.before_ms) & ~self.settled.may_wait(seq)
        by_mark &= ~self.holds.contains(due_ms, seq)
        return int(np.count_nonzero(~by_mark & ~np.isin(seq, self.settled.seq)))


def _replay(reader: LogReader, facts: cp.Facts, tables: Tables, ledger: AttachState) -> Replayed:
    replayed = Replayed(facts.snapshot_seq)
    replayed.leases.restore(facts.leases)
    for rows in reader.coalesced(facts.seq, reader.next_seq, None, BATCH_ROWS):
        kinds, seqs = rows.column("kind").to_numpy(), rows.column("seq").to_numpy()
        # Asked once a batch: most batches hold one or two kinds, and each branch below filters columns.
        present = set(np.unique(kinds).tolist())
        if Kind.META in present:  # a topic before the messages that follow it
            state = rows.filter(pa.array(kinds == Kind.META))
            tables.meta.restore(pairs_of(state))
            snapshots = state.column("seq").filter(pc.equal(state.column("unique_key"), SNAPSHOT_KEY))
            replayed.snapshot_seq = snapshots[-1].as_py() if len(snapshots) else replayed.snapshot_seq
        placed = np.asarray(rows.column("queue_offset").is_valid())
        if placed.any():
            tables.topics.replay(rows.filter(pa.array(placed)).drop_columns(["seq"]), seqs[placed])
        # Rows without one are half messages, and rows that end them.
        has_instant = np.asarray(rows.column("due_ms").is_valid())
        if present & locations.KINDS:
            replayed.promises.append(locations.waiting_in(locations.waiting_rows(rows)))
            replayed.halves.append(seqs[(kinds == Kind.PROMISE) & ~has_instant])
            if Kind.MOVED in present:
                _replay_moves(rows.filter(pa.array((kinds == Kind.MOVED) & has_instant)), replayed)
            # A move may be to a half's first instant. Others name what is no half; `load` asks for halves only.
            replayed.ended.append(_sources(rows, (kinds == Kind.MOVED) & has_instant))
        if present & {Kind.RELEASE, Kind.CANCEL}:
            settling = np.isin(kinds, [Kind.RELEASE, Kind.CANCEL])
            replayed.ended.append(_sources(rows, settling & ~has_instant))
            done = rows.filter(pa.array(settling & has_instant))
            due, seq = done.column("due_ms").to_numpy(), locations.versions(done)
            released = done.column("kind").to_numpy() == Kind.RELEASE
            replayed.settled.append((due, seq))
            replayed.released.append((due[released], seq[released]))
        if present & (locations.KINDS | {Kind.RELEASE, Kind.CANCEL}):
            replayed.leases.replay(rows)
            replayed.waiting_rows += int(np.count_nonzero((kinds == Kind.PROMISE) & has_instant))
        for at in np.flatnonzero(kinds == Kind.TABLE).tolist() if Kind.TABLE in present else ():
            _replay_change(int(seqs[at]), rows.slice(at, 1), ledger, replayed)
    return replayed


def _sources(rows: pa.RecordBatch, chosen: npt.NDArray[np.bool_]) -> Int64Array:
    """Return the numbers that these rows name."""
    named = rows.column("source_seq").filter(pa.array(chosen)).drop_null()
    return np.asarray(named.to_numpy(), dtype=np.int64)


def _replay_moves(rows: pa.RecordBatch, replayed: Replayed) -> None:
    """Apply the MOVED rows among which are some to another instant: each settles the version before it."""
    moves = rows.filter(rows.column("from_due_ms").is_valid())
    columns = (moves.column(name).to_pylist() for name in ("due_ms", "source_seq", "seq", "from_due_ms"))
    replayed.moved += zip(*columns, strict=True)
    from_due_ms = moves.column("from_due_ms").to_numpy()
    replayed.settled.append((from_due_ms, locations.versions(moves)))
    # A move ends one version and begins another; `count_new` knows that a half message had none to be ended.
    replayed.waiting_rows += moves.num_rows


def _replay_change(seq: int, row: pa.RecordBatch, ledger: AttachState, replayed: Replayed) -> None:
    change = att.decode_change(row.column("body")[0].as_py())
    if isinstance(change, att.Reservation):
        # The numbers begin behind the row itself (table_changes.reserve).
        ledger.reserve(seq + 1, change.rows)
    else:
        ledger.apply(change, seq, row.column("store_ms")[0].as_py())
        replayed.attaches.append((seq, change))
        if change.job == "bulk":
            replayed.waiting_rows += change.rows


def _promises(reader: LogReader, watermark: int, to_seq: int) -> list[Waiting]:
    """Promises between the watermark and the checkpoint."""
    # Retention may have moved on past the watermark: what it removed was settled.
    begin = max(watermark, reader.first_seq)
    batches = reader.coalesced(begin, to_seq, locations.KINDS, BATCH_ROWS)
    return [locations.waiting_in(locations.waiting_rows(rows)) for rows in batches]


def _concat(pairs: list[tuple[Int64Array, Int64Array]]) -> tuple[Int64Array, Int64Array]:
    if not pairs:
        return _EMPTY, _EMPTY
    return np.concatenate([due for due, _ in pairs]), np.concatenate([seq for _, seq in pairs])


def _unique(pair: tuple[Int64Array, Int64Array]) -> tuple[Int64Array, Int64Array]:
    # A promise may be settled twice in the log's words: by the checkpoint's list and by a row behind it.
    seq, at = np.unique(pair[1], return_index=True)
    return pair[0][at], seq
