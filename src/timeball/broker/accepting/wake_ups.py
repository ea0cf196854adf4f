"""Wake-ups: MOVED rows that tell the schedule when to hand out a message whose state selections have changed.

A wake-up replaces the message's previous version, as a reschedule does, so the schedule needs no code for it. The
property BASE of the row names the *base*: the due time and the version that the sender has set, from which the state is
computed (registry/selections.py). The release removes the property.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.registry.selections import Woken
from timeball.model.message import (
    BASE,
    LOG_SCHEMA,
    PROPERTY_END,
    PROPERTY_NAME_END,
    Int64Array,
    Kind,
    int64,
    repeated,
)
from timeball.schedule.locations import with_column
from timeball.schedule.outcomes import Moved

# Patterns: one property BASE, a sequence of them at the start of a text, one after other properties, and its value.
_ENTRY = f"{BASE}{PROPERTY_NAME_END}[^{PROPERTY_END}]*"
_AT_THE_START = f"^(?:{_ENTRY}(?:{PROPERTY_END}|$))+"
_BEHIND_OTHERS = f"{PROPERTY_END}{_ENTRY}"
_VALUE = (
    f"(?:^|{PROPERTY_END}){BASE}{PROPERTY_NAME_END}(?P<due>-?[0-9]{{1,18}}):(?P<version>[0-9]{{1,18}})"
    f"(?:{PROPERTY_END}|$)"
)


@dataclass(frozen=True, slots=True)
class WakeUps:
    """The MOVED rows of some wake-ups, and the columns that `remember` adds to the caches, with a value per row."""

    rows: pa.RecordBatch  # LOG_SCHEMA
    number: Int64Array
    from_due_ms: Int64Array
    base_ms: Int64Array
    base_version: Int64Array

    def remember(self, first_seq: int, moved: Moved, woken: Woken) -> None:
        """Add the wake-ups to the caches, once the rows are durable. The first row has the number `first_seq`."""
        due_ms = int64(self.rows.column("due_ms"))
        version = np.arange(first_seq, first_seq + len(due_ms))
        woken.add(version, self.base_ms, self.base_version, due_ms)
        moved.add(
            zip(
                due_ms.tolist(),
                self.number.tolist(),
                version.tolist(),
                self.from_due_ms.tolist(),
                strict=True,
            )
        )


def build_wake_ups(
    scheduled_rows: pa.RecordBatch,
    due_ms: Int64Array,
    *,
    references: tuple[pa.Array, pa.Array],
    from_due_ms: Int64Array,
    woken: Woken,
    now_ms: int,
    host: str,
    encode: Callable[[pa.RecordBatch, int], pa.RecordBatch],
) -> WakeUps:
    """Build the rows that give these messages (READ_SCHEMA) the due times `due_ms` in place of `from_due_ms`.

    All columns have a value per message. `references` are the columns `source_seq` and `version_seq` that refer to the
    messages (`delivery.names`). `encode` converts the scheduled messages among rows to the form that the log stores
    (`Appender.encode_scheduled`).
    """
    base_ms, base_version = woken.bases(from_due_ms, int64(scheduled_rows.column("seq")))
    count, (number, version) = scheduled_rows.num_rows, references
    # SCHEDULED at first, because `encode` converts only rows of this kind.
    changed = {
        "kind": repeated(int(Kind.SCHEDULED), pa.int8(), count),
        "queue_offset": pa.nulls(count, pa.int64()),
        "properties": _with_base(scheduled_rows.column("properties"), base_ms, base_version),
        "store_ms": repeated(now_ms, pa.int64(), count),
        "store_host": repeated(host, pa.string(), count),
        "due_ms": pa.array(due_ms),
        "accepted_ms": pa.nulls(count, pa.int64()),
        "source_seq": pa.nulls(count, pa.int64()),
        "version_seq": pa.nulls(count, pa.int64()),
        "from_due_ms": pa.nulls(count, pa.int64()),
    }
    rows = encode(
        pa.RecordBatch.from_arrays(
            [changed.get(name, scheduled_rows.column(name)) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA
        ),
        now_ms,
    )
    for name, column in (
        ("kind", repeated(int(Kind.MOVED), pa.int8(), count)),
        ("accepted_ms", scheduled_rows.column("store_ms")),
        ("source_seq", number),
        ("version_seq", version),
        ("from_due_ms", pa.array(from_due_ms)),
    ):
        rows = with_column(rows, name, column)
    return WakeUps(rows, number.to_numpy(), from_due_ms, base_ms, base_version)


def without_base(scheduled_rows: pa.RecordBatch) -> pa.RecordBatch:
    """Remove the property BASE from rows. Rows without it are returned unchanged."""
    properties = scheduled_rows.column("properties")
    if not pc.any(pc.match_substring(properties, BASE)).as_py():
        return scheduled_rows
    return with_column(scheduled_rows, "properties", _without_base(properties))


def bases_in(properties: pa.Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Find the texts with a property BASE. Returns their indexes, and the due times (ms) and versions of the bases."""
    values = pc.extract_regex(properties, _VALUE)
    index = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    values = values.take(pa.array(index))
    due_ms, version = (values.field(name).cast(pa.int64()).to_numpy() for name in ("due", "version"))
    return index, due_ms, version


def _without_base(properties: pa.Array) -> pa.Array:
    """Remove the property BASE from each text, also if it occurs several times."""
    properties = pc.replace_substring_regex(properties, _AT_THE_START, "")
    return pc.replace_substring_regex(properties, _BEHIND_OTHERS, "")


def _with_base(properties: pa.Array, base_ms: Int64Array, base_version: Int64Array) -> pa.Array:
    """Set the property BASE of each text to "due time:version"."""
    texts = _without_base(properties).fill_null("")
    # Some clients send texts without a separator at the end.
    lacks_separator = pc.and_(pc.not_equal(texts, ""), pc.invert(pc.ends_with(texts, PROPERTY_END)))
    numbers = (pc.cast(pa.array(column), pa.string()) for column in (base_ms, base_version))
    entry = pc.binary_join_element_wise(*numbers, ":")
    return pc.binary_join_element_wise(
        texts,
        pc.if_else(lacks_separator, PROPERTY_END, ""),
        BASE + PROPERTY_NAME_END,
        entry,
        PROPERTY_END,
        "",
    )
