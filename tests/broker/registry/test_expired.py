"""Counts of expired messages: they add up, a start finds them, and a deleted group is remembered with its offsets."""

from __future__ import annotations

import pytest
from tests.broker.registry.state_rows import StateRows

from timeball.broker.registry.dead_letters import ExpiredMessages, ExpiredTopic, Expiry
from timeball.model import limits


def test_counts_add_up_and_a_start_finds_them() -> None:
    rows = StateRows()
    expired = rows.opened(ExpiredMessages)
    expired.add([Expiry("g", "a", 3, {0: 3}), Expiry("g", "b", 1, {})], 10)
    expired.changed([Expiry("g", "a", 2, {1: 2})], 20).keep()
    assert expired.topics("g")["a"] == ExpiredTopic(5, 20, {0: 3, 1: 2})
    expired.add([Expiry("g", "a", 1, {0: 4})], 30)
    again = rows.opened(ExpiredMessages)
    assert again.groups() == expired.groups()
    assert again.counted_to("g", "a") == {0: 4, 1: 2} and again.counted_to("g", "none") == {}
    assert again.topics("other") == {} and not again.is_deleted("g")


def test_a_deleted_group_is_remembered_while_its_offsets_stay() -> None:
    rows = StateRows()
    expired = rows.opened(ExpiredMessages)
    expired.note_deleted("never", keeps_offsets=False)
    assert rows.count == 0
    expired.add([Expiry("g", "a", 3, {})], 10)
    expired.note_deleted("g", keeps_offsets=True)
    assert rows.opened(ExpiredMessages).is_deleted("g") and expired.topics("g") == {}
    expired.note_deleted("g", keeps_offsets=False)
    assert not expired.is_deleted("g") and rows.opened(ExpiredMessages).groups() == {}


def test_the_oldest_topics_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EXPIRED_TOPICS_MAX", 2)
    expired = StateRows().opened(ExpiredMessages)
    for at_ms, topic in enumerate(["a", "b", "c"]):
        expired.add([Expiry("g", topic, 1, {})], at_ms)
    assert expired.topics("g").keys() == {"b", "c"}
