"""Tests of timeball.spark.run.session: Spark and the engine without Spark alternate on the same tables."""

from __future__ import annotations

from pathlib import Path

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

# Written by both: of the ledger each event, of the archive each message that passed.
KEYS = {"ledger": ("event", "event_seq", "first_seq"), "archive": ("kind", "seq", "topic")}
JOBS = (ledger.JOB, archive.JOB)


def drain(engine: Engine, node: RunningNode) -> None:
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
    """Nothing is missing and nothing is there twice, whichever was first, and if both find the same work."""
    first, second = (engine, InProcessEngine()) if spark_first else (InProcessEngine(), engine)
    for number, each in enumerate((first, second, first)):
        send(node.endpoint, 20)
        send_due_now(node.endpoint, 3, f"topic-{number}")
        drain(each, node)
    before = rows(broker)
    drain(second, node)
    assert rows(broker) == before
    assert [len(before[name]) for name in KEYS] == [3 * (20 + 3 + 3), 3 * 3]
    assert all(len(set(result)) == len(result) for result in before.values())


def test_all_engines_write_the_same_table(engine: SparkEngine, node: RunningNode, broker: Endpoint) -> None:
    """Columns, properties, partitions, statistics and marks; names of files and instants are each one's own."""
    send(node.endpoint, 20)
    send_due_now(node.endpoint, 3)
    data = Path(broker.status().table.uri).parent
    for name, each in (("a", engine), ("b", InProcessEngine())):
        for job in JOBS:
            job.start(each, node.endpoint, once=True, uri=str(data / name / job.name)).awaitTermination()
    for job in JOBS:
        one, other = (DeltaTable(str(data / name / job.name)) for name in ("a", "b"))
        assert one.schema() == other.schema() and one.version() == other.version()
        assert one.metadata().configuration == other.metadata().configuration
        counts = [sorted(file["num_records"] for file in adds(table)) for table in (one, other)]
        assert counts[0] == counts[1] != []
    assert ledger.bounds(DeltaTable(str(data / "a/ledger"))) == ledger.bounds(
        DeltaTable(str(data / "b/ledger"))
    )
    assert archive.read_range(DeltaTable(str(data / "a/archive"))) == archive.read_range(
        DeltaTable(str(data / "b/archive"))
    )


def adds(table: DeltaTable) -> list[dict[str, object]]:
    import pyarrow as pa

    result: list[dict[str, object]] = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    return result


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
