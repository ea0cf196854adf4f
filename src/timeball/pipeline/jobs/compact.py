"""`compact`: moves waiting promises from the log's tail to sorted files of the pending table.

A task gets a range, fetches its promises over Flight, sorts them and writes files with the broker's own functions; one
attach of all files moves the watermark. There is no shuffle: every file is sorted, and the broker merges files when it
reads. A range without promises still moves the watermark.

The watermark is this job's mark. An attach says from which row to which; the broker refuses one that does not begin at
the watermark, because another compactor was at work, and knows a repeated one.

Without this job the broker compacts by itself. A lease, renewed while the loop runs, keeps the broker from doing so at
the same time; if both do, the watermark decides.

Only promises of the strategy `hour_log` are compacted. Those of a `timer_wheel` or a `level_cascade` wait in the log,
and there is nothing to run.

Each group of a cluster has a tail, a table and a watermark of its own, so it has a loop of its own, whose endpoint is
confined to it.

Each compaction costs one table version and some files, and appends a row to the log. So an epoch waits for
`compact_rows` new rows, or for `compact_interval_ms` with at least `compact_rows_min`: the broker's own settings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from timeball.message import TABLE_SCHEMA, Kind
from timeball.pipeline.endpoint import COMPACTED, Endpoint, Lease
from timeball.pipeline.jobs.engine import Engine, Piece
from timeball.pipeline.jobs.marked import MarkedJob
from timeball.pipeline.source.pacing import split_range
from timeball.pipeline.table_store import Store, chunks
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.layout import sort_rows

LOG = logging.getLogger("timeball.pipeline")

NAME = "compact"
JOB_ID = "spark-compact"
LEASE_MS = 30_000
RENEW_EVERY_S = 8.0
TRIGGER_S = 1.0
# Rows of the log. One task handles a million: fewer, larger files; more only when the job has fallen behind.
OPTIONS = {
    "rows_per_partition": "1000000",
    "max_rows_per_batch": "4000000",
    "min_rows_per_batch": "1000000",
    "max_trigger_delay_ms": "60000",
    "few_rows": "10000",
}


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


def write_piece(endpoint: str, table_uri: str, piece: Piece) -> list[FileEntry]:
    """Fetch, sort and write the promises of one range; on failure its files are removed again."""
    written: list[FileEntry] = []
    store = Store(table_uri)
    with Endpoint(endpoint) as broker:
        # Read before the rows: what was settled by then may be left out, what is settled later may stay.
        status = broker.status()
        batches = (
            waiting(batch, status.settled_before_ms)
            for batch in broker.read_log(*piece, [Kind.PROMISE, Kind.MOVED], placed=False)
        )
        try:
            for rows in chunks(batch for batch in batches if batch.num_rows):
                written.extend(store.put_rows(sort_rows(rows), status.now_ms))
        except BaseException:  # an interrupt leaves orphans behind just as an error does
            store.remove(entry.path for entry in written)
            raise
    return written


def extend(engine: Engine, endpoint: str, uri: str, to_seq: int, piece_rows: int) -> int:
    """Move the watermark to `to_seq`; return how many rows of the log that took.

    The files of an attach that was refused are left to the broker's sweep: of a repeated one they may be the table's.
    """
    with Endpoint(endpoint) as broker:
        begin = broker.status().watermark
        if begin >= to_seq:
            return 0
        pieces = split_range(begin, to_seq, piece_rows)
        work = f"rows {begin:,} to {to_seq:,} of the log's tail into the pending table"
        written = engine.run(NAME, work, partial(write_piece, endpoint, uri), pieces)
        files = [entry for each in written for entry in each]
        attached = broker.attach(
            Attachment(job="compact", job_id=JOB_ID, epoch=to_seq, files=files, from_seq=begin, to_seq=to_seq)
        )
    LOG.info(
        "rows attached job=compact from_seq=%d to_seq=%d promises=%d files=%d version=%d",
        *(begin, to_seq, sum(entry.rows for entry in files), len(files), attached.version),
    )
    return to_seq - begin


# `uri` of this job is where its tasks reach the pending table, if not where the broker says.
JOB = MarkedJob(
    NAME,
    OPTIONS,
    extend,
    mark=lambda _, status, __: status.watermark,
    place=lambda status: status.table.uri,
    is_shared=True,
    trigger_s=TRIGGER_S,
)


def superfluous(endpoint: str) -> str | None:
    """Return why there is nothing to compact for this broker; None when there is."""
    with Endpoint(endpoint) as broker:
        strategy = broker.status().strategy
    return None if strategy == COMPACTED else nothing_to_compact(strategy)


def nothing_to_compact(strategy: str) -> str:
    """Return the sentence for people."""
    return f"nothing to compact: with the strategy {strategy} messages wait in the log"


def lease(endpoint: str, needed: Callable[[], bool]) -> Lease:
    """Return the lease of a compactor. Not returned: a query that has failed is started again within it."""
    return Lease(endpoint, NAME, Endpoint.lease_compactor, needed, lease_ms=LEASE_MS, renew_s=RENEW_EVERY_S)
