"""Tests of timeball.spark.dispatch: offsets are times. They start no Spark."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType
from tests.docs_pages import first_cells, page, section
from tests.node_fixture import RunningNode
from tests.spark.due_rows import attach

from timeball.model.errors import SetupError
from timeball.model.limits import HOUR_MS
from timeball.spark.dispatch import DueDataSource, DueOptions, DueStream, describe, due_options
from timeball.spark.endpoint import Endpoint

LEAD_MS = HOUR_MS // 2
ALL = ReadAllAvailable()


@pytest.fixture
def stream(node: RunningNode) -> DueStream:
    return DueStream(DueOptions(endpoint=node.endpoint, lead_ms=LEAD_MS, rows_per_partition=40))


def planned(stream: DueStream, start: dict[str, int], end: dict[str, int]) -> list[int]:
    """Plan the rows between two offsets. Returns the number of rows of each task."""
    batches = [list(stream.read(part)) for part in stream.partitions(start, end)]
    return [sum(batch.column("rows").to_pylist()) for (batch,) in batches]


def test_without_rows_due_soon_no_epoch_starts(stream: DueStream, broker: Endpoint) -> None:
    start = stream.initialOffset()
    assert stream.latestOffset(start, ALL) == start
    attach(broker, [broker.status().now_ms + LEAD_MS + HOUR_MS], job_id="far")
    assert stream.latestOffset(start, ALL) == start, "the row is not due within `lead_ms`"
    attach(broker, [broker.status().now_ms + LEAD_MS - 60_000], job_id="nearer")
    assert stream.latestOffset(start, ALL) == start, (
        "an epoch is planned half of `lead_ms` before its first row"
    )
    assert stream.partitions(start, start) == []
    stream.stop()


def test_epochs_cover_rows_due_soon_one_after_the_other(stream: DueStream, broker: Endpoint) -> None:
    start, now_ms = stream.initialOffset(), broker.status().now_ms
    attach(broker, [now_ms + 60_000 + i for i in range(100)], job_id="one")
    end = stream.latestOffset(start, ALL)
    assert end["due_ms"] >= now_ms + LEAD_MS
    assert sum(planned(stream, start, end)) == 100
    assert max(planned(stream, start, end)) <= 60
    assert stream.latestOffset(end, ALL) == end, "planned rows are not planned again"
    attach(broker, [end["due_ms"] + HOUR_MS, end["due_ms"] + 5, now_ms], job_id="two")
    assert stream.latestOffset(end, ALL)["due_ms"] >= end["due_ms"]
    stream.stop()
    repeated = DueStream(stream.options)
    assert planned(repeated, start, end) == planned(stream, start, end), "an offset names its version"
    repeated.stop()


def test_batch_is_limited_by_max_rows(node: RunningNode, broker: Endpoint) -> None:
    stream = DueStream(DueOptions(endpoint=node.endpoint, lead_ms=LEAD_MS, max_rows_per_batch=30))
    start, now_ms = stream.initialOffset(), broker.status().now_ms
    attach(broker, [now_ms + 60_000 + i for i in range(100)])
    sizes = []
    while (end := stream.latestOffset(start, ALL)) != start:
        sizes.append(sum(planned(stream, start, end)))
        start = end
    assert sizes == [30, 30, 30, 10]
    stream.stop()


def test_rows_due_long_ago_are_left_to_the_broker(node: RunningNode, broker: Endpoint) -> None:
    attach(broker, [broker.status().now_ms + 60_000] * 3)
    stream = DueStream(DueOptions(endpoint=node.endpoint, lead_ms=LEAD_MS, behind_ms=0))
    old = {"due_ms": 0, "from_ms": 0, "version": 0}
    end = stream.latestOffset(old, ALL)
    assert end["from_ms"] >= broker.status().now_ms - 60_000
    assert planned(stream, old, end) == [3]
    stream.stop()


def test_available_now_ends_with_what_is_due_now(stream: DueStream, broker: Endpoint) -> None:
    start, now_ms = stream.initialOffset(), broker.status().now_ms
    attach(broker, [now_ms, now_ms + 60_000])
    stream.prepareForTriggerAvailableNow()
    end = stream.latestOffset(start, ALL)
    assert planned(stream, start, end) == [1]
    assert stream.latestOffset(end, ALL)["due_ms"] == end["due_ms"]
    assert stream.reportLatestOffset()["due_ms"] >= now_ms
    stream.stop()


def test_deleted_version_plans_no_rows(stream: DueStream, broker: Endpoint) -> None:
    attach(broker, [broker.status().now_ms + 60_000])
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    assert planned(stream, start, {**end, "version": 999}) == []
    assert planned(stream, start, end) == [1]
    stream.stop()


def test_tasks_get_a_copy_without_connections(stream: DueStream, broker: Endpoint) -> None:
    stream.latestOffset(stream.initialOffset(), ALL)
    copy = pickle.loads(pickle.dumps(stream))
    assert copy._opened == {} and copy._files is None
    stream.stop()


# ---- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("lead", "5", "lead_ms"),
        ("lead_ms", "soon", "option lead_ms='soon'"),
        ("lead_ms", "60001", "option lead_ms"),
        ("rows_per_partition", "0", "option rows_per_partition"),
        ("endpoint", "host:1", "option endpoint"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(option: str, text: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        due_options({option: text})


def test_options_are_described(tmp_path: Path) -> None:
    assert set(describe()) == set(DueOptions.__struct_fields__)
    assert first_cells(section(page("docs/pipeline/dispatch.md"), "Run it")) >= set(describe())
    assert due_options({"checkpointLocation": str(tmp_path), "LEAD_MS": "7"}) == DueOptions(lead_ms=7)


def test_the_sink_takes_pointers_only() -> None:
    with pytest.raises(SetupError, match="only the columns of its own stream"):
        DueDataSource({}).streamWriter(StructType(), False)
