"""Tests of timeball.spark.views.forecast, on a real broker, without Spark."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from tests.node_fixture import BOUND_S, RunningNode, running_node
from tests.spark.traffic import send
from tests.written_again import apply_retention, fill_segment

from timeball.io.clock import ManualClock
from timeball.model.config import MIB
from timeball.model.errors import InvalidMessage, NotFound, OutOfRange, RequestError, SetupError
from timeball.model.limits import DAY_MS, HOUR_MS, SECOND_MS
from timeball.model.message import Int64Array
from timeball.spark.endpoint import Endpoint
from timeball.spark.table_store import ANY_DUE_TIME, Due
from timeball.spark.views.duckdb_session import SqlSession
from timeball.spark.views.due_histogram import Load, Peak, Unit, from_due_ms, share_of_difference
from timeball.spark.views.forecast import (
    Bar,
    check,
    load_of_file,
    released_since,
    report,
    version_at,
)
from timeball.spark.views.snapshot import Snapshot

NINE_MS = 1_896_080_400_000  # 2030-01-31T09:00:00Z


def forecast(
    broker: Endpoint, *, by_topic: bool = False, version: int | None = None, due: Due = ANY_DUE_TIME
) -> Load:
    """Count the upcoming messages, now or at a version of the table."""
    with SqlSession(broker.uri, upcoming=True, version=version, bodies=False, due=due) as session:
        return session.due_load(by_topic=by_topic)


def totals(load: Load) -> dict[str, int]:
    """Count the rows of each topic."""
    return {name: part.total for name, part in load.by_topic().items()}


def test_forecast_counts_each_pending_message(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 20)
    node.run(node.broker.compact())
    send(node.endpoint, 5, topic="mail", after_ms=DAY_MS)
    node.run(node.broker.cancel(seqs=[2, 3]))
    assert totals(forecast(broker, by_topic=True)) == {"orders": 18, "mail": 5}
    assert totals(forecast(broker)) == {"": 23}
    now_ms = broker.status().now_ms
    assert forecast(broker, due=(None, now_ms + 2 * DAY_MS)).total == 5


def test_an_older_version_gives_the_forecast_of_its_time(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 20)
    node.run(node.broker.compact())
    version = broker.status().table.version
    before = forecast(broker, version=version)
    node.run(node.broker.cancel(seqs=list(range(2, 12))))
    send(node.endpoint, 3)
    node.run(node.broker.compact())
    assert (forecast(broker).total, forecast(broker, version=version).total) == (13, 20)
    assert share_of_difference(before, forecast(broker, version=version), Unit.SECOND) == 0


def test_version_at_finds_the_version_of_a_time(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 20)
    node.run(node.broker.compact())
    uri = broker.status().table.uri
    assert version_at(uri, broker.status().now_ms + HOUR_MS) == broker.status().table.version
    with pytest.raises(NotFound, match="no version so old: the first is of"):
        version_at(uri, 1_000)
    with pytest.raises(SetupError, match="run this where the broker's data folder is"):
        version_at(uri + "/elsewhere", 1_000)


def advance_through(clock: ManualClock, node: RunningNode, times_ms: Int64Array) -> None:
    """Advance the clock to each of these times, and wait until all messages due by then are released."""
    for time_ms in np.unique(times_ms).tolist():
        clock.advance(time_ms - clock.wall)
        node.run(released(node, time_ms))


async def released(node: RunningNode, due_ms: int) -> None:
    """Wait until all messages due at `due_ms` or earlier are settled."""
    node.broker.ticker.wake()
    async with asyncio.timeout(BOUND_S):
        while node.broker.scheduling.scheduler.settled_before_ms <= due_ms:
            await asyncio.sleep(0.005)


def test_forecast_equals_the_releases(tmp_path: Path) -> None:
    """The load has bursts and gaps, on a manual clock. The controls: forecasts without one message, and 1 s late."""
    clock = ManualClock(wall=NINE_MS)
    generator = np.random.default_rng(7)
    burst_s, burst_rows = generator.integers(60, 3_600, 25), generator.integers(1, 40, 25)
    due_ms = NINE_MS + SECOND_MS * np.sort(burst_s.repeat(burst_rows))
    with running_node(tmp_path / "d", clock, compact_rows=0) as node, Endpoint(node.endpoint) as broker:
        with node.client() as ball:
            half = len(due_ms) // 2
            for part in (due_ms[:half], due_ms[half:]):
                rows = {"topic": ["t"] * len(part), "body": pa.array([b"x"] * len(part), pa.binary())}
                ball.send_many(pa.table({**rows, "due_ms": pa.array(part)}))
                ball.compact()  # the messages are in two files
            expected = forecast(broker)
            assert report(expected).peaks[0].rows == int(np.unique(due_ms, return_counts=True)[1].max())
        advance_through(clock, node, due_ms)
        actual, _ = released_since(broker, Snapshot.pin(broker, version=0))
        assert (actual.total, share_of_difference(expected, actual, Unit.SECOND)) == (len(due_ms), 0)
        assert share_of_difference(expected, from_due_ms(due_ms[1:]), Unit.SECOND) > 0
        assert share_of_difference(expected, from_due_ms(due_ms + SECOND_MS), Unit.SECOND) > 0.1


def test_a_check_compares_the_forecast_with_the_releases_until_now(tmp_path: Path) -> None:
    """The forecast has ten messages per minute for an hour. Then one is cancelled, and three are added."""
    clock = ManualClock(wall=NINE_MS)
    due_ms = NINE_MS + 6_000 * np.arange(1, 601)
    with running_node(tmp_path / "d", clock, compact_rows=0) as node, Endpoint(node.endpoint) as broker:
        with node.client() as ball:
            ball.send_many([{"topic": "t", "body": b"x", "due_ms": due} for due in due_ms.tolist()])
            ball.compact()
            node.run(node.broker.cancel(seqs=[5]))
            ball.send_many([{"topic": "mail", "body": b"x", "due_ms": NINE_MS + 60_000} for _ in range(3)])
        advance_through(clock, node, np.array([NINE_MS + 60_000, NINE_MS + 30 * 60_000]))
        snapshot = Snapshot.pin(broker, version=1)
        expected = forecast(broker, version=1)
        actual, now_ms = released_since(broker, snapshot, by_topic=True)
        assert (expected.total, totals(actual)) == (600, {"t": 299, "mail": 3})
        result = check(expected, actual, (None, None), now_ms + 1_000)
        assert (result.until_ms, result.said, result.came) == (now_ms + 1_000, 300, 302)
        # The clock was advanced in two steps, so all messages were released in two seconds.
        assert result.same_second < result.same_minute < result.same_hour == pytest.approx(1 - 2 / 602)
        first_minute = check(expected, actual, (None, NINE_MS + 60_000), now_ms)
        assert first_minute.until_ms == NINE_MS + 60_000
        assert (first_minute.said, first_minute.came) == (9, 0)


def test_check_is_refused_after_retention_removed_rows(tmp_path: Path) -> None:
    with running_node(tmp_path / "d", segment_bytes=MIB) as node, Endpoint(node.endpoint) as broker:
        snapshot = Snapshot.pin(broker, version=0)
        fill_segment(node)
        apply_retention(node)
        with pytest.raises(OutOfRange, match="retention has removed what came after version 0"):
            released_since(broker, snapshot)


def test_a_report_has_bars_and_peaks_of_all_and_of_each_topic() -> None:
    due_ms = np.array([NINE_MS, NINE_MS + 1, NINE_MS + HOUR_MS, NINE_MS + HOUR_MS])
    load = from_due_ms(due_ms, pa.array(["a", "b", "b", "b"]))
    result = report(load, Unit.HOUR, peaks=1, by_topic=True)
    assert (result.rows, result.by, result.resolution_ms) == (4, "hour", 1_000)
    assert result.curve == [Bar(NINE_MS, 2), Bar(NINE_MS + HOUR_MS, 2)]
    assert result.peaks == [Peak(NINE_MS, 2, 2)]
    assert list(result.topics) == ["b", "a"]
    assert result.topics["b"].curve == [Bar(NINE_MS, 1), Bar(NINE_MS + HOUR_MS, 2)]
    assert (result.topics["b"].first_ms, result.topics["b"].last_ms) == (NINE_MS, NINE_MS + HOUR_MS)
    assert result.topics["b"].peak == Peak(NINE_MS + HOUR_MS, 2, 2)
    assert report(load).topics == {}
    assert report(Load(), by_topic=True).curve == []


CSV = "due,topic\n2030-01-31T09:00:00Z,a\n2030-01-31T10:00:00.250+01:00,b\n"


def test_load_of_a_csv_file(tmp_path: Path) -> None:
    file = tmp_path / "extra.csv"
    file.write_text(CSV)
    load = load_of_file(file)
    assert (totals(load), load.second.tolist()) == ({"a": 1, "b": 1}, [NINE_MS // 1_000] * 2)
    assert totals(load_of_file(file, topic="mail")) == {"mail": 2}
    assert load_of_file(file, column="due").total == 2


@pytest.mark.parametrize(
    "column",
    [
        pa.array([NINE_MS, NINE_MS]),
        pa.array([NINE_MS * 1_000 - 1, NINE_MS * 1_000], pa.timestamp("us", "UTC")),
        pa.array([NINE_MS, NINE_MS], pa.timestamp("ms", "America/New_York")),
    ],
)
def test_load_of_a_parquet_file_in_each_time_unit(tmp_path: Path, column: pa.Array) -> None:
    """Times are rounded up to the next millisecond, as in a write."""
    pq.write_table(pa.table({"when": column}), tmp_path / "extra.parquet")
    load = load_of_file(tmp_path / "extra.parquet", column="when")
    assert (load.second.tolist(), load.rows.tolist()) == ([NINE_MS // 1_000], [2])


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"due": ["2030-01-31 09:00:00"]}, "column due: timestamp.*a time without a zone names no instant"),
        ({"due": ["soon"]}, "column due: string, wanted instants with a zone"),
        ({"when": [1]}, "no column due_ms or due; name the one that holds the instants: when"),
        ({"due_ms": [-1]}, "before 1970"),
        ({"due_ms": [NINE_MS * 1_000]}, "beyond the year 9999"),
        ({"due_ms": [1, None], "row": [1, 2]}, "1 rows have no instant"),
    ],
)
def test_file_without_due_times_is_refused(
    tmp_path: Path, table: dict[str, list[object]], sentence: str
) -> None:
    csv.write_csv(pa.table(table), tmp_path / "extra.csv")
    with pytest.raises(InvalidMessage, match=r"extra\.csv: .*" + sentence):
        load_of_file(tmp_path / "extra.csv")


def test_a_file_that_cannot_be_read_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"extra\.txt: a file of Parquet or CSV"):
        load_of_file(tmp_path / "extra.txt")
    with pytest.raises(SetupError, match=r"cannot read .*nowhere\.csv"):
        load_of_file(tmp_path / "nowhere.csv")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(SetupError, match=r"cannot read .*bad\.parquet"):
        load_of_file(tmp_path / "bad.parquet")
