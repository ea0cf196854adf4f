"""Pause and resume a campaign: move its waiting promises to a table of their own, and attach them again.

    pause n    1  record the event 'pausing' n
               2  copy what waits to the Delta table campaigns/_held/<id>/<n>: one commit, or none
               3  cancel the campaign's ranges, with the reason "pause <id> <n>" in each CANCEL row
               4  record 'paused' with the numbers that these CANCEL rows name: those are held
    resume n   5  record 'resuming' n, with the instant and the shift
               6  write the held rows as sorted files, and attach them as "<id>/resume-<n>"
               7  record 'resumed' n, with the new numbers; remove the copies

The broker's CANCEL row decides whether a promise is released or held, so it is exactly one of the two: a copied row
that was released between 2 and 3 has none, and is not held. A command that was cut at any point is completed by the
next one: a copy is committed once, a cancel may be repeated, and an attach is known by its job.

What became due during the pause is due at the instant of the resume, or everything is moved by the pause's length.
Arrow does the work in the calling process, a chunk of rows in memory at a time.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as fs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from timeball.errors import InvalidMessage, OutOfRange, StorageError
from timeball.message import TABLE_SCHEMA, Int64Array, Kind, int64
from timeball.pipeline.jobs import seq_ranges
from timeball.pipeline.jobs.campaign import (
    Campaign,
    Cancelled,
    all_ranges,
    held_ranges,
    must_be_attached,
    pause_reason,
    properties,
)
from timeball.pipeline.jobs.campaigns import Event, last
from timeball.pipeline.source import promise_columns
from timeball.pipeline.source.chunks import chunks
from timeball.pipeline.table_store import Store
from timeball.pipeline.views.snapshot import settled_status
from timeball.table.attachment import ANY_ROWS, Attachment, FileEntry, within

LOG = logging.getLogger("timeball.pipeline")

FOLDER = "_held"  # below the table of campaigns; Delta's own tools leave names with an underscore alone
COPIED = "timeball-held"

Tell = Callable[[str], None]


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """A pause: how many promises it holds. `repeated`: it was paused before."""

    campaign: str
    number: int
    held: int
    repeated: bool


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """A resume: how many promises wait again, moved by `shift_ms`. `repeated`: it was not paused, or is resumed."""

    campaign: str
    number: int
    rows: int
    shift_ms: int
    repeated: bool


def pause(campaign: Campaign, tell: Tell = LOG.info) -> Paused:
    """Hold everything that waits now; goes on with a pause that was cut short."""
    events = campaign.events()
    must_be_attached(events)
    newest = last(events, "pausing", "paused", "resuming", "resumed")
    if newest and newest.event == "paused":
        return Paused(campaign=campaign.id, number=newest.number, held=newest.rows, repeated=True)
    if newest and newest.event == "resuming":
        resume(campaign, tell=tell)
        return pause(campaign, tell)
    if newest is None or newest.event == "resumed":
        campaign.record("pausing", 1 if newest is None else newest.number + 1)
        events = campaign.events()
        newest = last(events, "pausing")
    assert newest is not None
    held = Held(campaign, newest.number)
    tell("copy")
    held.copy(events)
    tell("cancel")
    campaign.broker.cancel_ranges(all_ranges(events), pause_reason(campaign.id, newest.number))
    must_be_attached(campaign.events())  # cancelled meanwhile: then the copies have gone
    numbers = held.numbers(newest)
    campaign.record("paused", newest.number, rows=len(numbers), ranges=seq_ranges.as_ranges(numbers))
    if campaign.is_cancelled():
        held.remove()
    return Paused(campaign=campaign.id, number=newest.number, held=len(numbers), repeated=False)


def resume(campaign: Campaign, *, shift: bool = False, tell: Tell = LOG.info) -> Resumed:
    """Schedule everything that is held again; goes on with a resume that was cut short, as that was meant."""
    events = campaign.events()
    must_be_attached(events)
    newest = last(events, "pausing", "paused", "resuming", "resumed")
    if newest and newest.event == "pausing":
        pause(campaign, tell)
        return resume(campaign, shift=shift, tell=tell)
    if newest is None or newest.event == "resumed":
        rows, number = (newest.rows, newest.number) if newest else (0, 0)
        return Resumed(campaign=campaign.id, number=number, rows=rows, shift_ms=0, repeated=True)
    paused = last(events, "paused", number=newest.number)
    assert paused is not None
    if newest.event == "paused":
        shift_ms = max(0, campaign.broker.status().now_ms - paused.at_ms) if shift else 0
        campaign.record("resuming", paused.number, detail={"shift_ms": shift_ms})
        newest = last(campaign.events(), "resuming", number=paused.number)
    assert newest is not None
    tell("write")
    resumed = Held(campaign, paused.number).attach(paused, newest)
    return Resumed(
        campaign=campaign.id,
        number=paused.number,
        rows=resumed.rows,
        shift_ms=_shift_ms(newest),
        repeated=False,
    )


def cancel(campaign: Campaign) -> Cancelled:
    """End all that waits or is held (see Campaign.cancel); what was held will not be given back, so it is removed."""
    done = campaign.cancel()
    for event in campaign.table.of(campaign.id):
        if event.event == "pausing":
            Held(campaign, event.number).remove()
    return done


class Held:
    """The copies of one pause."""

    def __init__(self, campaign: Campaign, number: int) -> None:
        self.campaign = campaign
        self.number = number
        self.uri = f"{campaign.table.uri}/{FOLDER}/{campaign.id}/{number}"

    # ---- pause ----------------------------------------------------------------------------------------------

    def copy(self, events: list[Event]) -> None:
        """Copy all that waits, in one commit; nothing when it is there already."""
        try:
            table = DeltaTable.create(self.uri, TABLE_SCHEMA, mode="ignore", name=COPIED)
            if table.transaction_version(COPIED) is not None:
                return
            table.create_write_transaction(
                self._put(self._waiting(events)),
                "append",
                table.schema(),
                commit_properties=CommitProperties(app_transactions=[Transaction(COPIED, 1)]),
            )
        except CommitFailedError:
            self._open()  # another process has copied them too, and was first
        except (DeltaError, OSError) as error:
            raise StorageError(f"cannot write to {self.uri}: {error}") from error

    def _put(self, batches: Iterator[pa.RecordBatch]) -> list[AddAction | RemoveAction]:
        """Write batches to one file, which is no part of the table yet; none for no rows."""
        name, rows = f"{uuid.uuid4().hex}.parquet", 0
        files, root = fs.FileSystem.from_uri(self.uri)
        with pq.ParquetWriter(
            f"{root}/{name}", TABLE_SCHEMA, filesystem=files, compression="zstd", compression_level=1
        ) as file:
            for batch in batches:
                file.write_batch(batch)
                rows += batch.num_rows
        size_bytes = files.get_file_info(f"{root}/{name}").size or 0
        now_ms = self.campaign.broker.status().now_ms
        stats = json.dumps({"numRecords": rows})
        return [AddAction(name, size_bytes, {}, now_ms, True, stats)] if rows else []

    def _waiting(self, events: list[Event]) -> Iterator[pa.RecordBatch]:
        campaign = self.campaign
        status = settled_status(campaign.broker, campaign.table_uri)
        gone, held = campaign.settled(events, status).all, held_ranges(events)
        for batch in seq_ranges.table_rows(
            campaign.table_uri,
            status.table.version,
            all_ranges(events),
            TABLE_SCHEMA.names,
            status.settled_before_ms,
        ):
            seq = int64(batch.column("seq"))
            kept = ~(seq_ranges.is_in(seq, gone) | within(seq, held))
            yield (batch if kept.all() else batch.filter(pa.array(kept))).cast(TABLE_SCHEMA)

    def numbers(self, pausing: Event) -> Int64Array:
        """Return sorted numbers that the pause has cancelled; each of them must have been copied."""
        campaign, log = self.campaign, self.campaign.broker.status().log
        if pausing.log_seq < log.first_seq:
            raise OutOfRange(
                f"campaign {campaign.id}: the log has let go of what pause {self.number} has cancelled since; "
                f"its copies are at {self.uri}"
            )
        found: list[Int64Array] = []
        reason = properties(pause_reason(campaign.id, self.number))
        for batch in campaign.broker.read_log(
            pausing.log_seq, log.durable_seq, [Kind.CANCEL], columns=["source_seq", "properties"]
        ):
            ours = pc.fill_null(pc.equal(batch.column("properties"), reason), False)
            found.append(int64(batch.column("source_seq"))[ours.to_numpy(zero_copy_only=False)])
        numbers = seq_ranges.ordered(found)
        copied = seq_ranges.ordered([int64(batch.column("seq")) for batch in self._read(["seq"])])
        lacking = int(np.count_nonzero(~seq_ranges.is_in(numbers, copied)))
        if lacking:
            raise StorageError(
                f"campaign {campaign.id}: {lacking} promises were cancelled by pause {self.number} and are not among "
                f"the {len(copied)} copied to {self.uri}"
            )
        return numbers

    # ---- resume ---------------------------------------------------------------------------------------------

    def attach(self, paused: Event, resuming: Event) -> Event:
        """Attach the held rows as promises again, all or none; return the event 'resumed'."""
        campaign, broker = self.campaign, self.campaign.broker
        store = Store(campaign.table_uri)
        files: list[FileEntry] = []
        ranges: list[tuple[int, int]] = []
        try:
            for rows in chunks(self._held(paused)):
                rows = again(rows.combine_chunks(), resuming.at_ms, _shift_ms(resuming))
                first_seq = broker.reserve(rows.num_rows)
                files.extend(
                    store.put_rows(promise_columns.numbered(rows, first_seq), broker.status().now_ms)
                )
                ranges.append((first_seq, rows.num_rows))
        except BaseException:  # an interrupt leaves orphans behind just as an error does
            store.remove(entry.path for entry in files)
            raise
        if campaign.is_cancelled():
            store.remove(entry.path for entry in files)
            raise InvalidMessage(f"campaign {campaign.id} was cancelled")
        if not files:
            return campaign.record("resumed", self.number)
        job_id = campaign.job_id(resuming)
        broker.attach(
            Attachment(job="bulk", job_id=job_id, epoch=0, files=files, ranges=ranges, digest=ANY_ROWS)
        )
        resumed = campaign.record_attached(resuming, "resumed")
        assert resumed is not None  # it is the newest row of the log, or nearly so
        if campaign.is_cancelled():
            campaign.cancel_attached()
        self.remove()
        return resumed

    def _held(self, paused: Event) -> Iterator[pa.RecordBatch]:
        for batch in self._read(TABLE_SCHEMA.names):
            inside = within(int64(batch.column("seq")), paused.ranges)
            rows = batch if inside.all() else batch.filter(pa.array(inside))
            if rows.num_rows:
                yield rows.cast(TABLE_SCHEMA)

    # ---- the folder -----------------------------------------------------------------------------------------

    def _open(self) -> DeltaTable:
        table = DeltaTable(self.uri)
        if table.transaction_version(COPIED) is None:
            raise StorageError(f"{self.uri} has no copies of pause {self.number}")
        return table

    def _read(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        try:
            uris = self._open().file_uris()
        except (TableNotFoundError, DeltaError) as error:
            raise StorageError(f"cannot read {self.uri}: {error}") from error
        for uri in uris:
            files, path = fs.FileSystem.from_uri(uri)
            with files.open_input_file(path) as source:
                yield from pq.ParquetFile(source).iter_batches(65_536, columns=columns)

    def remove(self) -> None:
        """Remove the copies: bodies are not kept longer than needed. What cannot be removed is only waste."""
        try:
            files, path = fs.FileSystem.from_uri(self.uri)
            files.delete_dir(path)
        except FileNotFoundError:
            return
        except OSError as error:
            LOG.info("folder not removed uri=%s reason=%s", self.uri, error)


def again(rows: pa.Table, now_ms: int, shift_ms: int) -> pa.Table:
    """Return held rows as they are to wait again, sorted by due: later by `shift_ms`, and none before `now_ms`."""
    due_ms = np.maximum(int64(rows.column("due_ms").combine_chunks()) + shift_ms, now_ms)
    at = rows.schema.get_field_index("due_ms")
    moved = rows.set_column(at, TABLE_SCHEMA.field("due_ms"), pa.array(due_ms))
    return moved.take(pa.array(promise_columns.due_order(moved)))


def _shift_ms(resuming: Event) -> int:
    shift_ms = resuming.detail.get("shift_ms", 0)
    return shift_ms if isinstance(shift_ms, int) else 0
