"""A small run of the push under kills; `python -m tests.edges.push.siege 100000` is the large one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.edges.push.siege import Record, run_siege


@pytest.mark.slow
def test_after_kills_of_broker_and_receiver_each_message_is_delivered_or_a_dead_letter(
    tmp_path: Path,
) -> None:
    record = run_siege(tmp_path, 10_000)
    assert record.faults() == []
    assert record.outcomes["failed"] and record.outcomes["hung"]
    assert len(record.kills) == 4


def test_a_record_with_a_fault_is_noticed() -> None:
    """The control: `Record.faults` reports each fault that a push could have."""

    def record(**changes: object) -> Record:
        sound = {"sent": {"a", "b"}, "grants": {"a": [10.0]}, "dead": ["b"], "kills": [(12.0, "broker")]}
        return Record(**{**sound, **changes})  # type: ignore[arg-type]

    assert record().faults() == []
    assert record(grants={"a": [10.0, 50.0]}).faults() == []
    assert record(dead=[]).faults() == ["lost: b"]
    assert record(grants={"a": [10.0], "c": [10.0]}).faults() == ["never sent: c"]
    assert record(dead=["b", "b"]).faults() == ["dead twice: b"]
    assert record(grants={"a": [20.0, 50.0]}).faults() == ["sent twice for no reason: 1"]
    forged = record()
    forged.outcomes["forged"] = 1
    assert forged.faults() == ["forged: 1"]
