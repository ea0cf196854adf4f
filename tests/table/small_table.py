"""Rows of the pending table, and files with row groups so small that searches have several to choose from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
import pytest

from timeball.io.files import Files
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.model.message import TABLE_SCHEMA
from timeball.table import layout
from timeball.table.attachment import Attachment, FileEntry

NOW_MS = 1_700_000_000_000  # 2023-11-14T22:13:20Z
GROUP_ROWS = 8


def table_rows(due_ms: Sequence[int], *, first_seq: int = 1, **columns: Sequence[Any]) -> pa.Table:
    """Make rows of TABLE_SCHEMA with these due times, numbered in this order from `first_seq` on.

    `columns`: values of other columns. The others have the values of a compaction, or null.
    """
    count = len(due_ms)
    seq = range(first_seq, first_seq + count)
    values: dict[str, Any] = {
        "seq": seq,
        "due_ms": due_ms,
        "topic": ["orders"] * count,
        "queue_id": [-1] * count,
        "unique_key": [f"id{number}" for number in seq],
        "body": [b"body %d" % number for number in seq],
        "accepted_ms": [NOW_MS] * count,
        **columns,
    }
    arrays = [pa.array(values.get(field.name, [None] * count), field.type) for field in TABLE_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=TABLE_SCHEMA)


def write(files: Files, rows: pa.Table, now_ms: int = NOW_MS) -> list[FileEntry]:
    """Write rows to files of the table, as layout.cut_files divides them. Neither durable nor attached yet."""
    entries = []
    for entry, data in layout.cut_files(layout.sort_rows(rows), now_ms):
        name = f"{layout.FOLDER}/{entry.path}"
        files.make_dir(name.rpartition("/")[0])
        with closing(files.create(name)) as file:
            file.write_at(0, data)
        entries.append(entry)
    return entries


def attachment(files: list[FileEntry], **fields: Any) -> Attachment:
    """Make a rewrite, which may add and remove any files."""
    return Attachment(**{"job": "rewrite", "job_id": "job", "epoch": 1, "files": files, **fields})


@contextmanager
def small_groups() -> Iterator[None]:
    """Use row groups of `GROUP_ROWS` rows within the block, for tests of properties, which cannot use fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "ROW_GROUP_ROWS", GROUP_ROWS)
        yield


ONE_BUCKET = [NOW_MS + HOUR_MS, NOW_MS + HOUR_MS + 20 * 60_000]  # due times in the same hour
ALL_ZONES = [
    NOW_MS - DAY_MS,
    NOW_MS + 800 * DAY_MS,
]  # bounds of due times with hours, days and months as buckets
