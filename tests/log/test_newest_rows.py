"""The newest rows in memory equal those of the log, and missing ones are reported as missing."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.log import writer
from timeball.log.row_encoder import EncodedRows, Rows, build, build_by_pyarrow, rows_of
from timeball.log.writer import NewestRows
from timeball.model.message import LOG_SCHEMA, Kind, LogRow

Append = tuple[int, int, str, bool]  # rows, numbers reserved behind them, form (see `in_form`), visible

APPENDS = st.lists(
    st.tuples(
        st.integers(1, 3), st.integers(0, 2), st.sampled_from(["values", "pyarrow", "message", "batch", "part"]),
        st.booleans(),
    ),
    max_size=40,
)  # fmt: skip


def values(first_seq: int, count: int, is_visible: bool) -> list[LogRow]:
    """Build rows whose bodies are their sequence numbers."""
    rows = []
    for index in range(count):
        row = dict.fromkeys(LOG_SCHEMA.names) | {
            "kind": int(Kind.MESSAGE),
            "body": b"%d" % (first_seq + index),
        }
        rows.append(tuple((row | {"queue_id": 0, "queue_offset": index if is_visible else None}).values()))
    return rows


def in_form(form: str, rows: list[LogRow]) -> Rows:
    """Build the rows as the broker or an edge would append them."""
    if form == "batch":
        return rows_of(rows)
    if form == "part":  # a slice of a batch
        return rows_of([*rows, *rows, rows[0]]).slice(len(rows), len(rows))
    if form == "message":  # encoded by an edge, without values
        encoded = build_by_pyarrow(rows)
        return EncodedRows(encoded.message, encoded.queue_ids, encoded.queue_offsets)
    return build_by_pyarrow(rows) if form == "pyarrow" else build(rows)


@given(APPENDS, st.integers(1, 10), st.data())
def test_kept_rows_equal_those_of_the_log(
    appends: list[Append], appends_max: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "APPENDS_MAX", appends_max)
        newest, log, kept_ranges, next_seq = NewestRows(), {}, [], 1
        for count, reserved, form, is_visible in appends:
            rows = values(next_seq, count, is_visible)
            log.update({seq: (seq, *row) for seq, row in enumerate(rows, next_seq)})
            if is_visible:
                newest.add(next_seq, in_form(form, rows))
                kept_ranges = [*kept_ranges, range(next_seq, next_seq + count)][-appends_max:]
            next_seq += count + reserved
        assert len(newest) == len(kept_ranges)
        kept_seqs = {seq for kept_range in kept_ranges for seq in kept_range}
        for seq in range(next_seq + 2):
            assert newest.values_of([seq]) == ([log[seq]] if seq in kept_seqs else None)
        some_seqs = data.draw(st.lists(st.integers(0, next_seq), max_size=4))
        expected = [log[seq] for seq in some_seqs] if kept_seqs.issuperset(some_seqs) else None
        assert newest.values_of(some_seqs) == expected


def test_bytes_of_kept_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(values(1, 1, True))
    size_bytes = rows.get_total_buffer_size()
    monkeypatch.setattr(writer, "BYTES_MAX", 3 * size_bytes)
    monkeypatch.setattr(writer, "APPEND_BYTES_MAX", 2 * size_bytes)
    newest = NewestRows()
    for seq in range(1, 9):
        newest.add(seq, rows)
    assert len(newest) == 3
    assert [newest.values_of([seq]) is None for seq in range(1, 9)] == [True] * 5 + [False] * 3
    newest.add(9, pa.concat_batches([rows] * 20))
    assert newest.values_of([9]) is None, "the append is too large"
    assert newest.values_of([8]) is not None
