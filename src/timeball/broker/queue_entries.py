"""What rows put into the queue index: sizes and tags of entries, and the entries of a stretch of the log.

The same for a message that becomes visible, for recovery, and for a damaged index file that is built again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker.filters.tags import tag_hash, tag_mask
from timeball.errors import Corrupt, OutOfRange
from timeball.log.queue_entry import ENTRY
from timeball.log.queue_file import Part
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader
from timeball.message import SCHEDULE_TOPIC, Int64Array, Kind, alike, codes_of, filled, stored_sizes

BATCH_ROWS = 65_536  # frames may be small; replaying them one by one would cost seconds a million rows
COLUMNS = ("seq", "kind", "topic", "queue_id", "queue_offset", "tag", "body", "properties", "due_ms")
# A half that is committed with a level is moved to its queue.
_PROMISED = (int(Kind.PROMISE), int(Kind.MOVED))
CHECKED_QUEUES = 64  # of an index that is loaded: some milliseconds


def index_tags(
    rows: pa.RecordBatch, codes: Int64Array, names: Sequence[str], multi_tag: Sequence[bool]
) -> Int64Array:
    """Return the tag field of each row's entry; `multi_tag` says of each topic whether it is a mask.

    A promise in a level's queue has its due time there: the scan looks at nothing else.
    """
    tags = _tags(rows.column("tag"), codes, multi_tag)
    if SCHEDULE_TOPIC not in names:
        return tags
    # Messages that clients sent to this topic before it was reserved are no promises.
    waits = (codes == names.index(SCHEDULE_TOPIC)) & np.isin(rows.column("kind").to_numpy(), _PROMISED)
    return np.where(waits, rows.column("due_ms").fill_null(0).to_numpy(), tags)


def _tags(tags: pa.Array, codes: Int64Array, multi_tag: Sequence[bool]) -> Int64Array:
    """Return the hash, or the mask in a MULTI_TAG topic; 0 without a tag."""
    if tags.null_count == len(tags):
        return np.zeros(len(tags), dtype=np.int64)
    # Each distinct tag is hashed once: a batch of ten thousand rows has a few.
    of_row, texts = codes_of(filled(tags, ""))
    found = np.array([tag_hash(text) for text in texts], dtype=np.int64)[of_row]
    multiple = np.flatnonzero(multi_tag)
    if len(multiple):
        # Of all rows, since a batch may mix topics of both types; distinct texts are few.
        masks = np.array([tag_mask(text) for text in texts], dtype=np.int64)[of_row]
        found = np.where(np.isin(codes, multiple), masks, found)
    return found


def by_queue(codes: Int64Array, queue_id: Int64Array) -> Iterator[tuple[int, int, Int64Array]]:
    """Yield a topic's code, a queue and its rows, in order."""
    # One number for topic and queue, so that one sort finds the rows of each.
    for rows in alike(codes * limits.QUEUES_PER_TOPIC_MAX + queue_id):
        yield int(codes[rows[0]]), int(queue_id[rows[0]]), rows


def check(reader: LogReader, indexes: Sequence[QueueIndex]) -> None:
    """Raise Corrupt when the oldest and newest entries of some queues do not name the rows that stand there.

    Files that are whole may still be of another log, or of this one at another time: put back from a copy, say.
    """
    # A sample: a copy of another log differs nearly everywhere, and a start must not read each of 100,000 queues.
    step = -(-len(indexes) // CHECKED_QUEUES) or 1
    for index in indexes[::step] if reader.next_seq > reader.first_seq else ():
        for offset in {index.min_offset, index.max_offset - 1} if index.max_offset > index.min_offset else ():
            seqs = index.read(offset, 1)["seq"].astype(np.int64)
            if seqs[0] >= reader.first_seq:  # others have been let go since
                _check_row(reader, index, offset, seqs)


def _check_row(reader: LogReader, index: QueueIndex, offset: int, seqs: Int64Array) -> None:
    what = f"queue {index.queue_id} of {index.topic!r}, offset {offset}"
    try:
        rows = reader.read_rows(seqs).select(["topic", "queue_id", "queue_offset"]).to_pylist()
    except OutOfRange as error:
        raise Corrupt(f"{what}: {error}") from error
    asked = {"topic": index.topic, "queue_id": index.queue_id, "queue_offset": offset}
    # The row exists and is another: then the index is of another log, and all of it is made anew.
    if rows[0] != asked:
        raise Corrupt(f"{what} names seq {seqs[0]}, which is another row")


def rebuild(
    reader: LogReader, first_seq: int, next_seq: int, is_multi_tag: Callable[[str], bool]
) -> list[Part]:
    """Return the entries of the log's rows [first_seq, next_seq), as far as these are kept (any thread)."""
    found: dict[tuple[str, int], list[Part]] = {}
    # Rows that retention has removed have no entries any more: their offsets are below each queue's first.
    begin = max(first_seq, reader.first_seq)
    for rows in reader.coalesced(begin, next_seq, None, BATCH_ROWS, COLUMNS, placed=True):
        codes, names = codes_of(rows.column("topic"))
        queue_id, offset = (rows.column(c).to_numpy().astype(np.int64) for c in ("queue_id", "queue_offset"))
        entries = np.empty(rows.num_rows, ENTRY)
        entries["seq"], entries["size"] = rows.column("seq").to_numpy(), stored_sizes(rows)
        entries["tag"] = index_tags(rows, codes, names, [is_multi_tag(name) for name in names])
        for code, queue, mine in by_queue(codes, queue_id):
            part = Part(names[code], queue, int(offset[mine[0]]), entries[mine])
            found.setdefault((part.topic, queue), []).append(part)
    return [
        Part(topic, queue, parts[0].first_offset, np.concatenate([part.entries for part in parts]))
        for (topic, queue), parts in found.items()
    ]
