"""The property TIMING-LIST: the levels a message has before it when the present one is over, "27,9,22".

    TIMING-LIST \x01 27,9,22 \x02        numbers of the table, in the order in which they are waited for

A reader of the log or the table sees where a message stands on its way. The broker does not read it back: the queues
know the lists, and the instant rules. So it is left out where it would make a text longer than RocketMQ's field; what a
client sent under the name is taken out. A list that is used up is no property. A release takes it off
(broker/delivery.py), also when the promise has gone to another strategy since.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from timeball import limits
from timeball.message import PROPERTY_END, PROPERTY_NAME_END, Int64Array, Kind, byte_lengths
from timeball.schedule.columns import with_column
from timeball.schedule.level_cascade.placement import LEVELS, first, plan, rest

NAME = "TIMING-LIST"

_FIRST = pa.array(["", *(f"{number}" for number in range(1, LEVELS + 1))], pa.string())
_NEXT = pa.array(["", *(f",{number}" for number in range(1, LEVELS + 1))], pa.string())
_ENTRY = f"{NAME}{PROPERTY_NAME_END}[^{PROPERTY_END}]*"
_AT_THE_START = f"^(?:{_ENTRY}(?:{PROPERTY_END}|$))+"
_BEHIND_OTHERS = f"{PROPERTY_END}{_ENTRY}"


def texts(hops: Int64Array) -> pa.Array:
    """Return the numbers of each list, "27,9,22"; empty for a list that is used up."""
    columns = [_FIRST.take(pa.array(first(hops)))]
    while (hops := rest(hops)).any():
        columns.append(_NEXT.take(pa.array(first(hops))))
    return pc.binary_join_element_wise(*columns, "")


def without_list(properties: pa.Array) -> pa.Array:
    """Return properties without any entry of that name; what has none stays as it was to the byte."""
    if not pc.any(pc.match_substring(properties, NAME)).as_py():
        return properties
    properties = pc.replace_substring_regex(properties, _AT_THE_START, "")
    return pc.replace_substring_regex(properties, _BEHIND_OTHERS, "")


def with_list(properties: pa.Array, hops: Int64Array) -> pa.Array:
    """Return properties that name the levels left; those with no level left say nothing."""
    properties = without_list(properties)
    some = hops != 0
    if not some.any():
        return properties
    before = properties.fill_null("")
    open_ = pc.and_(pc.not_equal(before, ""), pc.invert(pc.ends_with(before, PROPERTY_END)))
    end = pc.if_else(open_, PROPERTY_END, "")
    text = pc.binary_join_element_wise(before, end, NAME + PROPERTY_NAME_END, texts(hops), PROPERTY_END, "")
    # A list is for readers only: where it does not fit, the message goes without one.
    some &= byte_lengths(text) <= limits.PROPERTIES_BYTES_MAX
    return pc.if_else(pa.array(some), text, properties)


def encode_waiting(rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
    """Return the rows, of which the promises, accepted now, name the levels that are before them."""
    promised = rows.column("kind").to_numpy() == Kind.PROMISE
    if not promised.any():
        return rows
    left = rest(plan(rows.column("due_ms").fill_null(0).to_numpy() - now_ms))
    if promised.all():
        return with_column(rows, "properties", with_list(rows.column("properties"), left))
    # A message to be delivered at once is no promise: its properties stay as they came.
    mask = pa.array(promised)
    said = with_list(rows.column("properties").filter(mask), left[promised])
    return with_column(rows, "properties", pc.replace_with_mask(rows.column("properties"), mask, said))


def encode_rewrite(rows: pa.RecordBatch, hops: Int64Array) -> pa.RecordBatch:
    """Return promises as they are written again when they go on to the first of these levels."""
    return with_column(rows, "properties", with_list(rows.column("properties"), rest(hops)))
