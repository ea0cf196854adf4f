"""The job `compact` moves pending messages from the log's tail to sorted files of the pending table.

A task gets a range of the log, fetches its pending messages over Flight, sorts them and writes files, with the same
functions as the broker. Then one attach adds all files to the table and moves the watermark: the row of the log before
which the table has all pending messages. It moves the watermark even if the range has no pending messages. No shuffle
is needed, because each file is sorted and the broker merges files when it reads.

The watermark is the mark of this job. An attach names the range of rows that it covers. The broker refuses an attach
that does not begin at the watermark, because another compactor has then attached in the meantime. It recognizes a
repeated attach.

Without this job, the broker compacts by itself. A lease, renewed while the loop runs, prevents the broker from
compacting at the same time. If both compact nevertheless, the watermark decides which attach is accepted.

Only messages of the strategy `hour_log` are compacted. Messages of a `timer_wheel` or a `level_cascade` stay in the log
until they are released, so this job has nothing to do.

Each group of a cluster has its own tail, table and watermark. So it has its own loop, whose endpoint is pinned to the
group.

Each compaction adds a table version and some files, and appends a row to the log. So an epoch starts only when there
are `min_rows_per_batch` new rows, or `few_rows` of them after `max_trigger_delay_ms`. The broker has the same rule for
its own compactions, with `compact_rows`, `compact_early_rows` and `compact_interval_ms` of its settings, and `timeball
up` passes these numbers to the job. The defaults are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from timeball.model.config import Settings
from timeball.model.message import TABLE_SCHEMA, Kind
from timeball.spark.endpoint import COMPACTED_STRATEGY, Endpoint, Lease
from timeball.spark.jobs.marked import Engine, MarkedJob, Piece
from timeball.spark.source.options import split_range
from timeball.spark.table_store import Store, chunks
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.layout import sort_rows

LOG = logging.getLogger("timeball.spark")

NAME = "compact"
JOB_ID = "spark-compact"
LEASE_MS = 30_000
RENEW_EVERY_S = 8.0
TRIGGER_S = 1.0
# Numbers of rows of the log. A task processes a million, so that files are few and large. An epoch has several tasks
# only if the job lags.
_DEFAULTS = Settings()
OPTIONS = {
    "rows_per_partition": "1000000",
    "max_rows_per_batch": "4000000",
    "min_rows_per_batch": str(_DEFAULTS.compact_rows),
    "max_trigger_delay_ms": str(_DEFAULTS.compact_interval_ms),
    "few_rows": str(_DEFAULTS.compact_early_rows),
}


def select_pending(batch: pa.RecordBatch, settled_before_ms: int) -> pa.RecordBatch:
    """Select the messages of a batch of the log that may still be pending, in TABLE_SCHEMA.

    `batch`: SCHEDULED and MOVED rows, in READ_SCHEMA. A MOVED row that keeps the due time is left out, because the row
    that set the due time has the message. `settled_before_ms`: all messages due earlier are settled (released or
    cancelled).
    """
    sets_due_time = pc.or_(
        pc.equal(batch.column("kind"), int(Kind.SCHEDULED)), batch.column("from_due_ms").is_valid()
    )
    is_pending = pc.and_(pc.greater_equal(batch.column("due_ms"), settled_before_ms), sets_due_time)
    # A filter would copy the rows, and in most batches all rows are pending. `is_pending` is null for a half message,
    # which has no due time. The filter leaves it out.
    rows = batch if not is_pending.null_count and pc.all(is_pending).as_py() else batch.filter(is_pending)
    is_moved, null = pc.equal(rows.column("kind"), int(Kind.MOVED)), pa.scalar(None, pa.int64())
    computed = {
        "accepted_ms": pc.if_else(is_moved, rows.column("accepted_ms"), rows.column("store_ms")),
        "number": pc.if_else(is_moved, rows.column("source_seq"), null),
    }
    columns = [computed[name] if name in computed else rows.column(name) for name in TABLE_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)


def compact_piece(endpoint: str, table_uri: str, piece: Piece) -> list[FileEntry]:
    """Write the pending messages of one piece of the log to sorted files. On failure, deletes the files.

    This is the job's task. Returns the files' entries for the attach.
    """
    written: list[FileEntry] = []
    store = Store(table_uri)
    with Endpoint(endpoint) as broker:
        # The status is read before the rows. Messages that are settled by then may be left out. Messages that are
        # settled later are written too, which does no harm.
        status = broker.status()
        batches = (
            select_pending(batch, status.settled_before_ms)
            for batch in broker.read_log(*piece, [Kind.SCHEDULED, Kind.MOVED], placed=False)
        )
        try:
            for rows in chunks(batch for batch in batches if batch.num_rows):
                written.extend(store.put_rows(sort_rows(rows), status.now_ms))
        except BaseException:  # also for an interrupt, which would leave unused files
            store.remove(entry.path for entry in written)
            raise
    return written


def extend(engine: Engine, endpoint: str, uri: str, to_seq: int, piece_rows: int) -> int:
    """Move the watermark to `to_seq`, as marked.Extend requires. `uri`: of the pending table, for the tasks.

    If an attach is refused, its files stay and the broker deletes them later. They must not be deleted here: an attach
    whose answer was lost may have made them part of the table.
    """
    with Endpoint(endpoint) as broker:
        begin = broker.status().watermark
        if begin >= to_seq:
            return 0
        pieces = split_range(begin, to_seq, piece_rows)
        work = f"rows {begin:,} to {to_seq:,} of the log's tail into the pending table"
        entries_by_task = engine.run(NAME, work, partial(compact_piece, endpoint, uri), pieces)
        files = [entry for entries in entries_by_task for entry in entries]
        attached = broker.attach(
            Attachment(job="compact", job_id=JOB_ID, epoch=to_seq, files=files, from_seq=begin, to_seq=to_seq)
        )
    rows = sum(entry.rows for entry in files)
    LOG.info(
        "rows attached job=compact from_seq=%d to_seq=%d scheduled=%d files=%d version=%d",
        begin, to_seq, rows, len(files), attached.version,
    )  # fmt: skip
    return to_seq - begin


# The option `uri` of this job is the URI under which its tasks reach the pending table, if not the broker's.
JOB = MarkedJob(
    NAME,
    OPTIONS,
    extend,
    mark=lambda _, status, __: status.watermark,
    default_uri=lambda status: status.table.uri,
    is_shared=True,
    trigger_s=TRIGGER_S,
)


def no_work_reason(endpoint: str) -> str | None:
    """Explain why this broker has nothing to compact. Returns None if it has."""
    with Endpoint(endpoint) as broker:
        strategy = broker.status().strategy
    return None if strategy == COMPACTED_STRATEGY else nothing_to_compact(strategy)


def nothing_to_compact(strategy: str) -> str:
    """Format the message that a broker with this strategy has nothing to compact."""
    return f"nothing to compact: with the strategy {strategy} messages wait in the log"


def lease(endpoint: str, needed: Callable[[], bool]) -> Lease:
    """Make the lease of a compactor, held while `needed` returns True.

    It does not end early, so the broker does not begin to compact while a failed loop is restarted.
    """
    return Lease(endpoint, NAME, Endpoint.lease_compactor, needed, lease_ms=LEASE_MS, renew_s=RENEW_EVERY_S)
