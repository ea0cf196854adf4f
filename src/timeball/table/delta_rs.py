"""The pending table as delta-rs reads and writes it.

Imported when the table is opened, and not before: it takes longer to import than most logs to read, and a start
releases due promises before it looks at the table.
"""

from __future__ import annotations

import json
import re

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from timeball.message import TABLE_SCHEMA
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.layout import PARTITION_COLUMN

__all__ = ["APP_ID", "DeltaError", "commit", "create_table", "open_table", "said"]

APP_ID = "timeball"
DELTA_SCHEMA = pa.schema([*TABLE_SCHEMA, pa.field(PARTITION_COLUMN, pa.string())])

_ORNAMENTS = re.compile(r"\x1b\[[0-9;]*m|↳")  # delta-rs draws its causes as a coloured tree, one a line
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


def open_table(uri: str, options: dict[str, str] | None) -> DeltaTable | None:
    """Return the table; None when there is none. Raises DeltaError when it cannot be read."""
    try:
        return DeltaTable(uri, storage_options=options)
    except TableNotFoundError:
        return None


def create_table(uri: str, options: dict[str, str] | None) -> DeltaTable:
    """Return a new, empty table."""
    return DeltaTable.create(
        uri,
        DELTA_SCHEMA,
        mode="ignore",
        partition_by=[PARTITION_COLUMN],
        name="pending",
        description="Promises that wait; one row each, sorted by due_ms within a file",
        post_commithook_properties=_NO_HOOKS,
        storage_options=options,
    )


def commit(
    table: DeltaTable, attachment: Attachment, attach_seq: int, removed: list[FileEntry], now_ms: int
) -> None:
    """Write the entry of one attach, the TABLE row `attach_seq`."""
    actions: list[AddAction | RemoveAction] = [_add_action(entry, now_ms) for entry in attachment.files]
    actions += [
        RemoveAction(
            path=entry.path,
            data_change=attachment.job != "rewrite" or bool(attachment.ranges),
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
    """Return what delta-rs says, in one line."""
    return " ".join(_ORNAMENTS.sub(" ", str(error)).split())


def _add_action(entry: FileEntry, now_ms: int) -> AddAction:
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
        data_change=True,
        stats=json.dumps(stats),
    )
