"""META rows: state of the broker as a key (`unique_key`) and a value (`body`); the last row of a key counts.

An empty value deletes the key. Values under `secret/`, and a snapshot, stay inside the broker: what hands rows to the
outside passes them through `without_secrets`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from timeball.message import Kind, build_rows

SECRET_PREFIX = "secret/"
SNAPSHOT_KEY = "snapshot"  # all other values at once, the secret ones too (snapshot.py)


def meta_rows(pairs: list[tuple[str, bytes]], now_ms: int) -> pa.RecordBatch:
    """Return LOG_SCHEMA rows of these keys and values."""
    keys, values = ([pair[at] for pair in pairs] for at in (0, 1))
    return build_rows(len(pairs), kind=int(Kind.META), unique_key=keys, body=values, store_ms=now_ms)


def without_secrets(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with kind, key and body, null in the place of every value that must not leave the broker."""
    is_meta = rows.column("kind").to_numpy() == Kind.META
    if not is_meta.any():
        return rows
    keys = pc.fill_null(rows.column("unique_key"), "")
    is_secret = pc.or_(pc.starts_with(keys, SECRET_PREFIX), pc.equal(keys, SNAPSHOT_KEY))
    is_secret = pc.and_(pa.array(is_meta), is_secret)
    at = rows.schema.get_field_index("body")
    body = pc.if_else(is_secret, pa.scalar(None, pa.binary()), rows.column(at))
    return rows.set_column(at, rows.schema.field(at), body)


def pairs_of(rows: pa.RecordBatch) -> Iterator[tuple[str, bytes]]:
    """Yield the keys and values of META rows."""
    return zip(rows.column("unique_key").to_pylist(), rows.column("body").to_pylist(), strict=True)
