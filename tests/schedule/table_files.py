"""Rows of the pending table for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from timeball.model.message import TABLE_SCHEMA


def table_rows(due_times: Sequence[int], seqs: Sequence[int], accepted_ms: int) -> pa.Table:
    """Build TABLE_SCHEMA rows. The body contains the number."""
    bodies = [f"bulk {seq}" for seq in seqs]
    columns = {name: pa.nulls(len(due_times), TABLE_SCHEMA.field(name).type) for name in TABLE_SCHEMA.names}
    columns |= {
        "seq": pa.array(np.array(seqs, np.int64)), "due_ms": pa.array(np.array(due_times, np.int64)),
        "body": pa.array(bodies).cast(pa.binary()), "topic": pa.array(["t"] * len(due_times)),
        "accepted_ms": pa.array([accepted_ms] * len(due_times), pa.int64()), "unique_key": pa.array(bodies),
    }  # fmt: skip
    return pa.Table.from_pydict(columns, TABLE_SCHEMA)
