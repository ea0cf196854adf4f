"""Thresholds lowered, so that a table of a few files sees what otherwise needs dozens: rewrites and removals."""

from __future__ import annotations

import pytest

from timeball.broker import maintenance
from timeball.table import layout, merging


@pytest.fixture(autouse=True)
def few_files_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "BEHIND_FILES_MIN", 1)
    monkeypatch.setattr(merging, "FILES_MIN", 2)
    monkeypatch.setattr(layout, "FILE_ROWS", 8)
