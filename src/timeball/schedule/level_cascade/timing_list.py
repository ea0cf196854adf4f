"""The property TIMING-LIST: the levels that a message still has to wait for after the current one, "27,9,22".

    TIMING-LIST \x01 27,9,22 \x02        numbers of the table, in the order in which they are waited for

It shows readers of the log or the table the progress of a message. The broker does not read it: the queues contain the
lists, and the due time decides. So it is omitted where it would make a text longer than RocketMQ's field. An entry that
a client sent under this name is removed. An empty list is omitted. A release removes the property
(broker/accepting/delivery.py), also if the message belongs to another strategy by then.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from timeball.model import limits
from timeball.model.message import PROPERTY_END, PROPERTY_NAME_END, Int64Array, Kind, byte_lengths
from timeball.schedule.columns import with_column
from timeball.schedule.level_cascade.placement import LEVELS, first, plan, rest

NAME = "TIMING-LIST"

_FIRST = pa.array(["", *(f"{number}" for number in range(1, LEVELS + 1))], pa.string())
_NEXT = pa.array(["", *(f",{number}" for number in range(1, LEVELS + 1))], pa.string())
# One entry of the name, a sequence of them at the start of a text, and one after other properties.
_ENTRY = f"{NAME}{PROPERTY_NAME_END}[^{PROPERTY_END}]*"
_AT_THE_START = f"^(?:{_ENTRY}(?:{PROPERTY_END}|$))+"
_BEHIND_OTHERS = f"{PROPERTY_END}{_ENTRY}"


def texts(hops: Int64Array) -> pa.Array:
    """Build the text of each list, "27,9,22". Empty for an empty list."""
    columns = [_FIRST.take(pa.array(first(hops)))]
    while (hops := rest(hops)).any():
        columns.append(_NEXT.take(pa.array(first(hops))))
    return pc.binary_join_element_wise(*columns, "")


def without_list(properties: pa.Array) -> pa.Array:
    """Remove all entries of that name. Texts without any are returned unchanged, to the byte."""
    if not pc.any(pc.match_substring(properties, NAME)).as_py():
        return properties
    properties = pc.replace_substring_regex(properties, _AT_THE_START, "")
    return pc.replace_substring_regex(properties, _BEHIND_OTHERS, "")


def with_list(properties: pa.Array, hops: Int64Array) -> pa.Array:
    """Add the list of the remaining levels. Texts of messages without remaining levels get none."""
    properties = without_list(properties)
    some = hops != 0
    if not some.any():
        return properties
    before = properties.fill_null("")
    # Some clients send texts without a separator at the end.
    open_ = pc.and_(pc.not_equal(before, ""), pc.invert(pc.ends_with(before, PROPERTY_END)))
    end = pc.if_else(open_, PROPERTY_END, "")
    text = pc.binary_join_element_wise(before, end, NAME + PROPERTY_NAME_END, texts(hops), PROPERTY_END, "")
    # A list is for readers only. Where it does not fit, the message is stored without one.
    some &= byte_lengths(text) <= limits.PROPERTIES_BYTES_MAX
    return pc.if_else(pa.array(some), text, properties)


def encode_waiting(rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
    """Add TIMING-LIST to the scheduled messages among these rows. `now_ms` is the time at which they were accepted."""
    promised = rows.column("kind").to_numpy() == Kind.SCHEDULED
    if not promised.any():
        return rows
    left = rest(plan(rows.column("due_ms").fill_null(0).to_numpy() - now_ms))
    if promised.all():
        return with_column(rows, "properties", with_list(rows.column("properties"), left))
    # The properties of immediate messages stay unchanged.
    mask = pa.array(promised)
    said = with_list(rows.column("properties").filter(mask), left[promised])
    return with_column(rows, "properties", pc.replace_with_mask(rows.column("properties"), mask, said))


def encode_rewrite(rows: pa.RecordBatch, hops: Int64Array) -> pa.RecordBatch:
    """Build the rows of messages that go on to the first of these levels."""
    return with_column(rows, "properties", with_list(rows.column("properties"), rest(hops)))
