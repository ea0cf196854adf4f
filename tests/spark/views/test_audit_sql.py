"""Tests of timeball.spark.views.audit_sql: sets of numbers and sums of positions. test_audit.py runs the texts."""

from __future__ import annotations

import numpy as np
import pytest

from timeball.broker.accepting import expiry
from timeball.broker.recurring import successors
from timeball.broker.registry import selections
from timeball.spark import log_events
from timeball.spark.views import audit_sql


def test_reasons_are_those_that_the_broker_writes() -> None:
    assert expiry.REASON == log_events.EXPIRED
    assert (successors.MISSED, successors.OVERLAP) == log_events.MISSED
    assert selections.reason_of("s1") == f"{log_events.SELECTION}s1"


@pytest.mark.parametrize("first", [1, 47, 48, 95, 96, 100])
@pytest.mark.parametrize("rows", [1, 2, 47, 48, 49, 200])
def test_the_bits_of_a_range_are_those_of_its_numbers(first: int, rows: int) -> None:
    groups, bits = audit_sql.bits_of_range(first, rows)
    found = [
        int(group) + bit
        for group, value in zip(groups, bits, strict=True)
        for bit in range(audit_sql.GROUP_NUMBERS)
        if int(value) >> bit & 1
    ]
    assert found == list(range(first, first + rows))


def sums(positions: list[int]) -> dict[str, int]:
    """What `AuditTexts.queues` computes of the positions of one queue."""
    residues = [position % audit_sql.PRIME for position in positions]
    sum_1, sum_2 = sum(residues), sum(residue**2 % audit_sql.PRIME for residue in residues)
    return {
        "first": min(positions), "last": max(positions), "uses": len(positions), "sum_1": sum_1, "sum_2": sum_2,
    }  # fmt: skip


@pytest.mark.parametrize("first", [0, 1, 17, audit_sql.PRIME - 3, 1 << 40])
def test_sums_tell_consecutive_positions_from_others(first: int) -> None:
    whole = list(range(first, first + 50))
    assert audit_sql.are_consecutive(**sums(whole))
    random = np.random.default_rng(first)
    for _ in range(200):
        missing, twice = random.choice(np.arange(1, 49), 2, replace=False)
        others = whole[:missing] + whole[missing + 1 :]
        assert not audit_sql.are_consecutive(**sums(others))
        assert not audit_sql.are_consecutive(**sums([*whole, whole[twice]]))
        assert not audit_sql.are_consecutive(**sums([*others, whole[twice]]))
