"""Rows as tuples, built by name: sends with a value for each of SEND_NAMES, rows of the log for each of LOG_SCHEMA."""

from __future__ import annotations

from timeball.model.message import Kind, LogRow, SendRow

_MESSAGE, _SCHEDULED = int(Kind.MESSAGE), int(Kind.SCHEDULED)
_RELEASE, _CANCEL = int(Kind.RELEASE), int(Kind.CANCEL)


def send_row(
    *,
    topic: str,
    body: bytes,
    tag: str | None,
    keys: str | None,
    unique_key: str | None,
    properties: str | None,
    queue_id: int | None = None,
    born_ms: int | None = None,
    born_host: str | None = None,
    flag: int | None = None,
    sys_flag: int | None = None,
    reconsume_times: int | None = None,
    due_ms: int | None = None,
) -> SendRow:
    """Build the row of a message that a client sends. Admission fills in the values that are None."""
    return (
        topic, body, tag, keys, unique_key, properties, queue_id, born_ms, born_host, flag, sys_flag, reconsume_times,
        due_ms, None,
    )  # fmt: skip


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
    """Build the CANCEL row of a scheduled message.

    `source_seq` is its own row. `due_seq` is the row that had set its due time: the same one if it was never moved.
    """
    # Not visible, so the row has no queue. `version_seq` is null where `source_seq` names the row already.
    version_seq = None if due_seq == source_seq else due_seq
    return (
        _CANCEL, topic, -1, None, None, keys, unique_key, None, properties, None, None, store_ms,
        None, None, None, None, due_ms, accepted_ms, source_seq, version_seq, None,
    )  # fmt: skip


def message_row(
    *,
    topic: str,
    queue_id: int,
    queue_offset: int | None,
    tag: str | None,
    keys: str | None,
    unique_key: str | None,
    body: bytes | None,
    properties: str | None,
    born_ms: int | None,
    born_host: str | None,
    store_ms: int,
    store_host: str,
    flag: int | None,
    sys_flag: int | None,
    reconsume_times: int | None,
) -> LogRow:
    """Build the MESSAGE row of a message that is visible at once, at an offset of its queue."""
    return (
        _MESSAGE, topic, queue_id, queue_offset, tag, keys, unique_key, body, properties, born_ms, born_host, store_ms,
        store_host, flag, sys_flag, reconsume_times, None, None, None, None, None,
    )  # fmt: skip


def scheduled_row(
    *,
    topic: str,
    queue_id: int,
    tag: str | None,
    keys: str | None,
    unique_key: str | None,
    body: bytes | None,
    properties: str | None,
    born_ms: int | None,
    born_host: str | None,
    store_ms: int,
    store_host: str,
    flag: int | None,
    sys_flag: int | None,
    reconsume_times: int | None,
    due_ms: int,
    source_seq: int | None = None,
) -> LogRow:
    """Build the SCHEDULED row of a message that is due at `due_ms`.

    It has no queue offset before its release. `source_seq` is the row that was handed out, if this row redelivers it.
    """
    return (
        _SCHEDULED, topic, queue_id, None, tag, keys, unique_key, body, properties, born_ms, born_host, store_ms,
        store_host, flag, sys_flag, reconsume_times, due_ms, None, source_seq, None, None,
    )  # fmt: skip


def release_row(
    *,
    topic: str,
    queue_id: int,
    queue_offset: int | None,
    tag: str | None,
    keys: str | None,
    unique_key: str | None,
    body: bytes | None,
    properties: str | None,
    born_ms: int | None,
    born_host: str | None,
    store_ms: int,
    store_host: str | None,
    flag: int | None,
    sys_flag: int | None,
    reconsume_times: int | None,
    due_ms: int,
    accepted_ms: int,
    source_seq: int,
    version_seq: int | None,
    from_due_ms: int | None,
) -> LogRow:
    """Build the RELEASE row that puts the scheduled message `source_seq` into its queue.

    `version_seq` is the row that had set its due time, or None if it was never moved.
    """
    return (
        _RELEASE, topic, queue_id, queue_offset, tag, keys, unique_key, body, properties, born_ms, born_host, store_ms,
        store_host, flag, sys_flag, reconsume_times, due_ms, accepted_ms, source_seq, version_seq, from_due_ms,
    )  # fmt: skip
