"""Rows of the log as tuples, built by name: a value for each column of LOG_SCHEMA, in its order."""

from __future__ import annotations

from timeball.model.message import Kind, LogRow

_CANCEL = int(Kind.CANCEL)


def cancel_row(
    *,
    topic: str,
    source_seq: int,
    due_seq: int,
    due_ms: int | None,
    store_ms: int,
    keys: str | None = None,
    unique_key: str | None = None,
    properties: str | None = None,
    accepted_ms: int | None = None,
) -> LogRow:
    """Build the CANCEL row of a scheduled message or of a lease.

    `source_seq` is its own row. `due_seq` is the row that had set its due time: the same one if it was never moved.
    """
    # Not visible, so the row has no queue. `version_seq` is null where `source_seq` names the row already.
    version_seq = None if due_seq == source_seq else due_seq
    return (
        _CANCEL, topic, -1, None, None, keys, unique_key, None, properties, None, None, store_ms,
        None, None, None, None, due_ms, accepted_ms, source_seq, version_seq, None,
    )  # fmt: skip
