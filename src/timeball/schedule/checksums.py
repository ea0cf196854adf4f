"""CRC-32C of many short records of one length, computed column by column.

A checksum is linear but for a constant: that of a record is that of as many zeros, with a number for each byte's
value and position on top. So the records of a block cost one look-up for each of their bytes, some 30 ns for 24 of
them, and no Python for each record. The result is that of `google_crc32c.value`.
"""

from __future__ import annotations

from functools import cache

import google_crc32c
import numpy as np
import numpy.typing as npt

BLOCK = 16_384  # records at a time: their bytes, turned, and the result stay in the processor's cache
FEW = 64  # up to so many are faster one by one than as columns

Uint32Array = npt.NDArray[np.uint32]


def of_records(records: npt.NDArray[np.void]) -> Uint32Array:
    """Return the checksum of each record of a contiguous array."""
    size = records.dtype.itemsize
    raw = records.view(np.uint8).reshape(len(records), size)
    if len(raw) <= FEW:
        return np.array([google_crc32c.value(row.tobytes()) for row in raw], np.uint32)
    zeros, tables = _tables(size)
    sums = np.full(len(raw), zeros, np.uint32)
    for begin in range(0, len(raw), BLOCK):
        columns = np.ascontiguousarray(raw[begin : begin + BLOCK].T)
        of_block = sums[begin : begin + BLOCK]
        for table, column in zip(tables, columns, strict=True):
            of_block ^= table.take(column)
    return sums


@cache
def _tables(size: int) -> tuple[int, Uint32Array]:
    """Return the checksum of `size` zeros, and what each value of each byte changes of it."""
    zeros = google_crc32c.value(bytes(size))
    tables = np.empty((size, 256), np.uint32)
    for at in range(size):
        for value in range(256):
            tables[at, value] = google_crc32c.value(bytes(at) + bytes([value]) + bytes(size - at - 1)) ^ zeros
    return zeros, tables
