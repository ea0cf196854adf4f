"""Read and write the pending table's Delta log with delta-rs.

Import this module only where the table is opened. The import takes longer than reading most commit logs, and a broker
that starts releases due messages before it opens the table.
"""

from __future__ import annotations

import json
import re
from typing import Literal

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from timeball.io.files import DISK_FULL
from timeball.model.message import TABLE_SCHEMA
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.layout import PARTITION_COLUMN

__all__ = [
    "APP_ID",
    "RECREATED_JOB_ID",
    "DeltaError",
    "commit",
    "create_table",
    "is_disk_full",
    "one_line",
    "open_table",
    "replace_table",
]

APP_ID = "timeball"
RECREATED_JOB_ID = "anew"  # job id of the one commit that fills a recreated table
DELTA_SCHEMA = pa.schema([*TABLE_SCHEMA, pa.field(PARTITION_COLUMN, pa.string())])

_TREE_DRAWING = re.compile(r"\x1b\[[0-9;]*m|↳")  # delta-rs prints causes as a coloured tree, one per line
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


def open_table(uri: str, options: dict[str, str] | None) -> DeltaTable | None:
    """Open the newest version of the table, or return None if there is none. Raises DeltaError if it is unreadable."""
    try:
        return DeltaTable(uri, storage_options=options)
    except TableNotFoundError:
        return None


def create_table(uri: str, options: dict[str, str] | None) -> DeltaTable:
    """Create an empty table. An existing table stays as it is."""
    return _create(uri, options, "ignore")


def _create(uri: str, options: dict[str, str] | None, mode: Literal["ignore", "overwrite"]) -> DeltaTable:
    """Create an empty table. `mode`: keep (`ignore`) or replace (`overwrite`) an existing table."""
    return DeltaTable.create(
        uri,
        DELTA_SCHEMA,
        mode=mode,
        partition_by=[PARTITION_COLUMN],
        name="pending",
        description="Scheduled messages that wait; one row each, sorted by due_ms within a file",
        post_commithook_properties=_NO_HOOKS,
        storage_options=options,
    )


def replace_table(uri: str, options: dict[str, str] | None) -> DeltaTable:
    """Replace the table by an empty one, in a new version. Its older versions stay readable."""
    return _create(uri, options, "overwrite")


def is_disk_full(error: BaseException) -> bool:
    """Check whether an error of delta-rs means a full disk. delta-rs reports the cause only as text."""
    number = getattr(error, "errno", None)
    return number in DISK_FULL or any(f"(os error {code})" in str(error) for code in DISK_FULL)


def commit(
    table: DeltaTable, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int
) -> None:
    """Commit one attach: add its files, and remove `removed`, the entries of its `removes`. Raises DeltaError.

    `attach_seq`: the sequence number of its TABLE row, stored as the Delta application transaction. `now_ms`: the time
    at which the files were added and removed.
    """
    # Streams that follow the table skip commits without data change: they have already received the rows of a rewrite.
    # A rewrite with `ranges` has new rows, because it gives the messages of a resumed campaign other due times. A
    # recreated table is new to the streams.
    data_change = (
        attachment.job != "rewrite" or bool(attachment.ranges) or attachment.job_id == RECREATED_JOB_ID
    )
    actions: list[AddAction | RemoveAction] = [
        _add_action(entry, now_ms, data_change=data_change) for entry in attachment.files
    ]
    actions += [
        RemoveAction(
            path=entry.path,
            data_change=data_change,
            deletion_timestamp=now_ms,
            size=entry.size_bytes,
            partition_values={PARTITION_COLUMN: entry.bucket},
        )
        for entry in removed
    ]
    table.create_write_transaction(
        actions,
        "append",
        DELTA_SCHEMA,
        partition_by=[PARTITION_COLUMN],
        commit_properties=CommitProperties(
            custom_metadata={"watermark": str(attachment.to_seq), "job": attachment.job},
            app_transactions=[Transaction(APP_ID, attach_seq)],
        ),
        post_commithook_properties=_NO_HOOKS,
    )


def one_line(error: Exception) -> str:
    """Format an error of delta-rs, which spans several lines, as one line."""
    return " ".join(_TREE_DRAWING.sub(" ", str(error)).split())


def _add_action(entry: FileEntry, now_ms: int, *, data_change: bool) -> AddAction:
    """Build the entry of the Delta log that adds a file, with the statistics that readers need to skip files."""
    stats = {
        "numRecords": entry.rows,
        "minValues": {"due_ms": entry.min_due_ms, "seq": entry.min_seq},
        "maxValues": {"due_ms": entry.max_due_ms, "seq": entry.max_seq},
        "nullCount": {"due_ms": 0, "seq": 0},
    }
    return AddAction(
        path=entry.path,
        size=entry.size_bytes,
        partition_values={PARTITION_COLUMN: entry.bucket},
        modification_time=now_ms,
        data_change=data_change,
        stats=json.dumps(stats),
    )
