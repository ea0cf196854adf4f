"""Build queue index entries from rows: the tag fields of entries, and all entries of a range of the log.

The same functions serve messages that become visible, recovery, and the rebuild of a damaged index file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from timeball.broker.filters.tags import tag_hash, tag_mask
from timeball.log.queue_entry import ENTRY
from timeball.log.queue_file import Part
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.errors import Corrupt, OutOfRange
from timeball.model.message import SCHEDULE_TOPIC, Int64Array, Kind, alike, codes_of, filled, stored_sizes

# Rows per batch; frames may be small, and replaying them one by one would cost seconds per million rows.
BATCH_ROWS = 65_536
COLUMNS = ("seq", "kind", "topic", "queue_id", "queue_offset", "tag", "body", "properties", "due_ms")
# Rows in the queue of a delay level. MOVED: a half message that was committed with a level.
_LEVEL_KINDS = (int(Kind.SCHEDULED), int(Kind.MOVED))
CHECKED_QUEUES = 64  # queues that are checked when an index is loaded; takes some milliseconds


def index_tags(
    rows: pa.RecordBatch, codes: Int64Array, names: Sequence[str], multi_tag: Sequence[bool]
) -> Int64Array:
    """Compute the tag field of each row's entry. `multi_tag` states for each topic whether the field is a mask.

    For a scheduled message in the queue of a delay level, the field is the due time in ms. The scan of that queue reads
    only the entries.
    """
    tags = _tag_values(rows.column("tag"), codes, multi_tag)
    if SCHEDULE_TOPIC not in names:
        return tags
    # Clients may have sent messages to this topic before the name was reserved. These have no due time.
    in_level_queue = (codes == names.index(SCHEDULE_TOPIC)) & np.isin(
        rows.column("kind").to_numpy(), _LEVEL_KINDS
    )
    return np.where(in_level_queue, rows.column("due_ms").fill_null(0).to_numpy(), tags)


def _tag_values(tags: pa.Array, codes: Int64Array, multi_tag: Sequence[bool]) -> Int64Array:
    """Compute the hash of each tag, or its mask in a MULTI_TAG topic. 0 without a tag."""
    if tags.null_count == len(tags):
        return np.zeros(len(tags), dtype=np.int64)
    # Hash each distinct tag once: a batch of ten thousand rows has only a few.
    text_index, texts = codes_of(filled(tags, ""))
    values = np.array([tag_hash(text) for text in texts], dtype=np.int64)[text_index]
    multiple = np.flatnonzero(multi_tag)
    if len(multiple):
        # Computed for all rows, because a batch may mix topics of both types.
        masks = np.array([tag_mask(text) for text in texts], dtype=np.int64)[text_index]
        values = np.where(np.isin(codes, multiple), masks, values)
    return values


def by_queue(codes: Int64Array, queue_id: Int64Array) -> Iterator[tuple[int, int, Int64Array]]:
    """Yield (topic code, queue, row positions) for each queue, with the positions in ascending order."""
    # Combine topic and queue into one number, so that one sort finds the rows of each queue.
    for rows in alike(codes * limits.QUEUES_PER_TOPIC_MAX + queue_id):
        yield int(codes[rows[0]]), int(queue_id[rows[0]]), rows


def check(reader: LogReader, indexes: Sequence[QueueIndex]) -> None:
    """Raise Corrupt if the oldest or newest entry of some queues does not match the row that it names.

    Files with valid checksums may belong to another log, or to an earlier state of this one, for example after a
    restore.
    """
    # A sample suffices, because another log differs almost everywhere. A start must not read each of 100,000 queues.
    step = -(-len(indexes) // CHECKED_QUEUES) or 1
    for index in indexes[::step] if reader.next_seq > reader.first_seq else ():
        for offset in {index.min_offset, index.max_offset - 1} if index.max_offset > index.min_offset else ():
            seqs = index.read(offset, 1)["seq"].astype(np.int64)
            if seqs[0] >= reader.first_seq:  # retention has removed older rows
                _check_row(reader, index, offset, seqs)


def _check_row(reader: LogReader, index: QueueIndex, offset: int, seqs: Int64Array) -> None:
    position = f"queue {index.queue_id} of {index.topic!r}, offset {offset}"
    try:
        rows = reader.read_rows(seqs).select(["topic", "queue_id", "queue_offset"]).to_pylist()
    except OutOfRange as error:
        raise Corrupt(f"{position}: {error}") from error
    expected = {"topic": index.topic, "queue_id": index.queue_id, "queue_offset": offset}
    # Another row has this number, so the index belongs to another log. The caller rebuilds it completely.
    if rows[0] != expected:
        raise Corrupt(f"{position} names seq {seqs[0]}, which is another row")


def rebuild(
    reader: LogReader, first_seq: int, next_seq: int, is_multi_tag: Callable[[str], bool]
) -> list[Part]:
    """Build the entries of the log's rows [first_seq, next_seq) that still exist. Any thread."""
    parts_by_queue: dict[tuple[str, int], list[Part]] = {}
    # Rows that retention has removed need no entries: their offsets are below each queue's first offset.
    begin = max(first_seq, reader.first_seq)
    for rows in reader.coalesced(begin, next_seq, None, BATCH_ROWS, COLUMNS, placed=True):
        codes, names = codes_of(rows.column("topic"))
        queue_id, offset = (rows.column(c).to_numpy().astype(np.int64) for c in ("queue_id", "queue_offset"))
        entries = np.empty(rows.num_rows, ENTRY)
        entries["seq"], entries["size"] = rows.column("seq").to_numpy(), stored_sizes(rows)
        entries["tag"] = index_tags(rows, codes, names, [is_multi_tag(name) for name in names])
        for code, queue, queue_rows in by_queue(codes, queue_id):
            queue_part = Part(names[code], queue, int(offset[queue_rows[0]]), entries[queue_rows])
            parts_by_queue.setdefault((queue_part.topic, queue), []).append(queue_part)
    return [
        Part(
            topic,
            queue,
            queue_parts[0].first_offset,
            np.concatenate([queue_part.entries for queue_part in queue_parts]),
        )
        for (topic, queue), queue_parts in parts_by_queue.items()
    ]
