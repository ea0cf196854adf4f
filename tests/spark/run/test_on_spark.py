"""Tests of timeball.spark.run.session: Spark and the engine without Spark alternate on the same tables."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.node_fixture import RunningNode
from tests.spark.traffic import send, send_due_now

from timeball.model.errors import OutOfRange, Unavailable
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import archive, ledger
from timeball.spark.jobs.marked import Engine, InProcessEngine, Piece
from timeball.spark.run.session import SparkEngine

pytestmark = pytest.mark.spark

# The columns that identify a row: an event in the ledger, a message in the archive.
KEYS = {"ledger": ("event", "event_seq", "first_seq"), "archive": ("kind", "seq", "topic")}
JOBS = (ledger.JOB, archive.JOB)


def run_jobs_once(engine: Engine, node: RunningNode) -> None:
    """Run both jobs until they have processed all rows of the log."""
    for job in JOBS:
        options = {"max_rows_per_batch": "20", "rows_per_partition": "7"}
        job.start(engine, node.endpoint, once=True, options=options).awaitTermination()


def rows(broker: Endpoint) -> dict[str, list[tuple[object, ...]]]:
    """Read all rows of both tables, by their keys."""
    folder = Path(broker.status().table.uri).parent
    result = {}
    for name, keys in KEYS.items():
        table = DeltaTable(str(folder / name)).to_pyarrow_table(columns=list(keys))
        result[name] = sorted(zip(*(table.column(key).to_pylist() for key in keys), strict=True))
    return result


@pytest.mark.parametrize("spark_first", [True, False], ids=["to no Spark", "to Spark"])
def test_another_engine_continues_at_the_mark(
    engine: SparkEngine, node: RunningNode, broker: Endpoint, spark_first: bool
) -> None:
    """Each event and each message is recorded once. A run without new rows adds nothing."""
    first, second = (engine, InProcessEngine()) if spark_first else (InProcessEngine(), engine)
    for number, job_engine in enumerate((first, second, first)):
        send(node.endpoint, 20)
        send_due_now(node.endpoint, 3, f"topic-{number}")
        run_jobs_once(job_engine, node)
    before = rows(broker)
    run_jobs_once(second, node)
    assert rows(broker) == before
    assert [len(before[name]) for name in KEYS] == [3 * (20 + 3 + 3), 3 * 3]
    assert all(len(set(result)) == len(result) for result in before.values())


def test_all_engines_write_the_same_table(engine: SparkEngine, node: RunningNode, broker: Endpoint) -> None:
    """The same columns, properties, row counts of files, and marks. Names of files and times of commits differ."""
    send(node.endpoint, 20)
    send_due_now(node.endpoint, 3)
    data = Path(broker.status().table.uri).parent
    engines = {"spark": engine, "in-process": InProcessEngine()}
    for name, job_engine in engines.items():
        for job in JOBS:
            uri = str(data / name / job.name)
            job.start(job_engine, node.endpoint, once=True, uri=uri).awaitTermination()
    for job in JOBS:
        on_spark, in_process = (DeltaTable(str(data / name / job.name)) for name in engines)
        assert on_spark.schema() == in_process.schema() and on_spark.version() == in_process.version()
        assert on_spark.metadata().configuration == in_process.metadata().configuration
        assert row_counts(on_spark) == row_counts(in_process) != []
    ledgers = [ledger.bounds(DeltaTable(str(data / name / "ledger"))) for name in engines]
    archives = [archive.read_range(DeltaTable(str(data / name / "archive"))) for name in engines]
    assert ledgers[0] == ledgers[1] and archives[0] == archives[1]


def row_counts(table: DeltaTable) -> list[int]:
    """Read the number of rows of each file, sorted."""
    return sorted(pa.table(table.get_add_actions(flatten=True)).column("num_records").to_pylist())


def refuse(piece: Piece) -> None:
    raise OutOfRange(f"rows {piece}")


def fail(piece: Piece) -> None:
    raise KeyError("of a library")


def double(piece: Piece) -> int:
    return 2 * piece[0]


def test_results_are_in_order_and_errors_are_those_of_timeball(engine: SparkEngine) -> None:
    pieces = [(n, n + 1) for n in range(5)]
    assert engine.run("job", "numbers", double, pieces) == [0, 2, 4, 6, 8]
    assert engine.run("job", "numbers", double, []) == []
    with pytest.raises(OutOfRange, match=r"^rows \(0, 1\)$"):
        engine.run("job", "numbers", refuse, pieces[:1])
    with pytest.raises(Unavailable, match="of a library"):
        engine.run("job", "numbers", fail, pieces[:1])
    assert engine.is_alive()
