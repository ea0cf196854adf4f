"""Tests of timeball.spark.jobs.audit_snapshot. test_audit.py has audits with missing and damaged snapshots."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from timeball.model.errors import Corrupt, NotFound
from timeball.spark.jobs.audit_snapshot import (
    AuditSnapshot,
    Facts,
    read_snapshot,
    snapshot_uri,
    write_snapshot,
)
from timeball.spark.views.audit_sql import ENDED_SCHEMA

FACTS = Facts(
    since=1, end=90, end_ms=5, counts={"accepted": 3}, level_begin=90, queues={"orders": {0: 7, 3: 1}}
)
ENDED = pa.table([[5, 7], [9, 1 << 60], [1_000, 2_000]], schema=ENDED_SCHEMA)


def snapshot(facts: Facts = FACTS, ended: pa.Table = ENDED) -> AuditSnapshot:
    """A snapshot with three groups of numbers."""
    groups = np.array([0, 48, 480])
    return AuditSnapshot(facts, groups, groups + 1, groups - 5, ended)


@pytest.mark.parametrize("ended", [ENDED, ENDED_SCHEMA.empty_table()])
def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path, ended: pa.Table) -> None:
    uri = snapshot_uri(str(tmp_path / "pending"))
    with pytest.raises(NotFound):
        read_snapshot(uri)
    for _ in range(2):  # the second replaces the first
        write_snapshot(uri, snapshot(ended=ended))
    found = read_snapshot(uri)
    assert found.facts == FACTS and found.ended.equals(ended)
    for name in ("groups", "open_bits", "due_sums"):
        assert getattr(found, name).tolist() == getattr(snapshot(), name).tolist()
    assert [file.name for file in (tmp_path / "pipeline").iterdir()] == ["audit.balance"]


def test_a_snapshot_of_another_version_is_refused(tmp_path: Path) -> None:
    uri = snapshot_uri(str(tmp_path / "pending"))
    write_snapshot(uri, snapshot(msgspec.structs.replace(FACTS, version=2)))
    with pytest.raises(Corrupt, match="another version"):
        read_snapshot(uri)


def test_each_flipped_byte_is_noticed(tmp_path: Path) -> None:
    uri = snapshot_uri(str(tmp_path / "pending"))
    write_snapshot(uri, snapshot())
    data = Path(uri).read_bytes()
    for at in range(len(data)):
        Path(uri).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(Corrupt, match="damaged"):
            read_snapshot(uri)


def test_a_snapshot_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pipeline").write_text("a file in place of the folder")
    with caplog.at_level(logging.WARNING):
        write_snapshot(snapshot_uri(str(tmp_path / "pending")), snapshot())
    assert "snapshot of the audit not written" in caplog.text
