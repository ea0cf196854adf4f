"""Tests of timeball.broker.registry.tables."""

from __future__ import annotations

import pytest
from tests.crash_files import CrashFiles

from timeball.broker.registry.meta import MetaLog, Restorable
from timeball.broker.registry.tables import Tables


def test_no_two_tables_restore_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes: list[str] = []
    register = MetaLog.register

    def recorded(log: MetaLog, prefix: str, table: Restorable) -> None:
        prefixes.append(prefix)
        register(log, prefix, table)

    monkeypatch.setattr(MetaLog, "register", recorded)
    Tables(CrashFiles(), queues_per_topic=4)
    assert len(prefixes) == len(set(prefixes)) > 10
