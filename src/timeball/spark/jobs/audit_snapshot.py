"""The snapshot of a balanced audit, from which the next audit continues: a small file beside the pending table.

It has the row of the log up to which the audit counted events, and its counts. For each group of message numbers
(views/audit_sql.py) it has the set of pending messages and the sum of the hashes of their due times. It also has the
rows that may still be stored although their messages were ended or moved. A million pending messages take about 200 KB.

    … Parquet (_SCHEMA, with the facts as JSON in the metadata of the schema) … | "TBBALAN1" | crc32c, uint32 |

A snapshot only saves time. If it is missing, damaged or of another log, the audit is a full one.
"""

from __future__ import annotations

import io
import logging
import struct
from dataclasses import dataclass

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from timeball.model import storage_uris
from timeball.model.errors import Corrupt, NotFound, StorageError, TimeballError
from timeball.model.message import Int64Array
from timeball.spark.table_store import sibling
from timeball.spark.views.audit_sql import ENDED_SCHEMA

LOG = logging.getLogger("timeball.spark")

NAME = "audit.balance"
VERSION = 1
_MAGIC = b"TBBALAN1"
_END = struct.Struct("<8sI")
_FACTS = b"timeball.audit"
# Rows of two kinds have these columns: rows of ENDED_SCHEMA, and groups (number, set of pending messages, due sum).
_ENDED_PART, _GROUPS_PART = 0, 1
_SCHEMA = pa.schema([("part", pa.int8()), *((name, pa.int64()) for name in ("key", "first", "second"))])


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a snapshot."""

    since: int
    end: int  # the events of the rows since <= seq < end of the log are counted
    end_ms: int | None  # the time of the last of these rows: in another log, this row has another time
    counts: dict[str, int]  # count of a report (audit.COUNTS) -> its value
    level_begin: int  # no older row of the log waits for a delay level
    queues: dict[str, dict[int, int]]  # topic -> queue -> the position after the last one
    version: int = VERSION


@dataclass(frozen=True)
class AuditSnapshot:
    """A snapshot. The three arrays have one entry for each group with pending messages, sorted by group."""

    facts: Facts
    groups: Int64Array  # the first number of each group
    open_bits: Int64Array  # the set of its pending messages, one bit each
    due_sums: Int64Array  # the sum of the hashes of their due times
    ended: pa.Table  # ENDED_SCHEMA: rows that may still be stored


def snapshot_uri(table_uri: str) -> str:
    """Build the URI of the snapshot of the group with this pending table."""
    return sibling(table_uri, "pipeline") + f"/{NAME}"


def read_snapshot(uri: str) -> AuditSnapshot:
    """Read a snapshot. Raises NotFound if there is none, Corrupt if it is damaged, and StorageError."""
    files, path = storage_uris.arrow(uri)
    try:
        with files.open_input_stream(path) as stream:
            data = stream.read()
    except FileNotFoundError as error:
        raise NotFound("there is no snapshot of a balanced audit") from error
    except OSError as error:
        raise StorageError(f"the snapshot of the last balanced audit cannot be read: {error}") from error
    body = data[: -_END.size]
    if len(data) <= _END.size or _END.unpack(data[-_END.size :]) != (_MAGIC, google_crc32c.value(body)):
        raise Corrupt("the snapshot of the last balanced audit is damaged")
    rows = pq.read_table(pa.BufferReader(body))
    try:
        facts = msgspec.json.decode(rows.schema.metadata[_FACTS], type=Facts)
    except (KeyError, TypeError, msgspec.MsgspecError) as error:
        raise Corrupt("the snapshot of the last balanced audit has another format") from error
    if facts.version != VERSION:
        raise Corrupt("the snapshot of the last balanced audit is of another version")
    columns = {name: rows.column(name).to_numpy() for name in _SCHEMA.names}
    parts = columns.pop("part")
    ended, groups = (
        [column[parts == part] for column in columns.values()] for part in (_ENDED_PART, _GROUPS_PART)
    )
    return AuditSnapshot(facts, groups[0], groups[1], groups[2], pa.table(ended, schema=ENDED_SCHEMA))


def write_snapshot(uri: str, snapshot: AuditSnapshot) -> None:
    """Replace the snapshot. A failure is only logged: then the next audit is a full one, or begins earlier."""
    counts = (snapshot.ended.num_rows, len(snapshot.groups))
    parts = np.repeat(np.array([_ENDED_PART, _GROUPS_PART], np.int8), counts)
    groups = (snapshot.groups, snapshot.open_bits, snapshot.due_sums)
    columns = [
        np.concatenate((ended.to_numpy(), group))
        for ended, group in zip(snapshot.ended.columns, groups, strict=True)
    ]
    schema = _SCHEMA.with_metadata({_FACTS: msgspec.json.encode(snapshot.facts)})
    sink = io.BytesIO()
    rows = pa.table([parts, *columns], schema=schema)
    pq.write_table(rows, sink, compression="zstd")
    body = sink.getvalue()
    try:
        _replace(uri, body + _END.pack(_MAGIC, google_crc32c.value(body)))
    except (pa.ArrowException, OSError, TimeballError) as error:
        LOG.warning("snapshot of the audit not written uri=%s reason=%s", uri, error)


def _replace(uri: str, data: bytes) -> None:
    """Write a file so that readers see either the old or the new one. Raises OSError."""
    files, path = storage_uris.arrow(uri)
    is_folder = not storage_uris.in_object_store(uri)
    if is_folder:
        files.create_dir(path.rpartition("/")[0], recursive=True)
    target = f"{path}.new" if is_folder else path  # an object appears only when it is complete
    with files.open_output_stream(target) as stream:
        stream.write(data)
    if is_folder:
        files.move(target, path)
