"""Schedules as rows: kept through a start, in order, and found by the number of their pending occurrence."""

from __future__ import annotations

import msgspec
import pytest
from tests.broker.registry.state_rows import StateRows

from timeball.broker.registry.meta import MetaLog
from timeball.broker.registry.schedules import Entry, Progress, ScheduleFacts, Schedules, State
from timeball.model.errors import Corrupt, NotFound
from timeball.model.message import meta_rows

FACTS = ScheduleFacts(rule=msgspec.Raw(b'{"every":"10m"}'), topic="orders", body=b"body")


class Log(StateRows):
    """Appends the rows of changes, as the broker does with the other rows of their frames."""

    def change(self, schedules: Schedules, *entries: Entry) -> None:
        change = schedules.changed(list(entries))
        self.appended.append(change.rows)
        change.keep()


def test_a_schedule_and_its_progress_survive_a_restart() -> None:
    log = Log()
    schedules, meta = log.opened(Schedules), Progress(State.ACTIVE, 5, number=7, due_ms=10, at_ms=5)
    log.change(schedules, Entry("a", None, meta, FACTS), Entry("b", None, Progress(State.PAUSED, 3), FACTS))
    after = Progress(State.ACTIVE, 10, number=9, due_ms=20, at_ms=10, runs=1, last_due_ms=10, last_ms=11)
    log.change(schedules, Entry("a", meta, after))
    for known in (schedules, log.opened(Schedules)):
        assert known.get("a") == (FACTS, after)
        assert known.get("b") == (FACTS, Progress(State.PAUSED, 3))
        assert (len(known), known.occurrences) == (2, {9: "a"})
        assert list(known.names_after("")) == ["a", "b"] and list(known.names_after("a")) == ["b"]
        assert known.size_bytes == schedules.size_bytes > 0


def test_a_deleted_schedule_is_forgotten() -> None:
    log = Log()
    schedules, meta = log.opened(Schedules), Progress(State.ACTIVE, 5, number=7, due_ms=10, at_ms=5)
    log.change(schedules, Entry("a", None, meta, FACTS))
    log.change(schedules, Entry("a", meta, None))
    for known in (schedules, log.opened(Schedules)):
        assert known.find("a") is None and len(known) == known.size_bytes == 0
        assert known.occurrences == {}
        with pytest.raises(NotFound):
            known.get("a")


@pytest.mark.parametrize("key", ["schedule/a", "occurrence/a"])
def test_a_damaged_value_is_an_error_at_the_start(key: str) -> None:
    log = StateRows()
    log.appended.append(meta_rows([(key, b"{")], 0))
    with pytest.raises(Corrupt, match=key):
        log.opened(Schedules)


def test_the_values_of_the_log_are_those_of_memory() -> None:
    meta = MetaLog()
    schedules = Schedules(meta)
    meta.open(lambda _: None, lambda: 0)
    before = Progress(State.ACTIVE, 5, number=7, due_ms=10, at_ms=5)
    change = schedules.changed([Entry("a", None, before, FACTS)])
    assert not meta.values, "nothing changes before the append"
    change.keep()
    assert set(meta.values) == {"schedule/a", "occurrence/a"}
    assert bytes(meta.values["occurrence/a"]) == b'[0,5,7,10,5,0,0,0,""]'
