"""Tests of timeball.spark.dispatch: rows are sent when they are due, never before, each once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.node_fixture import RunningNode, eventually, running_node
from tests.spark.due_rows import all_out, attach, fetched, left, released

from timeball.io.clock import ManualClock
from timeball.model.errors import Unavailable
from timeball.model.limits import HOUR_MS
from timeball.schedule.loaded import LoadBounds
from timeball.spark import dispatch
from timeball.spark.dispatch import (
    LEAD_MS,
    BrokerClock,
    DueFiles,
    ReleaseCounts,
    ReleaseWriter,
    due_batches,
    encode_pointers,
    read_all,
    release_when_due,
)
from timeball.spark.endpoint import Endpoint

AHEAD_MS = 2_000
PATIENCE_MS = 60_000


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    """A broker that leaves all due rows to the dispatcher for ever."""
    bounds = LoadBounds(ahead_ms=AHEAD_MS, grace_ms=HOUR_MS)
    with running_node(tmp_path / "data", load_bounds=bounds, compact_rows=0) as running:
        with Endpoint(running.endpoint) as broker:
            broker.lease_dispatcher(HOUR_MS)
        yield running


def near(node: RunningNode, broker: Endpoint, after_ms: list[int]) -> pa.RecordBatch:
    """Attach rows due these times after two gathers from now. Waits until they are left to the dispatcher."""
    first_ms = broker.status().now_ms + 2 * AHEAD_MS
    attach(broker, [first_ms + ms for ms in after_ms])
    eventually(lambda: left(node) == len(after_ms), "they are left to us")
    return rows_of(broker)


def rows_of(broker: Endpoint) -> pa.RecordBatch:
    """Read all rows of the pending table, as a task of the dispatcher does."""
    rows = read_all(pointed(broker))
    assert rows is not None
    return rows


def pointed(broker: Endpoint) -> list[dict[str, object]]:
    """The pointers to all rows of the pending table."""
    table = broker.status().table
    files = DueFiles(table.uri)
    files.use_version(table.version)
    return encode_pointers(files.between(0, 1 << 62)).to_pylist()


def test_rows_are_released_as_they_become_due(node: RunningNode, broker: Endpoint) -> None:
    rows = near(node, broker, [0, 1, 500, 501, 900])
    assert release_when_due(rows, broker, PATIENCE_MS) == ReleaseCounts(5, 0)
    all_out(node, 5)
    assert broker.status().now_ms >= rows.column("due_ms")[4].as_py()
    assert fetched(node) == 0
    assert release_when_due(rows, broker, PATIENCE_MS) == ReleaseCounts(0, 5), "a repeated task"


def test_sink_task_releases_the_rows_of_its_pointers(node: RunningNode, broker: Endpoint) -> None:
    near(node, broker, [0] * 100)
    writer = ReleaseWriter(node.endpoint, LEAD_MS)
    message = writer.write(iter([pa.RecordBatch.from_pylist(pointed(broker))]))
    assert message == ReleaseCounts(100, 0)
    writer.commit([message, None], 0)
    writer.abort([None], 0)
    assert writer.write(iter([])) == ReleaseCounts()
    all_out(node, 100)


class Hasty(BrokerClock):
    """A clock that is ahead of the broker. Each time it is read, it is 200 ms less ahead."""

    ahead_ms = 1_000

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms

    def read_clock(self) -> None:
        super().read_clock()
        Hasty.ahead_ms -= 200


def test_rows_refused_as_early_are_sent_again(
    node: RunningNode, broker: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "BrokerClock", Hasty)
    monkeypatch.setattr(Hasty, "ahead_ms", 1_000)
    rows = near(node, broker, [0] * 10)
    assert release_when_due(rows, broker, PATIENCE_MS) == ReleaseCounts(10, 0)
    assert Hasty.ahead_ms < 800, "rows were refused, and the clock was read again"
    assert released(node) == 10


def test_rows_of_deleted_files_are_left_to_the_broker(
    node: RunningNode, broker: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    attach(broker, [broker.status().now_ms + HOUR_MS])
    (pointer,) = pointed(broker)
    assert read_all([{**pointer, "uri": f"{pointer['uri']}.not"}]) is None
    assert "file rewritten meanwhile" in caplog.text
    both = read_all([pointer, {**pointer, "uri": "/nowhere/x.parquet"}])
    assert both is not None and both.num_rows == 1


def test_rows_of_several_files_are_released_in_order(node: RunningNode, broker: Endpoint) -> None:
    now_ms = broker.status().now_ms + HOUR_MS
    attach(broker, [now_ms + ms for ms in (1, 3, 5)], job_id="one")
    attach(broker, [now_ms + ms for ms in (2, 3, 4)], job_id="two")
    assert [ms - now_ms for ms in rows_of(broker).column("due_ms").to_pylist()] == [1, 2, 3, 3, 4, 5]


def test_task_gives_up_when_the_clock_is_set_back(node: RunningNode, broker: Endpoint) -> None:
    attach(broker, [broker.status().now_ms + HOUR_MS])
    assert release_when_due(rows_of(broker), broker, 50) == ReleaseCounts(0, 0)


def test_missing_broker_raises_unavailable(node: RunningNode) -> None:
    with Endpoint(node.endpoint, patience_s=0) as broker:
        attach(broker, [broker.status().now_ms - 1])
        rows = rows_of(broker)
        node.stop()
        try:
            with pytest.raises(Unavailable):
                release_when_due(rows, broker, PATIENCE_MS)
        finally:
            node.start()


class Watch:
    """A broker's clock that shows the time that the test sets."""

    def __init__(self, now_ms: int) -> None:
        self.now = now_ms

    def now_ms(self) -> int:
        return self.now


@pytest.mark.parametrize(
    ("now_ms", "expected"), [(99, []), (100, [1]), (150, [2, 2, 1]), (10_000, [2, 2, 1])]
)
def test_batches_contain_only_due_rows(
    now_ms: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "BATCH_ROWS", 2)
    dues = [100, 101, 102, 150, 150]
    rows = pa.RecordBatch.from_pydict({"due_ms": pa.array(dues, pa.int64())})
    clock = ManualClock()
    batches = list(due_batches(rows, Watch(now_ms), clock.monotonic_ns(), clock))
    assert [batch.num_rows for batch in batches] == expected
    assert all(batch.column("due_ms")[-1].as_py() <= now_ms for batch in batches)
