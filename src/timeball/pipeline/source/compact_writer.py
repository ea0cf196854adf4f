"""The sink of the `compact` query: tasks write ranges of the log as sorted files, one attach moves the watermark.

The stream carries pointers, not bodies: each row is (from_seq, to_seq). The task fetches the promises of that range
over Flight, sorts them and writes files with the broker's own functions, so bodies never enter the JVM, which would
only turn columns into rows and back. The ranges tell the driver what the micro-batch covers, so one without promises
still moves the watermark. There is no shuffle: every file is sorted, and the broker merges files when it reads.

The watermark decides, not Spark's checkpoint. At commit, with W the broker's watermark:

    range ends at or below W      it is attached already (a repeated micro-batch, another compactor): dropped
    the ranges left fill [W, E)   attached, as (job "spark-compact", epoch E)
    anything else                 OutOfRange; the next attempt of the query plans the micro-batch again from W
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import WriterCommitMessage

from timeball.errors import OutOfRange
from timeball.message import TABLE_SCHEMA, Kind
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.source.options import WriteOptions
from timeball.pipeline.source.spark_api import DataSourceStreamArrowWriter
from timeball.pipeline.table_store import Store, chunks
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.layout import sort_rows

LOG = logging.getLogger("timeball.pipeline")

JOB_ID = "spark-compact"
ATTACH_TRIES = 3


@dataclass
class Piece:
    """One range of the log and the files that hold its promises."""

    from_seq: int
    to_seq: int
    files: list[FileEntry] = field(default_factory=list)


@dataclass
class Compacted(WriterCommitMessage):
    """The pieces one task wrote."""

    pieces: list[Piece] = field(default_factory=list)


def waiting(batch: pa.RecordBatch, settled_before_ms: int) -> pa.RecordBatch:
    """Return the promises of a batch of the log that may still be pending, in TABLE_SCHEMA."""
    is_version = pc.or_(
        pc.equal(batch.column("kind"), int(Kind.PROMISE)), batch.column("from_due_ms").is_valid()
    )
    wanted = pc.and_(pc.greater_equal(batch.column("due_ms"), settled_before_ms), is_version)
    # Mostly all of them: a filter that keeps everything copies everything. A half message has no instant.
    rows = batch if not wanted.null_count and pc.all(wanted).as_py() else batch.filter(wanted)
    moved, nothing = pc.equal(rows.column("kind"), int(Kind.MOVED)), pa.scalar(None, pa.int64())
    changed = {
        "accepted_ms": pc.if_else(moved, rows.column("accepted_ms"), rows.column("store_ms")),
        "number": pc.if_else(moved, rows.column("source_seq"), nothing),
    }
    columns = [changed[name] if name in changed else rows.column(name) for name in TABLE_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)


def write_piece(endpoint: Endpoint, store: Store, piece: Piece) -> Piece:
    """Fetch, sort and write the promises of one range. Fills `piece.files`; on failure they are removed again."""
    # Read before the rows: what was settled by then may be left out, what is settled later may stay.
    status = endpoint.status()
    batches = (
        waiting(batch, status.settled_before_ms)
        for batch in endpoint.read_log(piece.from_seq, piece.to_seq, [Kind.PROMISE, Kind.MOVED], placed=False)
    )
    try:
        for rows in chunks(batch for batch in batches if batch.num_rows):
            piece.files.extend(store.put_rows(sort_rows(rows), status.now_ms))
    except BaseException:  # an interrupt leaves orphans behind just as an error does
        store.remove(entry.path for entry in piece.files)
        raise
    return piece


def plan(pieces: Sequence[Piece], watermark: int) -> tuple[list[Piece], list[Piece]]:
    """Return (pieces to attach, pieces to drop) at this watermark; OutOfRange when they do not fit."""
    ordered = sorted(pieces, key=lambda piece: piece.from_seq)
    done = [piece for piece in ordered if piece.to_seq <= watermark]
    left = ordered[len(done) :]
    expected = watermark
    for piece in left:
        if piece.from_seq != expected:
            raise OutOfRange(
                f"the epoch holds rows from {piece.from_seq} but the broker's watermark calls for {expected}: "
                "another compactor was at work; the epoch is planned again"
            )
        expected = piece.to_seq
    return left, done


class CompactWriter(DataSourceStreamArrowWriter):
    """The sink of the stream compact. Takes the rows of `read=ranges`."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """See DataSourceStreamArrowWriter."""
        done = Compacted()
        with Endpoint(self.options.endpoint) as endpoint:
            store = Store(self.options.table_uri or endpoint.status().table.uri)
            for batch in iterator:
                for row in batch.to_pylist():  # a handful: one row is a million of the log
                    done.pieces.append(write_piece(endpoint, store, Piece(row["from_seq"], row["to_seq"])))
        return done

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Attach the epoch's files; a repeated epoch changes nothing."""
        pieces = [piece for message in messages if isinstance(message, Compacted) for piece in message.pieces]
        with Endpoint(self.options.endpoint) as endpoint:
            for attempt in range(1, ATTACH_TRIES + 1):
                try:
                    return self._attach(endpoint, pieces, batchId)
                except OutOfRange as error:
                    if attempt == ATTACH_TRIES:
                        self._remove(endpoint, pieces)
                        raise
                    LOG.warning(
                        "attach refused, looking again job=compact epoch=%d reason=%s", batchId, error
                    )

    def _attach(self, endpoint: Endpoint, pieces: list[Piece], batch_id: int) -> None:
        watermark = endpoint.status().watermark
        left, dropped = plan(pieces, watermark)
        if left:
            files = [entry for piece in left for entry in piece.files]
            end = left[-1].to_seq
            attached = endpoint.attach(
                Attachment(
                    job="compact",
                    job_id=JOB_ID,
                    epoch=end,
                    files=files,
                    from_seq=left[0].from_seq,
                    to_seq=end,
                )
            )
            LOG.info(
                "rows attached job=compact epoch=%d from_seq=%d to_seq=%d promises=%d files=%d version=%d",
                *(
                    batch_id,
                    left[0].from_seq,
                    end,
                    sum(entry.rows for entry in files),
                    len(files),
                    attached.version,
                ),
            )
        if dropped:
            LOG.warning(
                "epoch attached before, skipped job=compact epoch=%d watermark=%d", batch_id, watermark
            )
            # Not deleted: after a reply that was lost, the files of a repeated epoch may be the table's own.

    def _remove(self, endpoint: Endpoint, pieces: list[Piece]) -> None:
        store = Store(self.options.table_uri or endpoint.status().table.uri)
        store.remove(entry.path for piece in pieces for entry in piece.files)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Remove what was written, unless a commit was tried: its outcome may be unknown."""
        if all(message is not None for message in messages):
            return
        pieces = [piece for message in messages if isinstance(message, Compacted) for piece in message.pieces]
        with Endpoint(self.options.endpoint) as endpoint:
            self._remove(endpoint, pieces)
