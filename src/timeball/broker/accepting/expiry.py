"""Expiry: a message that would be released too late is cancelled, or released into the topic %EXPIRED%<topic>.

The properties of a message name its last time, or the time after its due time. So log, table, transfers and the
template of a recurring schedule contain it. Only the release reads it: no index and no timer has it.

A message that returns to its group has been released before, and does not expire.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.model.message import DLQ_PREFIX, RETRY_PREFIX, decode_properties
from timeball.model.send_options import EXPIRED_PREFIX, EXPIRES, expiry_of
from timeball.schedule.backlog import Bools

REASON = "expired"  # in the CANCEL row of an expired message
_STAY_PREFIXES = (RETRY_PREFIX, DLQ_PREFIX, EXPIRED_PREFIX)


class Expired(NamedTuple):
    """Masks of the messages that have expired: those to cancel, and those to move."""

    cancelled: Bools
    moved: Bools

    @property
    def any_of(self) -> Bools:
        """The mask of both."""
        return self.cancelled | self.moved


def find_expired(scheduled_rows: pa.RecordBatch, now_ms: int) -> Expired | None:
    """Find the messages (READ_SCHEMA) that may not be released as late as `now_ms`. None if there are none."""
    properties = scheduled_rows.column("properties")
    has_expiry = pc.match_substring(properties, EXPIRES)
    if not pc.any(has_expiry).as_py():  # usually no row has an expiry
        return None
    # Row by row from here on: a message with an expiry is rare, and its properties must be decoded.
    count = scheduled_rows.num_rows
    expired = Expired(np.zeros(count, np.bool_), np.zeros(count, np.bool_))
    topics, due_ms = scheduled_rows.column("topic"), scheduled_rows.column("due_ms")
    for index in np.flatnonzero(has_expiry.fill_null(False).to_numpy(zero_copy_only=False)).tolist():
        expiry = expiry_of(decode_properties(properties[index].as_py()), due_ms[index].as_py())
        if expiry is not None and expiry.last_ms < now_ms:
            if topics[index].as_py().startswith(_STAY_PREFIXES):
                continue
            (expired.moved if expiry.moves else expired.cancelled)[index] = True
    return expired if expired.any_of.any() else None
