"""Checksums by columns are those of google_crc32c, for any length and number of records."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest

from timeball.schedule import checksums

RECORD = np.dtype([("a", "<i8"), ("b", "<i8"), ("c", "<u4")])


@pytest.mark.parametrize("rows", [0, 1, checksums.FEW, checksums.FEW + 1, 999])
@pytest.mark.parametrize("size", [1, 16, 24, 40])
def test_they_are_those_of_the_library(rows: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK", 100)
    raw = np.random.default_rng(rows).integers(0, 256, rows * size, dtype=np.uint8)
    found = checksums.of_records(raw.view(f"V{size}"))
    assert found.tolist() == [google_crc32c.value(row.tobytes()) for row in raw.reshape(rows, size)]


def test_records_of_fields() -> None:
    records = np.zeros(200, RECORD)
    records["a"], records["c"] = np.arange(200) - 100, 7
    assert checksums.of_records(records).tolist() == [google_crc32c.value(each.tobytes()) for each in records]
