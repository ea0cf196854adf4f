"""Reading and writing of the pending table's Delta log with delta-rs.

Imported only when the table is opened: importing it takes longer than reading most logs, and a start releases due
messages before it opens the table.
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
    "ANEW",
    "APP_ID",
    "DeltaError",
    "commit",
    "corrected_layout",
    "create_table",
    "is_disk_full",
    "open_table",
    "said",
]

APP_ID = "timeball"
ANEW = "anew"  # job id of the single commit of a recreated table
DELTA_SCHEMA = pa.schema([*TABLE_SCHEMA, pa.field(PARTITION_COLUMN, pa.string())])

_ORNAMENTS = re.compile(r"\x1b\[[0-9;]*m|↳")  # delta-rs prints causes as a coloured tree, one per line
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


def open_table(uri: str, options: dict[str, str] | None) -> DeltaTable | None:
    """Open the table. Returns None when there is none, and raises DeltaError when it cannot be read."""
    try:
        return DeltaTable(uri, storage_options=options)
    except TableNotFoundError:
        return None


def create_table(uri: str, options: dict[str, str] | None) -> DeltaTable:
    """Create an empty table."""
    return _created(uri, options, "ignore")


def _created(uri: str, options: dict[str, str] | None, mode: Literal["ignore", "overwrite"]) -> DeltaTable:
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


def corrected_layout(
    uri: str, options: dict[str, str] | None, table: DeltaTable, difference: str | None
) -> DeltaTable:
    """Recreate the table, without files, if its schema or rules have a `difference`. Returns the table to use."""
    if difference is None:
        return table
    return _created(uri, options, "overwrite")


def is_disk_full(error: BaseException) -> bool:
    """Check whether a failure of delta-rs, which reports causes as text, means a full disk."""
    number = getattr(error, "errno", None)
    return number in DISK_FULL or any(f"(os error {full})" in str(error) for full in DISK_FULL)


def commit(
    table: DeltaTable, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int
) -> None:
    """Write the commit of one attach, the TABLE row `attach_seq`."""
    # A stream that follows the table has already received the rows of a rewrite, but not those of a recreated table.
    changes = attachment.job != "rewrite" or bool(attachment.ranges) or attachment.job_id == ANEW
    actions: list[AddAction | RemoveAction] = [
        _add_action(entry, now_ms, data_change=changes) for entry in attachment.files
    ]
    actions += [
        RemoveAction(
            path=entry.path,
            data_change=changes,
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


def said(error: Exception) -> str:
    """Format a message of delta-rs in one line."""
    return " ".join(_ORNAMENTS.sub(" ", str(error)).split())


def _add_action(entry: FileEntry, now_ms: int, *, data_change: bool) -> AddAction:
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
