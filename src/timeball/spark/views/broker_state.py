"""State of the broker in the views: recurring schedules, and bulk operations with their effect on pending messages.

No row names the messages of a bulk operation (a *selection* in the code). So each reader evaluates its condition, and
this module does so with the broker's own code: a query and a look-up must have the same result. This module has the
only import of the broker in this package, and only of functions on columns (decision 0133).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.accepting.wake_ups import bases_in
from timeball.broker.registry.selections import (
    CONDITION_COLUMNS,
    FIRST_MS,
    LAST_MS,
    Described,
    Selected,
    SelectionFacts,
    Woken,
)
from timeball.model.answers import RecurringSchedule
from timeball.model.message import BASE, Int64Array, int64

BATCH_ROWS = 10_000

SCHEDULE_SCHEMA = pa.schema(
    [
        ("name", pa.string()), ("state", pa.string()), ("topic", pa.string()), ("rule", pa.string()),
        ("zone", pa.string()), ("next_due_ms", pa.int64()), ("runs", pa.int64()), ("last_due_ms", pa.int64()),
        ("last_ms", pa.int64()), ("error", pa.string()),
    ]
)  # fmt: skip
SELECTION_SCHEMA = pa.schema(
    [
        ("id", pa.string()), ("action", pa.string()), ("shift_ms", pa.int64()), ("to_topic", pa.string()),
        ("state", pa.string()), ("condition", pa.string()), ("topics", pa.list_(pa.string())),
        ("due_from_ms", pa.int64()), ("due_to_ms", pa.int64()), ("accepted_ms", pa.int64()),
        ("account", pa.string()), ("messages", pa.int64()), ("first_due_ms", pa.int64()),
        ("last_due_ms", pa.int64()), ("undone_ms", pa.int64()),
    ]
)  # fmt: skip


# ---- rows of the views ---------------------------------------------------------------------------------------


def schedule_rows(schedules: Iterable[RecurringSchedule]) -> Iterator[pa.RecordBatch]:
    """Build the rows of the view `schedules`, in SCHEDULE_SCHEMA."""
    remaining = iter(schedules)
    while part := list(islice(remaining, BATCH_ROWS)):
        yield pa.RecordBatch.from_pylist(list(map(msgspec.structs.asdict, part)), SCHEDULE_SCHEMA)


def selection_rows(selections: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Build the rows of the view `selections`, in SELECTION_SCHEMA. `selections`: from Endpoint.selections."""
    rows = [_selection_row(each["id"], each["state"], _facts(each["facts"])) for each in selections]
    return pa.RecordBatch.from_pylist(rows, SELECTION_SCHEMA)


def _selection_row(name: str, state: str, facts: SelectionFacts) -> dict[str, object]:
    """Build one row of SELECTION_SCHEMA. `name`: the id of the bulk operation."""
    has_due_times = facts.last_due_ms >= 0
    return {
        "id": name, "action": facts.action, "shift_ms": facts.shift_ms or None,
        "to_topic": facts.to_topic or None, "state": state, "condition": facts.where or None,
        "topics": facts.topics, "due_from_ms": None if facts.from_ms == FIRST_MS else facts.from_ms,
        "due_to_ms": None if facts.to_ms == LAST_MS else facts.to_ms, "accepted_ms": facts.at_ms,
        "account": facts.by or None, "messages": facts.count,
        "first_due_ms": facts.first_due_ms if has_due_times else None,
        "last_due_ms": facts.last_due_ms if has_due_times else None,
        "undone_ms": facts.undone_ms if facts.is_undone else None,
    }  # fmt: skip


def _facts(value: Mapping[str, Any]) -> SelectionFacts:
    return msgspec.convert(value, SelectionFacts)


# ---- the effect on pending messages --------------------------------------------------------------------------

# The arguments of the SQL function, and its result: null for a message that is not pending.
ARGUMENTS = ("version", "seq", "due_ms", "topic", *CONDITION_COLUMNS)
EFFECT = pa.struct([("due_ms", pa.int64()), ("topic", pa.string()), ("is_held", pa.bool_())])
EFFECT_SQL = {
    "duckdb": "STRUCT(due_ms BIGINT, topic VARCHAR, is_held BOOLEAN)",
    "spark": "struct<due_ms: bigint, topic: string, is_held: boolean>",
}


def effective_selections(
    selections: Sequence[Mapping[str, Any]], end_seq: int, settled_before_ms: int, *, is_now: bool
) -> bytes:
    """Encode the selections that may cover pending messages, as of the row `end_seq` of the log. Empty for none.

    `selections`: from Endpoint.selections. `settled_before_ms`: all messages due earlier are settled. `is_now`: the row
    is the end of the log now, not of an older version.
    """
    effective = {}
    for each in selections:
        facts = _facts(each["facts"])
        if not is_now:  # its messages may have been pending at that version
            facts = msgspec.structs.replace(facts, is_settled=False)
        if facts.seq >= end_seq or facts.is_over(settled_before_ms):
            continue
        if facts.undone_seq >= end_seq:  # undone after that version
            facts = msgspec.structs.replace(facts, undone_seq=0)
        effective[each["id"]] = facts
    return msgspec.json.encode(effective) if effective else b""


def reach_ms(encoded: bytes) -> int:
    """Compute by how many ms the due time of a pending message and that of its row may differ, at most.

    `encoded`: the result of `effective_selections`.
    """
    if not encoded:
        return 0
    facts = _decoded(encoded).values()
    # These operations give messages any due time, by wake-ups (rows that move a message). An operation that was undone
    # may have left wake-ups.
    if any(each.action in ("pause", "resume", "release") for each in facts):
        return LAST_MS
    return sum(abs(each.shift_ms) for each in facts)


def _decoded(encoded: bytes) -> dict[str, SelectionFacts]:
    return msgspec.json.decode(encoded, type=dict[str, SelectionFacts])


@lru_cache(8)
def _selected(encoded: bytes) -> Selected:
    return Selected(_decoded(encoded))


def effect_of(selections: bytes) -> Callable[..., pa.Array]:
    """Build the SQL function for the effect of selections: columns of ARGUMENTS to a column of EFFECT.

    `selections`: the result of `effective_selections`.
    """

    # Engines read the parameters and their types.
    def effect(
        version: pa.Array, seq: pa.Array, due_ms: pa.Array, topic: pa.Array, keys: pa.Array, tag: pa.Array,
        unique_key: pa.Array, properties: pa.Array,
    ) -> pa.Array:  # fmt: skip
        return _effect(selections, (version, seq, due_ms, topic, keys, tag, unique_key, properties))

    return effect


def _effect(encoded: bytes, arguments: Sequence[pa.Array | pa.ChunkedArray]) -> pa.Array:
    """Compute the column of EFFECT for some messages. `arguments`: the columns ARGUMENTS."""
    columns = dict(zip(ARGUMENTS, map(_combined, arguments), strict=True))
    due_ms, version, number = (int64(columns[name]) for name in ("due_ms", "version", "seq"))
    topic, selected = columns["topic"].cast(pa.string()), copy.copy(_selected(encoded))
    selected.woken = _woken(due_ms, version, number, columns["properties"])
    is_pending, is_held = np.ones(len(due_ms), np.bool_), np.zeros(len(due_ms), np.bool_)
    index = np.flatnonzero(selected.may_change(due_ms, version))
    if len(index):
        taken = pa.array(index)
        rows = pa.RecordBatch.from_pydict({name: columns[name].take(taken) for name in CONDITION_COLUMNS})
        described = Described(due_ms[index], version[index], number[index], topic.take(taken), rows)
        states = selected.states(described)
        is_pending[index], is_held[index] = states.owner < 0, states.holder >= 0
        due_ms = due_ms.copy()
        due_ms[index] = states.due_ms
        mover = np.full(len(due_ms), -1, np.int64)
        mover[index] = states.mover
        topic = selected.topics(topic, mover)
    return pa.StructArray.from_arrays(
        [pa.array(due_ms), topic, pa.array(is_held)], fields=list(EFFECT), mask=pa.array(~is_pending)
    )


def _woken(due_ms: Int64Array, version: Int64Array, number: Int64Array, properties: pa.Array) -> Woken:
    """Find the wake-ups among some rows. The properties of a wake-up have the due time and version that it replaced.

    All arrays have an entry for each row.
    """
    woken = Woken()
    properties = properties.cast(pa.string())
    if pc.any(pc.match_substring(properties, BASE)).as_py():
        index, base_ms, base = bases_in(properties)
        # A sender may have set the property, too.
        is_woken = (number[index] <= base) & (base < version[index])
        order = np.argsort(version[index])
        order = order[is_woken[order]]
        woken.add(version[index][order], base_ms[order], base[order], due_ms[index][order])
    return woken


def _combined(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
