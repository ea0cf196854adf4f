"""The rows that bring a message back to its group. No I/O.

These columns change, besides the kind, the queue, and the time and host of the store:

    topic            the group's retry topic for this topic (POP's form), or its dead letters after the last attempt
    reconsume_times  one more, unless this attempt does not count
    properties       the copy's group, the message's topic, the time of its first delivery, and the time and reason when
                     a member gave it back; delays that are over are removed
    due_ms           of a scheduled message: the time of the next delivery
    source_seq       of a scheduled message: the row handed out

POP's retry topic contains the names of group and topic: `%RETRY%<group>_<topic>` (RocketMQ's first form, the default of
its brokers). Two pairs of names may make the same topic ("a_b" with "c", "a" with "b_c"; RocketMQ #9633), so every copy
names its group, and other groups do not get it.

Rows are built by columns, because thousands of leases may end at once. Properties are decoded only when appending text
to them is not enough.

Nothing is refused, because the message has been accepted. If the properties would exceed the limit of RocketMQ's
protocol, the least important ones are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.consuming import retry
from timeball.model import limits
from timeball.model.message import (
    NACK_REASON,
    NACK_TIME,
    ORIGIN_GROUP,
    PROPERTY_END,
    PROPERTY_NAME_END,
    RETRY_PREFIX,
    RETRY_TOPIC,
    Int64Array,
    build_rows,
    byte_lengths,
    decode_properties,
    encode_properties,
    filled,
)

FIRST_POP_TIME = "1ST_POP_TIME"
POP_CK = "POP_CK"

# How often members of the group have given the message back without an attempt.
NACKS_UNCOUNTED = "NACKS_UNCOUNTED"

# In the order of importance, the most important first.
_ADDED_NAMES = (ORIGIN_GROUP, RETRY_TOPIC, NACKS_UNCOUNTED, FIRST_POP_TIME, NACK_TIME, NACK_REASON)
_NAMES = "|".join(sorted([*retry.SPENT, *_ADDED_NAMES, POP_CK]))
_REBUILD_PATTERN = f"(^|{PROPERTY_END})({_NAMES}){PROPERTY_NAME_END}"
_UNCHANGED = ("tag", "keys", "unique_key", "body", "born_ms", "born_host", "flag", "sys_flag")


def pop_retry_topic(group: str, topic: str) -> str:
    """Name the topic in which a group gets unacknowledged messages of `topic` again. A retry topic is its own."""
    # A message that comes back again stays in its retry topic.
    return topic if topic.startswith(RETRY_PREFIX) else f"{RETRY_PREFIX}{group}_{topic}"


def is_for_group(group: str, properties: str | None) -> bool:
    """Check whether a row of a retry topic is for this group. A row that names no group is for all groups."""
    text = PROPERTY_END + (properties or "")
    # Compared as text, not decoded, because every row of a shared retry topic is checked for every group that reads it.
    mark = f"{PROPERTY_END}{ORIGIN_GROUP}{PROPERTY_NAME_END}"
    return mark not in text or f"{mark}{group}{PROPERTY_END}" in text + PROPERTY_END


def times_of(rows: pa.RecordBatch) -> Int64Array:
    """Read the number of attempts from each of these READ_SCHEMA rows."""
    return np.asarray(filled(rows.column("reconsume_times"), 0).to_numpy(), dtype=np.int64)


def build_copies(
    rows: pa.RecordBatch,
    *,
    kind: npt.NDArray[np.int8],
    topics: Sequence[str],
    properties: pa.Array,
    times: Int64Array,
    due_ms: pa.Array | None,
    source_seq: pa.Array | None,
    now_ms: int,
    host: str,
) -> pa.RecordBatch:
    """Build the copies (LOG_SCHEMA) of these rows (READ_SCHEMA). All arrays are parallel to `rows`.

    The columns `due_ms` and `source_seq` are null for None. `now_ms` is the time of the store, `host` its host.
    """
    return build_rows(
        rows.num_rows,
        kind=kind,
        topic=topics,
        queue_id=0,
        properties=properties,
        store_ms=now_ms,
        store_host=host,
        reconsume_times=times.astype(np.int32),
        due_ms=due_ms,
        source_seq=source_seq,
        **{name: rows.column(name) for name in _UNCHANGED},
    )


def properties_for(texts: pa.Array, group: str, topic: str, first_ms: int) -> pa.Array:
    """Build the properties of copies of rows of `topic` that were handed out to `group` at `first_ms`.

    `texts`: the properties of the rows, null for none.
    """
    new_properties = copy_properties(group, topic, first_ms)
    encoded = encode_properties(new_properties)
    texts = filled(texts, "")
    needs_end = pc.and_(pc.not_equal(texts, ""), pc.invert(pc.ends_with(texts, PROPERTY_END)))
    ended = pc.if_else(needs_end, pc.binary_join_element_wise(texts, "", PROPERTY_END), texts)
    # The usual row: its text with three properties appended, joined as a column.
    joined = pc.binary_join_element_wise(ended, encoded, "")
    # Rows that were handed out before, or carry a delay, have properties to replace or remove: one by one.
    needs_rebuild = np.asarray(pc.match_substring_regex(texts, _REBUILD_PATTERN))
    needs_rebuild |= byte_lengths(joined) > limits.PROPERTIES_BYTES_MAX
    if not needs_rebuild.any():
        return joined
    mask = pa.array(needs_rebuild)
    rebuilt = [merge_properties(text, new_properties) for text in texts.filter(mask).to_pylist()]
    return pc.replace_with_mask(joined, mask, pa.array(rebuilt, pa.string()))


def with_reasons(texts: pa.Array, reasons: Sequence[str]) -> pa.Array:
    """Add to the properties of each message the reason for which it was given back. An empty reason changes nothing."""
    texts_with_reasons = []
    for text, reason in zip(texts.to_pylist(), reasons, strict=True):
        text_with_reason = encode_properties(decode_properties(text or "") | {NACK_REASON: reason})
        # A reason that would exceed the limit is left out, as in a copy of the message.
        fits = len(text_with_reason.encode()) <= limits.PROPERTIES_BYTES_MAX
        texts_with_reasons.append(text_with_reason if reason and fits else text)
    return pa.array(texts_with_reasons, pa.string())


def merge_properties_of_each(texts: pa.Array, adding: Sequence[dict[str, str]]) -> pa.Array:
    """Apply `merge_properties` to each row, for rows of different groups or delivery times."""
    rows = zip(texts.to_pylist(), adding, strict=True)
    return pa.array(
        [merge_properties(text or "", added_properties) for text, added_properties in rows], pa.string()
    )


def copy_properties(group: str, topic: str, first_ms: int) -> dict[str, str]:
    """Build the properties that every copy gets.

    In the copy of a copy, `merge_properties` keeps the topic and time of the first one.
    """
    return {ORIGIN_GROUP: group, RETRY_TOPIC: topic, FIRST_POP_TIME: str(first_ms)}


def nack_properties(reason: str, now_ms: int) -> dict[str, str]:
    """Build the properties of a message that a member gives back at `now_ms`."""
    return {NACK_TIME: str(now_ms), NACK_REASON: reason_text(reason)}


def count_uncounted_nacks(text: str | None) -> int:
    """Read how often a message was given back without an attempt, from its properties."""
    number = decode_properties(text or "").get(NACKS_UNCOUNTED, "0")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0


def uncounted_nack_property(text: str | None) -> dict[str, str]:
    """Build the property of a message that is given back without an attempt once more."""
    return {NACKS_UNCOUNTED: str(count_uncounted_nacks(text) + 1)}


def dead_letter_properties(reason: str) -> dict[str, str]:
    """Build the properties of a message that becomes a dead letter, or whose lease has ended."""
    text = reason_text(reason)
    return {NACK_REASON: text} if text else {}  # without a reason, the reason of the last nack stays


def reason_text(reason: str) -> str:
    """Make a reason fit for a property: one line, no property separators, at most NACK_REASON_BYTES_MAX bytes.

    >>> reason_text("Refused:\\n\\x02 no  stock ")
    'Refused: no stock'
    """
    # Cut first, because the reason may be of any length. A character takes at least one byte.
    cut = reason[: limits.NACK_REASON_BYTES_MAX]
    printable = "".join(character if character.isprintable() else " " for character in cut)
    line = " ".join(printable.split())
    # Half a surrogate pair is not printable, so `encode` cannot fail. Half a character at the cut is dropped.
    return line.encode()[: limits.NACK_REASON_BYTES_MAX].decode(errors="ignore")


def merge_properties(text: str, adding: dict[str, str]) -> str:
    """Add properties to those of a row, and remove those of earlier delays and deliveries. Returns them encoded.

    `adding` replaces the group, the reason (an empty one removes it) and the number of uncounted nacks. RETRY_TOPIC and
    FIRST_POP_TIME of the first copy stay. If the text would exceed PROPERTIES_BYTES_MAX, added properties are left
    out, the least important first.
    """
    old_properties = decode_properties(text)
    # The check point of an earlier delivery would name a position that is done. The time of its nack is over.
    dropped = {POP_CK, NACK_TIME}
    if ORIGIN_GROUP not in old_properties:
        dropped.add(NACK_REASON)  # the sender set it: no member has given the message back yet
    # Properties of a delay that is over must not delay the copy again (retry.py).
    remaining = {
        name: value
        for name, value in old_properties.items()
        if name not in retry.SPENT and name not in dropped
    }
    replaced = {ORIGIN_GROUP, NACK_REASON, NACKS_UNCOUNTED}
    merged = remaining | {
        name: value for name, value in adding.items() if name in replaced or name not in remaining
    }
    # Given back without a reason: the property is removed, because readers would take an older reason for this one.
    if merged.get(NACK_REASON) == "":
        del merged[NACK_REASON]
    encoded = encode_properties(merged)
    # Remove added properties until the text fits, the least important one first.
    for name in reversed(_ADDED_NAMES):
        if len(encoded.encode()) <= limits.PROPERTIES_BYTES_MAX:
            break
        # A reason is also removed if the message had it before.
        if name in merged and (name not in remaining or name == NACK_REASON):
            del merged[name]
            encoded = encode_properties(merged)
    return encoded
