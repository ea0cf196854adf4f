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

Append = tuple[int, int, str, bool]  # rows, numbers set aside behind them, in which form, visible

APPENDS = st.lists(
    st.tuples(
        st.integers(1, 3), st.integers(0, 2), st.sampled_from(["values", "pyarrow", "message", "batch", "part"]),
        st.booleans(),
    ),
    max_size=40,
)  # fmt: skip


def values(first_seq: int, count: int, is_visible: bool) -> list[LogRow]:
    rows = []
    for at in range(count):
        row = dict.fromkeys(LOG_SCHEMA.names) | {"kind": int(Kind.MESSAGE), "body": b"%d" % (first_seq + at)}
        rows.append(tuple((row | {"queue_id": 0, "queue_offset": at if is_visible else None}).values()))
    return rows


def in_form(form: str, rows: list[LogRow]) -> Rows:
    if form == "batch":
        return rows_of(rows)
    if form == "part":  # of columns, as it stands in them
        return rows_of([*rows, *rows, rows[0]]).slice(len(rows), len(rows))
    if form == "message":  # as an edge that writes it itself
        encoded = build_by_pyarrow(rows)
        return EncodedRows(encoded.message, encoded.queue_ids, encoded.queue_offsets)
    return build_by_pyarrow(rows) if form == "pyarrow" else build(rows)


@given(APPENDS, st.integers(1, 10), st.data())
def test_kept_rows_equal_those_of_the_log(
    appends: list[Append], committed_max: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "COMMITTED_MAX", committed_max)
        newest, log, held, seq = NewestRows(), {}, [], 1
        for count, span, form, is_visible in appends:
            rows = values(seq, count, is_visible)
            if is_visible:
                newest.add(seq, in_form(form, rows))
            log.update({seq + at: (seq + at, *row) for at, row in enumerate(rows)})
            if is_visible:
                held = [*held, range(seq, seq + count)][-committed_max:]
            seq += count + span
        assert len(newest) == len(held)
        known = {each for some in held for each in some}
        for each in range(seq + 2):
            assert newest.values_of([each]) == ([log[each]] if each in known else None)
        some = data.draw(st.lists(st.integers(0, seq), max_size=4))
        expected = [log[each] for each in some] if known.issuperset(some) else None
        assert newest.values_of(some) == expected


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
    assert newest.values_of([8]) is not None and newest.values_of([9]) is None, "it is too large"
