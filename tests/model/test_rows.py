"""Rows built by name have their values in the columns of those names."""

from __future__ import annotations

import pytest

from timeball.model.message import LOG_SCHEMA, Kind
from timeball.model.rows import cancel_row


@pytest.mark.parametrize(("due_seq", "version_seq"), [(7, None), (9, 9)])
def test_a_cancel_row_has_each_value_in_its_column(due_seq: int, version_seq: int | None) -> None:
    row = cancel_row(
        topic="orders", source_seq=7, due_seq=due_seq, due_ms=5_000, store_ms=1_000,
        keys="k", unique_key="id", properties="p", accepted_ms=500,
    )  # fmt: skip
    values = dict(zip(LOG_SCHEMA.names, row, strict=True))
    assert {name: value for name, value in values.items() if value is not None} == {
        "kind": Kind.CANCEL, "topic": "orders", "queue_id": -1, "keys": "k", "unique_key": "id", "properties": "p",
        "store_ms": 1_000, "due_ms": 5_000, "accepted_ms": 500, "source_seq": 7,
        **({} if version_seq is None else {"version_seq": version_seq}),
    }  # fmt: skip
