"""Rows by value: which are alike, and how many values there are.

A commit of one row and one of a hundred thousand go the same way. For many rows Arrow's and numpy's kernels do the
work; below some hundred a kernel's fixed cost is the larger part, and a list is faster.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from timeball.message import SMALL_ROWS, Int64Array


def codes_of(column: pa.Array) -> tuple[Int64Array, list[str]]:
    """Each row's number in the list of distinct values, and that list."""
    if len(column) <= SMALL_ROWS:
        # A kernel's fixed cost is that of a hundred rows in Python, and most commits have fewer.
        values = column.to_pylist()
        if values.count(values[0] if values else None) == len(values):
            return np.zeros(len(values), dtype=np.int64), values[:1]
        numbers: dict[str, int] = {}
        codes = [numbers.setdefault(value, len(numbers)) for value in values]
        return np.array(codes, dtype=np.int64), list(numbers)
    encoded = column.dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def alike(values: Int64Array) -> list[Int64Array]:
    """The positions of each distinct value, in order."""
    if len(values) == 1:
        return [np.zeros(1, dtype=np.int64)]
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    begins, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(values)]
    return [order[begin:end] for begin, end in zip(begins, ends, strict=True)]


def filled(column: pa.Array, value: str | int) -> pa.Array:
    """The column with this value for nulls; itself when it has none, which is what a kernel would cost most for."""
    return column.fill_null(value) if column.null_count else column
