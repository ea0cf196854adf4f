"""Rows handed out as the promises that bring them back: what changes on the way, and nothing else.

    topic            the group's retry topic for this topic (POP's form), or its dead letters after the last attempt
    reconsume_times  one more, unless this handing out does not count
    properties       whose copy it is, of which topic, when it was first handed out; what once delayed it comes off
    due_ms           when the invisible time ends
    source_seq       the row handed out

By columns: a receive writes every message once more, and Python a row would be most of its cost. Only properties that
need more than something put behind them are taken apart.

Refuses nothing: the message has been accepted, and a consumer waits for it. Properties that would grow beyond what
RocketMQ's wire can carry get what still fits, in the order of what would be missed most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball import limits
from timeball.broker import retry
from timeball.broker.grouping import filled
from timeball.broker.popping.copies import FIRST_POP_TIME, ORIGIN_GROUP, POP_CK, retry_topic
from timeball.message import (
    PROPERTY_END,
    PROPERTY_NAME_END,
    Int64Array,
    Kind,
    build_rows,
    byte_lengths,
    decode_properties,
    encode_properties,
)

_SET_HERE = (ORIGIN_GROUP, retry.RETRY_TOPIC, FIRST_POP_TIME)  # the first would be missed most
_NAMES = "|".join(sorted([*retry.SPENT, *_SET_HERE, POP_CK]))
_TO_TAKE_APART = f"(^|{PROPERTY_END})({_NAMES}){PROPERTY_NAME_END}"
_KEPT = ("tag", "keys", "unique_key", "body", "born_ms", "born_host", "flag", "sys_flag")


def times_of(rows: pa.RecordBatch) -> Int64Array:
    """How often each of these READ_SCHEMA rows had been tried before."""
    return np.asarray(filled(rows.column("reconsume_times"), 0).to_numpy(), dtype=np.int64)


def times_after(rows: pa.RecordBatch) -> Int64Array:
    """How often each will have been tried in vain once its time is over."""
    return np.minimum(times_of(rows) + 1, retry.INT_MAX)


def topics_after(group: str, topic: str, times: Int64Array, times_max: int) -> list[str]:
    """Where each goes then: the retry topic, or the dead letters when that was its last attempt."""
    again, dead = retry_topic(group, topic), retry.dead_letter_topic(group)
    return [dead if late else again for late in (times > times_max).tolist()]


def parked(
    rows: pa.RecordBatch,
    *,
    kind: Kind = Kind.PROMISE,
    topics: Sequence[str],
    properties: pa.Array,
    times: Int64Array,
    due_ms: Int64Array | None,
    source_seq: pa.Array | None,
    now_ms: int,
    host: str,
) -> pa.RecordBatch:
    """LOG_SCHEMA rows of `kind` for READ_SCHEMA rows; `due_ms` and `source_seq` None: null."""
    return build_rows(
        rows.num_rows,
        kind=int(kind),
        topic=topics,
        queue_id=0,
        properties=properties,
        store_ms=now_ms,
        store_host=host,
        reconsume_times=times.astype(np.int32),
        due_ms=due_ms,
        source_seq=source_seq,
        **{name: rows.column(name) for name in _KEPT},
    )


def dressed(texts: pa.Array, group: str, topic: str, now_ms: int) -> pa.Array:
    """The properties of rows of `topic` that are handed to `group` now, as their copies are to have them."""
    adding = added(group, topic, now_ms)
    behind = encode_properties(adding)
    texts = filled(texts, "")
    needs_end = pc.and_(pc.not_equal(texts, ""), pc.invert(pc.ends_with(texts, PROPERTY_END)))
    ended = pc.if_else(needs_end, pc.binary_join_element_wise(texts, "", PROPERTY_END), texts)
    found = pc.binary_join_element_wise(ended, behind, "")
    slow = np.asarray(pc.match_substring_regex(texts, _TO_TAKE_APART))
    slow |= byte_lengths(found) > limits.PROPERTIES_BYTES_MAX
    if not slow.any():
        return found
    mask = pa.array(slow)
    apart = [dressed_text(text, adding) for text in texts.filter(mask).to_pylist()]
    return pc.replace_with_mask(found, mask, pa.array(apart, pa.string()))


def added(group: str, topic: str, now_ms: int) -> dict[str, str]:
    """What is said of a copy, unless it has been said before."""
    return {ORIGIN_GROUP: group, retry.RETRY_TOPIC: topic, FIRST_POP_TIME: str(now_ms)}


def dressed_text(text: str, adding: dict[str, str]) -> str:
    """One row's: the group is told anew, topic and first time stay when it has been handed out before."""
    kept = {n: v for n, v in decode_properties(text).items() if n not in retry.SPENT and n != POP_CK}
    found = {**kept, **{n: v for n, v in adding.items() if n == ORIGIN_GROUP or n not in kept}}
    for name in reversed(_SET_HERE):
        size_bytes = len(encode_properties(found).encode())
        if size_bytes > limits.PROPERTIES_BYTES_MAX and name not in kept:
            del found[name]
    return encode_properties(found)
