"""Tests of timeball.pipeline.source.queue_reader: which offsets of which queues are read."""

from __future__ import annotations

import pytest
from pyspark.sql.datasource import EqualTo, Filter, LessThan
from tests.node_fixture import RunningNode
from tests.pipeline.traffic import send_due_now

from timeball.errors import NotFound, OutOfRange
from timeball.pipeline.source.options import read_options
from timeball.pipeline.source.queue_reader import (
    QueuePart,
    QueueReader,
    check_offsets,
    offsets_at,
    queue_parts,
)

KEPT = {0: (5, 20), 1: (0, 8)}


def test_positions_by_name_by_number_and_by_queue() -> None:
    assert offsets_at("from_offset", "first", KEPT) == {0: 5, 1: 0}
    assert offsets_at("to_offset", "latest", KEPT) == {0: 20, 1: 8}
    assert offsets_at("to_offset", 7, KEPT) == {0: 7, 1: 7}
    assert offsets_at("from_offset", {0: 20}, KEPT) == {0: 20, 1: 0}
    assert offsets_at("to_offset", {1: 0}, KEPT) == {0: 20, 1: 0}


def test_positions_that_are_not_kept_are_refused_by_name() -> None:
    with pytest.raises(
        OutOfRange, match=r"option to_offset: offset 9 of queue 1, which keeps 0 to 8; .*0=100"
    ):
        offsets_at("to_offset", 9, KEPT)
    with pytest.raises(OutOfRange, match="option from_offset: offset 4 of queue 0"):
        offsets_at("from_offset", {0: 4}, KEPT)
    with pytest.raises(NotFound, match=r"option from_offset: there is no queue 7 .*\[0, 1\]"):
        offsets_at("from_offset", {7: 1}, KEPT)
    with pytest.raises(
        OutOfRange, match="queue 0 of 't': retention has removed the rows below offset 5, and 4"
    ):
        check_offsets("t", {0: 4, 1: 0}, KEPT)
    check_offsets("t", {0: 5, 1: 8}, KEPT)


def test_each_queue_is_cut_into_pieces_of_its_own() -> None:
    options = read_options({"read": "queue", "topic": "t", "rows_per_partition": "10"})
    parts = [
        (p.queue_id, p.from_offset, p.to_offset) for p in queue_parts({0: 5}, {0: 20, 1: 8, 2: 0}, options)
    ]
    assert parts == [(0, 5, 12), (0, 12, 20), (1, 0, 8)]


def rows_of(node: RunningNode, filters: list[Filter], **options: str) -> list[tuple[int, int]]:
    """(queue, offset) of what the tasks of a batch read hand to Spark."""
    given = {
        "endpoint": node.endpoint,
        "read": "queue",
        "topic": "orders",
        "columns": "queue_id,queue_offset",
    }
    reader = QueueReader(read_options({**given, **options}))
    assert list(reader.pushFilters(filters)) == filters
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return [(row["queue_id"], row["queue_offset"]) for batch in batches for row in batch.to_pylist()]


def test_queues_and_offsets_by_option_and_by_filter(node: RunningNode) -> None:
    send_due_now(node.endpoint, 40)
    everything = rows_of(node, [])
    assert len(everything) == len(set(everything)) == 40
    queue = everything[0][0]
    assert rows_of(node, [], queue_id=str(queue)) == [pair for pair in everything if pair[0] == queue]
    assert rows_of(node, [EqualTo(("queue_id",), queue)]) == rows_of(node, [], queue_id=str(queue))
    assert rows_of(node, [LessThan(("queue_offset",), 1)]) == [pair for pair in everything if pair[1] < 1]
    assert rows_of(node, [], from_offset="latest") == []
    assert rows_of(node, [], to_offset="0") == []
    assert rows_of(node, [EqualTo(("seq",), 0)]) == []
    assert rows_of(node, [], rows_per_partition="3") == everything


def test_a_queue_that_is_not_there(node: RunningNode) -> None:
    send_due_now(node.endpoint, 1)
    with pytest.raises(NotFound, match="option queue_id=900: the topic 'orders' has the queues 0 to"):
        rows_of(node, [], queue_id="900")
    reader = QueueReader(read_options({"endpoint": node.endpoint, "read": "queue", "topic": "orders"}))
    with pytest.raises(OutOfRange):
        list(reader.read(QueuePart(0, 0, 1_000)))
