"""Release streams of pyarrow's client: one answer for each batch, in order, and invalid batches are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from tests.edges.flight.test_exchange import answers
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node
from tests.spark.due_rows import status

from timeball.edges.shared.arrow_ipc import ReleaseColumns
from timeball.model import limits
from timeball.model.errors import InvalidMessage, OverLimit
from timeball.model.message import TABLE_SCHEMA
from timeball.schedule.loaded import LoadBounds
from timeball.table import layout
from timeball.table.attachment import Attachment

RELEASE = flight.FlightDescriptor.for_path(b"release")


def rows(dues: list[int], first_seq: int, **columns: Any) -> pa.RecordBatch:
    """Return the rows of a table of pending messages: one row for each due time, with seqs from `first_seq` on."""
    complete = {
        "seq": list(range(first_seq, first_seq + len(dues))),
        "due_ms": dues,
        "topic": ["brought"] * len(dues),
        "body": [b"body"] * len(dues),
        "accepted_ms": [0] * len(dues),
        **columns,
    }
    return pa.RecordBatch.from_arrays(
        [pa.array(complete.get(field.name, [None] * len(dues)), field.type) for field in TABLE_SCHEMA],
        schema=TABLE_SCHEMA,
    )


@pytest.fixture
def leased(tmp_path: Path) -> Iterator[RunningNode]:
    """Run a node that leaves due messages to the dispatcher for an hour."""
    bounds = LoadBounds(ahead_ms=1_000, grace_ms=limits.HOUR_MS)
    with running_node(tmp_path / "data", load_bounds=bounds) as running:
        yield running


def attach(node: RunningNode, after_ms: int, count: int) -> pa.RecordBatch:
    """Attach a file with rows that are due after `after_ms`, and lease them to a dispatcher. Return the rows."""
    with flight.FlightClient(node.endpoint) as wire:
        list(wire.do_action(flight.Action("dispatcher", b'{"lease_ms": 600000}')))
    due_ms = status(node)["now_ms"] + after_ms
    batch = rows([due_ms] * count, node.run(node.broker.reserve(count)))
    entries = []
    for entry, data in layout.cut_files(pa.Table.from_batches([batch]), due_ms):
        path = node.settings.data / layout.FOLDER / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        entries.append(entry)
    ranges = [(batch["seq"][0].as_py(), count)]
    node.run(node.broker.attach(Attachment(job="bulk", job_id="b", epoch=1, files=entries, ranges=ranges)))
    return batch


def exchange(wire: flight.FlightClient, schema: pa.Schema = TABLE_SCHEMA) -> tuple[Any, Any]:
    """Open a stream for released rows, and send its schema."""
    writer, reader = wire.do_exchange(RELEASE, flight.FlightCallOptions(timeout=BOUND_S))
    writer.begin(schema)
    return writer, reader


def test_each_release_batch_has_its_answer(leased: RunningNode) -> None:
    batch = attach(leased, 3_000, 100)
    counts = leased.broker.schedule_statistics
    eventually(lambda: counts()["dispatched_rows"] == 100, "the dispatcher must release them")
    with flight.FlightClient(leased.endpoint) as wire:
        writer, reader = exchange(wire)
        writer.write_batch(batch)
        writer.done_writing()
        (early,) = answers(reader)
        assert early["error"] == "out_of_range"
        eventually(lambda: status(leased)["now_ms"] >= batch["due_ms"][0].as_py(), "they are due")
        writer, reader = exchange(wire)
        for part in (batch.slice(0, 30), batch.slice(20, 80), rows([1], 1 << 40), batch):
            writer.write_batch(part)
        writer.done_writing()
        received = list(answers(reader))
    assert received == [
        {"released": 30, "left": 0}, {"released": 70, "left": 10},
        {"released": 0, "left": 1}, {"released": 0, "left": 100},
    ]  # fmt: skip
    assert sum(high for _, high in leased.broker.queues("brought").values()) == 100


def test_an_invalid_release_batch_is_refused_and_the_stream_continues(wire: flight.FlightClient) -> None:
    writer, reader = exchange(wire)
    for batch in (rows([1], 7, body=[None]), rows([1], 7)):
        writer.write_batch(batch)
    writer.done_writing()
    refused, answered = answers(reader)
    assert refused["error"] == "invalid_message" and "'body'" in refused["text"]
    assert answered == {"released": 0, "left": 1}


def test_a_release_stream_with_other_columns_is_refused(wire: flight.FlightClient) -> None:
    schema = pa.schema([("topic", pa.string())])
    writer, reader = exchange(wire, schema)
    writer.done_writing()
    with pytest.raises(flight.FlightServerError, match="'seq' must be there once"):
        list(answers(reader))


def test_an_unknown_path_is_refused_with_the_three_known_paths(wire: flight.FlightClient) -> None:
    with pytest.raises(flight.FlightServerError, match=r"\['send'\], \['source'\] and \['release'\]"):
        writer, reader = wire.do_exchange(flight.FlightDescriptor.for_path(b"relese"))
        writer.begin(TABLE_SCHEMA)
        list(answers(reader))


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([field for field in TABLE_SCHEMA if field.name != "body"]),
        pa.schema([*TABLE_SCHEMA, ("body", pa.binary())]),
        pa.schema([*TABLE_SCHEMA, ("delay_ms", pa.int64())]),
        pa.schema([f if f.name != "due_ms" else pa.field("due_ms", pa.int32()) for f in TABLE_SCHEMA]),
    ],
)
def test_missing_additional_or_wrong_columns_are_refused(schema: pa.Schema) -> None:
    with pytest.raises(InvalidMessage, match=r"'(body|delay_ms|due_ms)'"):
        ReleaseColumns(schema)


def test_columns_in_any_order_are_accepted() -> None:
    batch = rows([1, 2], 1)
    reversed_columns = batch.select(TABLE_SCHEMA.names[::-1])
    assert ReleaseColumns(reversed_columns.schema).check_and_convert(reversed_columns, None).equals(batch)


def test_empty_and_too_large_release_batches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = ReleaseColumns(TABLE_SCHEMA)
    monkeypatch.setattr(limits, "ROWS_PER_REQUEST_MAX", 2)
    with pytest.raises(OverLimit, match="3 rows in one batch; at most 2"):
        columns.check_and_convert(rows([1] * 3, 1), None)
    with pytest.raises(InvalidMessage, match="an empty batch"):
        columns.check_and_convert(rows([], 1), None)
    long = pa.array([b"b" * (limits.BODY_BYTES_MAX + 1)], pa.binary())
    batch = rows([1], 1)
    with pytest.raises(InvalidMessage, match=f"more than {limits.BODY_BYTES_MAX} bytes"):
        columns.check_and_convert(batch.set_column(batch.schema.get_field_index("body"), "body", long), None)
    monkeypatch.setattr(limits, "BATCH_BYTES_MAX", 3)
    with pytest.raises(OverLimit, match="smaller"):
        columns.check_and_convert(rows([1], 1), None)


def test_a_stop_ends_release_streams_after_their_answers(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node, flight.FlightClient(node.endpoint) as wire:
        writer, reader = exchange(wire)
        writer.write_batch(rows([1], 1))
        assert next(answers(reader)) == {"released": 0, "left": 1}
        node.run(node.node.edges.flight.close())
        with pytest.raises(flight.FlightError):
            writer.write_batch(rows([1], 1))
            writer.done_writing()
            json.dumps(list(answers(reader)))
            raise flight.FlightCancelledError("the stream has ended by itself")
