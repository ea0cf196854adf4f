"""The rows that bring a message back to its group: what changes on the way, and nothing else. No I/O.

    topic            the group's retry topic for this topic (POP's form), or its dead letters after the last attempt
    reconsume_times  one more, unless this attempt does not count
    properties       which group's copy it is, of which topic, when it was first handed out, why and when a member has
                     given it back; spent delays come off
    due_ms           of a promise: when the lease ends
    source_seq       of a promise: the row handed out

The retry topic of POP has the names of group and topic in it (RocketMQ's first form, which its brokers use unless told
otherwise): `%RETRY%<group>_<topic>`. Two pairs of names may make the same topic ("a_b" with "c", "a" with "b_c";
RocketMQ #9633), so every copy names its group, and other groups are not handed it.

Rows are made by columns, since a receive writes every message once more and Python for each row would be most of its
cost; a few are made as values, since each call of Arrow costs as much for one row. Only properties that need more than
something put behind them are taken apart.

Nothing is refused: the message has been accepted. Properties that would grow beyond what RocketMQ's wire can carry get
what still fits, in the order of what would be missed most.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball import limits
from timeball.broker.consuming import retry
from timeball.broker.consuming.requests import Subscription
from timeball.log.few_rows import NumberedRows, ReadRows
from timeball.message import (
    NACK_REASON,
    NACK_TIME,
    ORIGIN_GROUP,
    PROPERTY_END,
    PROPERTY_NAME_END,
    READ_SCHEMA,
    RETRY_PREFIX,
    RETRY_TOPIC,
    Int64Array,
    Kind,
    LogRow,
    build_rows,
    byte_lengths,
    decode_properties,
    encode_properties,
    filled,
)

FIRST_POP_TIME = "1ST_POP_TIME"
POP_CK = "POP_CK"

# The first would be missed most.
_SET_HERE = (ORIGIN_GROUP, RETRY_TOPIC, FIRST_POP_TIME, NACK_TIME, NACK_REASON)
_NAMES = "|".join(sorted([*retry.SPENT, *_SET_HERE, POP_CK]))
_TO_TAKE_APART = f"(^|{PROPERTY_END})({_NAMES}){PROPERTY_NAME_END}"
_TAKEN_APART = re.compile(_TO_TAKE_APART)
FEW_ROWS = 32  # so many cost less one by one than by columns
_KEPT = ("tag", "keys", "unique_key", "body", "born_ms", "born_host", "flag", "sys_flag")
_READ = ("seq", "reconsume_times", "properties", *_KEPT)
_READ_VALUES = itemgetter(*(READ_SCHEMA.get_field_index(name) for name in _READ))


def retry_topic(group: str, topic: str) -> str:
    """Return the topic from which a group gets again what it did not acknowledge; of a retry topic, itself."""
    return topic if topic.startswith(RETRY_PREFIX) else f"{RETRY_PREFIX}{group}_{topic}"


def is_of(group: str, properties: str | None) -> bool:
    """Return whether a row of a retry topic is for this group; one that names no group is for every reader."""
    text = PROPERTY_END + (properties or "")
    # By text, not decoded: each row of a shared retry topic is looked at for every group that reads it.
    mark = f"{PROPERTY_END}{ORIGIN_GROUP}{PROPERTY_NAME_END}"
    return mark not in text or f"{mark}{group}{PROPERTY_END}" in text + PROPERTY_END


def times_of(rows: pa.RecordBatch) -> Int64Array:
    """Return how often each of these READ_SCHEMA rows had been tried before."""
    return np.asarray(filled(rows.column("reconsume_times"), 0).to_numpy(), dtype=np.int64)


def times_after(rows: pa.RecordBatch) -> Int64Array:
    """Return how often each will have been tried in vain once this lease ends."""
    return np.minimum(times_of(rows) + 1, retry.INT_MAX)


def topics_after(again: str, dead: str, times: Int64Array, times_max: int) -> list[str]:
    """Return where each goes then: the retry topic, or the dead letters when that was its last attempt."""
    return [dead if late else again for late in (times > times_max).tolist()]


def handed_out(
    rows: pa.RecordBatch, *, group: str, topic: str, main: Subscription, now_ms: int, due_ms: int, host: str
) -> pa.RecordBatch:
    """Return the promises that bring rows handed to a group back when their lease ends, at `due_ms`."""
    times = times_after(rows)
    return build(
        rows,
        topics=topics_after(main.again_name, main.dead_name, times, main.times_max),
        properties=properties_for(rows.column("properties"), group, topic, now_ms),
        times=times,
        due_ms=np.full(rows.num_rows, due_ms, dtype=np.int64),
        source_seq=rows.column("seq"),
        now_ms=now_ms,
        host=host,
    )


def few_handed_out(
    rows: ReadRows, *, group: str, topic: str, main: Subscription, now_ms: int, due_ms: int, host: str
) -> list[LogRow]:
    """Return the same rows as `handed_out`, as values."""
    adding = added(group, topic, now_ms)
    behind = encode_properties(adding)
    few = (
        map(_READ_VALUES, rows.values)
        if isinstance(rows, NumberedRows)
        else zip(*(rows.column(name).to_pylist() for name in _READ), strict=True)
    )
    built: list[LogRow] = []
    for seq, before, text, tag, keys, unique_key, body, born_ms, born_host, flag, sys_flag in few:
        times = min((before or 0) + 1, retry.INT_MAX)
        name = main.dead_name if times > main.times_max else main.again_name
        properties = _properties_with(text or "", adding, behind)
        built.append(
            (
                int(Kind.PROMISE), name, 0, None, tag, keys, unique_key, body, properties, born_ms, born_host,
                now_ms, host, flag, sys_flag, times, due_ms, None, seq, None, None,
            )
        )  # fmt: skip
    return built


def _properties_with(text: str, adding: dict[str, str], behind: str) -> str:
    """Return what `properties_for` does, of one row."""
    found = f"{text}{PROPERTY_END if text and not text.endswith(PROPERTY_END) else ''}{behind}"
    if _TAKEN_APART.search(text) or len(found.encode()) > limits.PROPERTIES_BYTES_MAX:
        return properties_of(text, adding)
    return found


def build(
    rows: pa.RecordBatch,
    *,
    kind: Kind = Kind.PROMISE,
    topics: Sequence[str],
    properties: pa.Array,
    times: Int64Array,
    due_ms: Int64Array | None = None,
    source_seq: pa.Array | None = None,
    now_ms: int,
    host: str,
) -> pa.RecordBatch:
    """Return LOG_SCHEMA rows of `kind` for READ_SCHEMA rows; `due_ms` and `source_seq` None: null."""
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


def properties_for(texts: pa.Array, group: str, topic: str, first_ms: int) -> pa.Array:
    """Return the properties of copies of rows of `topic` that were handed to `group` at `first_ms`."""
    adding = added(group, topic, first_ms)
    behind = encode_properties(adding)
    texts = filled(texts, "")
    needs_end = pc.and_(pc.not_equal(texts, ""), pc.invert(pc.ends_with(texts, PROPERTY_END)))
    ended = pc.if_else(needs_end, pc.binary_join_element_wise(texts, "", PROPERTY_END), texts)
    # The usual row: its text, and three properties behind it, joined as a column.
    found = pc.binary_join_element_wise(ended, behind, "")
    # Rows that were handed out before, or carry a delay: their properties are taken apart one by one.
    slow = np.asarray(pc.match_substring_regex(texts, _TO_TAKE_APART))
    slow |= byte_lengths(found) > limits.PROPERTIES_BYTES_MAX
    if not slow.any():
        return found
    mask = pa.array(slow)
    apart = [properties_of(text, adding) for text in texts.filter(mask).to_pylist()]
    return pc.replace_with_mask(found, mask, pa.array(apart, pa.string()))


def with_reasons(texts: pa.Array, reasons: Sequence[str]) -> pa.Array:
    """Return properties that show why each message was given back; an empty reason changes nothing."""
    found = []
    for text, reason in zip(texts.to_pylist(), reasons, strict=True):
        shown = decode_properties(text or "") | {NACK_REASON: reason}
        # Over the bound it is left out, as in a copy of the message.
        shown_text = encode_properties(shown)
        is_shown = reason and len(shown_text.encode()) <= limits.PROPERTIES_BYTES_MAX
        found.append(shown_text if is_shown else text)
    return pa.array(found, pa.string())


def properties_of_each(texts: pa.Array, adding: Sequence[dict[str, str]]) -> pa.Array:
    """Return the same where the rows were handed out to different groups or at different times."""
    each = zip(texts.to_pylist(), adding, strict=True)
    return pa.array([properties_of(text or "", names) for text, names in each], pa.string())


def added(group: str, topic: str, first_ms: int) -> dict[str, str]:
    """Return the properties that a copy gets unless an earlier attempt has given them."""
    return {ORIGIN_GROUP: group, RETRY_TOPIC: topic, FIRST_POP_TIME: str(first_ms)}


def given_back(reason: str, now_ms: int) -> dict[str, str]:
    """Return the properties of a message that a member gives back, or up, at `now_ms`."""
    return {NACK_TIME: str(now_ms), NACK_REASON: reason_text(reason)}


def given_up(reason: str) -> dict[str, str]:
    """Return the properties of a message that a member puts into the dead letters."""
    text = reason_text(reason)
    return {NACK_REASON: text} if text else {}  # else the last reason that was given stays


def reason_text(reason: str) -> str:
    """Return a reason as a property may hold it: one line, without what ends a property, cut to its bound.

    >>> reason_text("Refused:\\n\\x02 no  stock ")
    'Refused: no stock'
    """
    # Cut before anything else, as it may be of any length; a character is at least a byte.
    cut = reason[: limits.NACK_REASON_BYTES_MAX]
    line = " ".join("".join(c if c.isprintable() else " " for c in cut).split())
    # Half a surrogate pair is not printable, so this encodes; half a character at the cut is left out.
    return line.encode()[: limits.NACK_REASON_BYTES_MAX].decode(errors="ignore")


def properties_of(text: str, adding: dict[str, str]) -> str:
    """Return one row's: the group is replaced, topic and first time stay from an earlier attempt."""
    said = decode_properties(text)
    # A check point of an earlier handing out would name a position that is done.
    dropped = {POP_CK, NACK_TIME}
    if ORIGIN_GROUP not in said:
        dropped.add(NACK_REASON)  # the sender's: no member has given it back yet
    kept = {n: v for n, v in said.items() if n not in retry.SPENT and n not in dropped}
    replaced = {ORIGIN_GROUP, NACK_REASON}
    found = {**kept, **{n: v for n, v in adding.items() if n in replaced or n not in kept}}
    if not found.get(NACK_REASON, "-"):
        del found[NACK_REASON]  # given back without a reason: an older one would pass for it
    encoded = encode_properties(found)
    # What is missed least goes first, until the text fits.
    for name in reversed(_SET_HERE):
        if len(encoded.encode()) <= limits.PROPERTIES_BYTES_MAX:
            break
        # A reason gives way also when it has come along.
        if name in found and (name not in kept or name == NACK_REASON):
            del found[name]
            encoded = encode_properties(found)
    return encoded
