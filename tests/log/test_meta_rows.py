"""META rows: what was written is read, and secret values stay inside."""

from __future__ import annotations

import pyarrow as pa

from timeball.log.format import with_seq
from timeball.log.meta_rows import meta_rows, pairs_of, without_secrets
from timeball.message import Kind, build_rows

PAIRS = [("topic/a", b'{"queues":1}'), ("secret/receipts", b'"c2VjcmV0"'), ("group/g", b"")]


def test_keys_and_values_are_read_as_they_were_written() -> None:
    rows = meta_rows(PAIRS, 7)
    assert list(pairs_of(rows)) == PAIRS
    assert set(rows.column("kind").to_pylist()) == {Kind.META}
    assert set(rows.column("store_ms").to_pylist()) == {7}


def test_a_secret_is_null_and_everything_else_as_it_was() -> None:
    message = build_rows(1, kind=int(Kind.MESSAGE), topic="a", body=b"body", unique_key="secret/of a user")
    rows = with_seq(pa.concat_batches([meta_rows(PAIRS, 7), message]), 1)
    shown = without_secrets(rows)
    assert shown.column("body").to_pylist() == [PAIRS[0][1], None, b"", b"body"]
    assert shown.drop_columns(["body"]).equals(rows.drop_columns(["body"]))
    none = rows.slice(3)
    assert without_secrets(none) is none
