"""The snapshot of a balanced audit, from which the next audit continues: a small file beside the pending table.

It has the position in the log up to which the audit counted, its counts, and for each group of numbers
(views/audit_sql.py) the set of pending messages and the sum of the hashes of their due times. It also has the rows that
may still be stored although their messages were ended or moved. A million pending messages take about 200 KB.

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
# part 0: a row of ENDED_SCHEMA. part 1: a group, with the set of its pending messages and the sum of their due times.
_SCHEMA = pa.schema([("part", pa.int8()), *((name, pa.int64()) for name in ("key", "first", "second"))])


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a snapshot. `counts` begin with the row `since` of the log."""

    since: int
    end: int  # rows of the log before it are counted
    end_ms: int | None  # when the last of them was stored, by which another log is noticed
    counts: dict[str, int]
    level_begin: int  # no older row of the log waits for a delay level
    queues: dict[str, dict[int, int]]  # topic -> queue -> the position after the last one
    version: int = VERSION


@dataclass(frozen=True)
class Balanced:
    """A snapshot. The three arrays have one entry for each group with pending messages, sorted by group."""

    facts: Facts
    groups: Int64Array
    open_bits: Int64Array
    due_sums: Int64Array
    ended: pa.Table  # ENDED_SCHEMA


def snapshot_uri(table_uri: str) -> str:
    """Build the URI of the snapshot of the group with this pending table."""
    return sibling(table_uri, "pipeline") + f"/{NAME}"


def read_snapshot(uri: str) -> Balanced:
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
    ended, groups = ([column[parts == part] for column in columns.values()] for part in (0, 1))
    return Balanced(facts, groups[0], groups[1], groups[2], pa.table(ended, schema=ENDED_SCHEMA))


def write_snapshot(uri: str, balanced: Balanced) -> None:
    """Replace the snapshot. A failure is only logged: then the next audit is a full one, or begins earlier."""
    parts = (balanced.ended.num_rows, len(balanced.groups))
    groups = (balanced.groups, balanced.open_bits, balanced.due_sums)
    columns = [
        np.concatenate((ended.to_numpy(), group))
        for ended, group in zip(balanced.ended.columns, groups, strict=True)
    ]
    schema = _SCHEMA.with_metadata({_FACTS: msgspec.json.encode(balanced.facts)})
    sink = io.BytesIO()
    rows = pa.table([np.repeat(np.array([0, 1], np.int8), parts), *columns], schema=schema)
    pq.write_table(rows, sink, compression="zstd")
    body = sink.getvalue()
    try:
        _replace(uri, body + _END.pack(_MAGIC, google_crc32c.value(body)))
    except (pa.ArrowException, OSError, TimeballError) as error:
        LOG.warning("snapshot of the audit not written uri=%s reason=%s", uri, error)


def _replace(uri: str, data: bytes) -> None:
    """Write a file in one step, as far as the file system allows."""
    files, path = storage_uris.arrow(uri)
    is_folder = not storage_uris.in_object_store(uri)
    if is_folder:
        files.create_dir(path.rpartition("/")[0], recursive=True)
    target = f"{path}.new" if is_folder else path  # an object appears only when it is complete
    with files.open_output_stream(target) as stream:
        stream.write(data)
    if is_folder:
        files.move(target, path)
