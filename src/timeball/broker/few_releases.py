"""A few releases: placed and built row by row, as a few sends are (few_sends.py).

Under a steady load a tick hands out one promise, or some. The way of columns (`Topics.place`, `release_rows`) costs
them half a millisecond, whatever their number; up to ROWS_MAX rows cost less one by one. Both give the same rows and
places: `tests/broker/test_few_releases.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from timeball import limits
from timeball.broker.registry.few_places import FewPlaces
from timeball.broker.registry.topics import Topics
from timeball.log.few_rows import Build, FewRows
from timeball.message import STORED_OVERHEAD_BYTES, Kind, LogRow
from timeball.rules import size_bytes
from timeball.schedule.level_cascade.timing_list import NAME as TIMING_LIST

ROWS_MAX = 64  # from there on columns cost less
_MOVED, _RELEASE = int(Kind.MOVED), int(Kind.RELEASE)


class FewReleases(NamedTuple):
    """Release records as the log will hold them, and their places, which are still to be given out."""

    rows: FewRows
    places: FewPlaces


def are_few(promises: pa.RecordBatch) -> bool:
    """Return whether these READ_SCHEMA promises go row by row: few, of usual sizes, without a cascade's list."""
    return (
        promises.num_rows <= ROWS_MAX
        and pa.ipc.get_record_batch_size(promises) <= limits.REQUEST_BYTES_MAX // 64
        and not any(text and TIMING_LIST in text for text in promises.column("properties").to_pylist())
    )


def release_rows(promises: pa.RecordBatch, topics: Topics, now_ms: int, build: Build) -> FewReleases:
    """Return release records for a few READ_SCHEMA promises, in the same order.

    Their topics have been accepted: one that is missing by now is made.
    """
    places = FewPlaces()
    built: list[LogRow] = []
    for at, row in enumerate(zip(*(column.to_pylist() for column in promises.columns), strict=True)):
        (
            seq, kind, topic, queue_id, _, tag, keys, unique_key, body, properties, born_ms, born_host, store_ms,
            store_host, flag, sys_flag, reconsume_times, due_ms, _, source_seq, version_seq, from_due_ms,
        ) = row  # fmt: skip
        # Guarantee G2, checked once more here, since everything above is a cache.
        assert due_ms <= now_ms, "a promise must never be kept before its instant"
        # A promise is named by its number, and by its version where that is another row (delivery.names).
        number, version = (source_seq, seq) if kind == _MOVED else (seq, version_seq)
        stored_bytes = STORED_OVERHEAD_BYTES + size_bytes(topic) + len(body) + size_bytes(properties or "")
        queue_id, offset = places.choose(
            topics.find_topic(topic) or topics.ensure(topic),
            at, -1 if queue_id is None else queue_id, stored_bytes, tag,
        )  # fmt: skip
        built.append(
            (
                _RELEASE, topic, queue_id, offset, tag, keys, unique_key, body, properties, born_ms, born_host, now_ms,
                store_host, flag, sys_flag, reconsume_times, due_ms, store_ms, number, version, from_due_ms,
            )
        )  # fmt: skip
    return FewReleases(build(built), places)
