"""The property TIMING-LIST: the levels of a message's hops after the current one, such as "27,9,22".

    TIMING-LIST \x01 27,9,22 \x02        numbers of levels, in the order of the hops

It shows readers of the log or the table the progress of a message. The broker does not read it, because the queues
contain the lists. So it is omitted if it would make the properties longer than RocketMQ allows, or if the list is
empty. A property of this name that a client sent is removed. A release removes the property
(broker/accepting/delivery.py), even if another strategy is used by then.
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
# Patterns: one property of this name, a sequence of them at the start of a text, and one after other properties.
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
    """Remove all properties of that name. Texts without any are returned unchanged, byte by byte."""
    if not pc.any(pc.match_substring(properties, NAME)).as_py():
        return properties
    properties = pc.replace_substring_regex(properties, _AT_THE_START, "")
    return pc.replace_substring_regex(properties, _BEHIND_OTHERS, "")


def with_list(properties: pa.Array, hops: Int64Array) -> pa.Array:
    """Add the list of the remaining levels. Texts of messages without remaining levels get none."""
    properties = without_list(properties)
    has_list = hops != 0
    if not has_list.any():
        return properties
    texts_before = properties.fill_null("")
    # Some clients send texts without a separator at the end.
    lacks_separator = pc.and_(
        pc.not_equal(texts_before, ""), pc.invert(pc.ends_with(texts_before, PROPERTY_END))
    )
    separator = pc.if_else(lacks_separator, PROPERTY_END, "")
    text = pc.binary_join_element_wise(
        texts_before, separator, NAME + PROPERTY_NAME_END, texts(hops), PROPERTY_END, ""
    )
    # A list is for readers only. Where it does not fit, the message is stored without one.
    has_list &= byte_lengths(text) <= limits.PROPERTIES_BYTES_MAX
    return pc.if_else(pa.array(has_list), text, properties)


def encode_for_log(rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
    """Add TIMING-LIST to the scheduled messages among these rows. `now_ms` is the time at which they were accepted."""
    is_scheduled = rows.column("kind").to_numpy() == Kind.SCHEDULED
    if not is_scheduled.any():
        return rows
    later_hops = rest(plan(rows.column("due_ms").fill_null(0).to_numpy() - now_ms))
    if is_scheduled.all():
        return with_column(rows, "properties", with_list(rows.column("properties"), later_hops))
    # The properties of immediate messages stay unchanged.
    mask = pa.array(is_scheduled)
    new_properties = with_list(rows.column("properties").filter(mask), later_hops[is_scheduled])
    return with_column(
        rows, "properties", pc.replace_with_mask(rows.column("properties"), mask, new_properties)
    )


def encode_rewrite(rows: pa.RecordBatch, hops: Int64Array) -> pa.RecordBatch:
    """Set TIMING-LIST of messages whose next hop is the first level of `hops`."""
    return with_column(rows, "properties", with_list(rows.column("properties"), rest(hops)))
