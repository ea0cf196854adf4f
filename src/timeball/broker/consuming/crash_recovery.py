"""After a crash: which positions of a group's queues are done, by the promises in the log.

A group's offsets are saved once a second, its promises before a consumer sees a message. So behind the saved offsets
stand promises of positions that would be handed out again, and would come back a second time besides. Each names the
row it is a copy of, which has its queue and position, and the group whose copy it is.

The promises from the row on that was saved with the offsets are read, and no earlier ones: the group may have been
moved back since, and then what was promised before is to be handed out again.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pyarrow as pa

from timeball.broker.consuming.leases import Key, Leases
from timeball.broker.consuming.redelivery_rows import ORIGIN_GROUP
from timeball.broker.parts import Parts
from timeball.broker.registry.offsets import Parked
from timeball.log.reader import LogReader
from timeball.message import Kind, decode_properties

_COLUMNS = ["seq", "kind", "properties", "source_seq"]
_BATCH_ROWS = 65_536

Positions = dict[Key, set[int]]  # (group, topic, queue) -> positions


def done_positions(reader: LogReader, parked: Parked) -> Positions:
    """Return the positions that are done, by what was saved with the offsets and the log behind it (reader thread)."""
    found: Positions = defaultdict(set)
    for group, topics in parked.ahead.items():
        for topic, queues in topics.items():
            for queue_id, stretches in queues.items():
                for begin, end in stretches:
                    found[(group, topic, queue_id)].update(range(begin, end))
    begin = max(parked.from_seq, reader.first_seq)
    for rows in reader.coalesced(begin, reader.next_seq, [Kind.PROMISE], _BATCH_ROWS, _COLUMNS):
        sources = rows.column("source_seq").fill_null(0).to_numpy()
        # A row that retention has removed is not handed out again either.
        mine = np.flatnonzero(sources >= reader.first_seq)
        if len(mine):
            _add(found, reader.take(sources[mine]), rows.column("properties").take(pa.array(mine)))
    return found


def _add(found: Positions, handed_out: pa.RecordBatch, texts: pa.Array) -> None:
    names = ("topic", "queue_id", "queue_offset")
    places = zip(*(handed_out.column(name).to_pylist() for name in names), strict=True)
    for (topic, queue_id, offset), text in zip(places, texts.to_pylist(), strict=True):
        group = decode_properties(text or "").get(ORIGIN_GROUP)
        if group is not None and offset is not None:
            found[(group, topic, queue_id)].add(offset)


def restore(parts: Parts, leases: Leases, found: Positions) -> None:
    """Have the groups go on behind these positions."""
    for (group, name, queue_id), offsets in found.items():
        topic = parts.topics.find(name)
        # A group without an offset was deleted; a new one of its name begins anew.
        known = parts.offsets.find(group, name, queue_id) is not None
        if topic is not None and known and queue_id < len(topic.queues):
            leases.skip_done(group, topic, queue_id, offsets)
