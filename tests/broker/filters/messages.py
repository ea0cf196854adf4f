"""Rows as a pull finds them, made from plain properties and tags."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from timeball.broker.filters import SQL92, compile_filter, sql_conditions, sql_filter
from timeball.log.format import ENTRY, EntryArray
from timeball.model.message import Kind, build_rows, encode_properties

Message = dict[str, str]


def rows_of(messages: Sequence[Message | None], **columns: object) -> pa.RecordBatch:
    """Build a row for each message, given by its properties. None: a message without a text of properties."""
    texts = [None if message is None else encode_properties(message) for message in messages]
    return build_rows(len(messages), kind=int(Kind.MESSAGE), topic="t", body=b"", properties=texts, **columns)


def tagged(tags: Sequence[str | None]) -> pa.RecordBatch:
    """Build a row for each tag. None: a message without a tag."""
    return rows_of([None] * len(tags), tag=list(tags))


def entries_of(values: Sequence[int]) -> EntryArray:
    """Build entries of a queue index with these values as `tag`."""
    entries = np.zeros(len(values), ENTRY)
    entries["seq"], entries["tag"] = np.arange(len(values)), values
    return entries


def matches(text: str, rows: pa.RecordBatch) -> list[bool]:
    """Return for each row whether an SQL filter selects it. Check that the compiled evaluation gives the same rows."""
    mask = compile_filter(text, SQL92).exact(rows)
    assert mask.dtype == np.bool_
    assert mask.tolist() == sql_conditions.matches(*sql_filter.parse(text), rows).tolist()
    return mask.tolist()
