"""Expiry: a message that would be released too late is cancelled, or released into the topic %EXPIRED%<topic>.

The properties of a message contain its *last time*, at which it may still be released, or the duration from its due
time to the last time. So the log, the table, transfers between groups and the template of a recurring schedule contain
it. Only the release reads it: no index and no timer has it.

A message that returns to its consumer group was released before, and does not expire.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.model.message import (
    DLQ_PREFIX,
    PROPERTY_END,
    PROPERTY_NAME_END,
    RETRY_PREFIX,
    Int64Array,
    int64,
)
from timeball.model.send_options import (
    DIGITS_MAX,
    EXPIRED_PREFIX,
    EXPIRES,
    EXPIRES_AFTER_MS,
    EXPIRES_MS,
    ON_EXPIRY,
)
from timeball.schedule.backlog import Bools

REASON = "expired"  # in the CANCEL row of an expired message
_NEVER_MS = 1 << 62
_STAY_PREFIXES = (RETRY_PREFIX, DLQ_PREFIX, EXPIRED_PREFIX)


class Expired(NamedTuple):
    """Masks of the expired messages: messages to cancel, and messages to move to %EXPIRED%<topic>."""

    cancelled: Bools
    moved: Bools

    @property
    def any_of(self) -> Bools:
        """The mask of all expired messages."""
        return self.cancelled | self.moved


def find_expired(scheduled_rows: pa.RecordBatch, now_ms: int) -> Expired | None:
    """Find the messages (READ_SCHEMA) that may not be released as late as `now_ms`. None if there are none.

    A message whose expiry is no number does not expire. If it has a duration and a time, the duration counts. A send
    with both is refused, so only a client that writes the properties itself can give both.
    """
    properties = scheduled_rows.column("properties")
    has_expiry = pc.match_substring(properties, EXPIRES)
    if not pc.any(has_expiry).as_py():  # usually no row has an expiry
        return None
    # As columns, because all messages of a topic may have one, and a hand-out may have a hundred thousand messages.
    index = np.flatnonzero(has_expiry.fill_null(False).to_numpy(zero_copy_only=False))
    entries = pc.split_pattern(properties.take(pa.array(index)), PROPERTY_END)
    message, texts = pc.list_parent_indices(entries).to_numpy(), entries.flatten()
    last_ms = np.full(len(index), _NEVER_MS)
    _set_numbers(last_ms, message, texts, EXPIRES_MS, np.zeros(len(index), np.int64))
    # After the times, because a duration replaces a time, even if the duration is no number.
    _set_numbers(last_ms, message, texts, EXPIRES_AFTER_MS, int64(scheduled_rows.column("due_ms"))[index])
    is_moved = np.zeros(len(index), np.bool_)
    values, message_index = _values(message, texts, ON_EXPIRY)
    is_moved[message_index] = pc.equal(values, "move").to_numpy(zero_copy_only=False)
    # The messages of these topics have been delivered before, or have expired already.
    never_expires = np.zeros(len(index), np.bool_)
    topics = scheduled_rows.column("topic").take(pa.array(index))
    for prefix in _STAY_PREFIXES:
        never_expires |= pc.starts_with(topics, prefix).to_numpy(zero_copy_only=False)
    is_late = (last_ms < now_ms) & ~never_expires
    # Usually no message is late, and then the frame is released like any other.
    if not is_late.any():
        return None
    count = scheduled_rows.num_rows
    expired = Expired(np.zeros(count, np.bool_), np.zeros(count, np.bool_))
    expired.cancelled[index[is_late & ~is_moved]] = True
    expired.moved[index[is_late & is_moved]] = True
    return expired


def _values(message: Int64Array, texts: pa.Array, name: str) -> tuple[pa.Array, Int64Array]:
    """Find the values of the property `name`, and the index of the message that each belongs to.

    `texts` are single properties, and `message` contains the index of the message of each text. If a message has the
    property several times, the last one counts (as in `decode_properties`).
    """
    prefix = f"{name}{PROPERTY_NAME_END}"
    has_name = pc.starts_with(texts, prefix)
    message = message[has_name.to_numpy(zero_copy_only=False)]
    values = pc.utf8_slice_codeunits(texts.filter(has_name), len(prefix))
    # The texts of one message follow each other, so its last value precedes the texts of the next message.
    is_last = np.ones(len(message), np.bool_)
    is_last[:-1] = message[1:] != message[:-1]
    return values.filter(pa.array(is_last)), message[is_last]


def _set_numbers(
    last_ms: Int64Array, message: Int64Array, texts: pa.Array, name: str, from_ms: Int64Array
) -> None:
    """Set `last_ms` of the messages that have the property `name`: its value in ms, after `from_ms` of the message.

    A value that is no number sets it to _NEVER_MS. `message` and `texts`: as in `_values`.
    """
    values, index = _values(message, texts, name)
    # A longer number is no time, and would not fit into 64 bits.
    is_number = pc.and_(pc.ascii_is_decimal(values), pc.less_equal(pc.binary_length(values), DIGITS_MAX))
    last_ms[index] = _NEVER_MS
    index = index[is_number.to_numpy(zero_copy_only=False)]
    last_ms[index] = from_ms[index] + int64(values.filter(is_number).cast(pa.int64()))
