"""Schedules as rows: kept through a start, in order, and found by the number of their pending occurrence."""

from __future__ import annotations

import msgspec
import pytest
from tests.broker.registry.state_rows import StateRows

from timeball.broker.registry.meta import MetaLog
from timeball.broker.registry.schedules import (
    Entry,
    Progress,
    ScheduleFacts,
    Schedules,
    State,
    encode_progress,
)
from timeball.model.errors import Corrupt, NotFound
from timeball.model.message import meta_rows

FACTS = ScheduleFacts(rule=msgspec.Raw(b'{"every":"10m"}'), topic="orders", body=b"body")


class Log(StateRows):
    """Appends the rows of changes, as the broker does with the other rows of their frames."""

    def change(self, schedules: Schedules, *entries: Entry) -> None:
        """Apply these changes in one frame."""
        change = schedules.build_change(list(entries))
        self.appended.append(change.rows)
        change.apply()


def test_a_schedule_and_its_progress_survive_a_restart() -> None:
    log = Log()
    schedules, before = log.opened(Schedules), Progress(State.ACTIVE, 5, number=7, due_ms=10, at_ms=5)
    log.change(schedules, Entry("a", before, FACTS), Entry("b", Progress(State.PAUSED, 3), FACTS))
    after = Progress(State.ACTIVE, 10, number=9, due_ms=20, at_ms=10, runs=1, last_due_ms=10, last_ms=11)
    log.change(schedules, Entry("a", after))
    for restored in (schedules, log.opened(Schedules)):
        assert restored.get("a") == (FACTS, after)
        assert restored.get("b") == (FACTS, Progress(State.PAUSED, 3))
        assert (len(restored), list(restored.occurrences), restored.name_of(9)) == (2, [9], "a")
        assert list(restored.names_after("")) == ["a", "b"] and list(restored.names_after("a")) == ["b"]
        assert restored.size_bytes == schedules.size_bytes > 0


def test_a_deleted_schedule_is_forgotten() -> None:
    log = Log()
    schedules, progress = log.opened(Schedules), Progress(State.ACTIVE, 5, number=7, due_ms=10, at_ms=5)
    log.change(schedules, Entry("a", progress, FACTS))
    log.change(schedules, Entry("a", None))
    for restored in (schedules, log.opened(Schedules)):
        assert restored.find("a") is None and len(restored) == restored.size_bytes == 0
        assert list(restored.occurrences) == []
        with pytest.raises(NotFound):
            restored.get("a")


@pytest.mark.parametrize("key", ["schedule/a", "occurrence/a"])
def test_a_damaged_schedule_value_stops_the_start(key: str) -> None:
    log = StateRows()
    log.appended.append(meta_rows([(key, b"{")], 0))
    with pytest.raises(Corrupt, match=key):
        log.opened(Schedules)


def test_a_change_of_a_schedule_takes_effect_when_keep_is_called_and_only_in_the_columns() -> None:
    meta = MetaLog()
    schedules = Schedules(meta)
    meta.open(lambda _: None, lambda: 0)
    before = Progress(State.ACTIVE, 5, number=7, due_ms=10, at_ms=5)
    change = schedules.build_change([Entry("a", before, FACTS)])
    assert change.pairs[1] == ("occurrence/a", b'[0,5,7,10,5,0,0,0,""]')
    assert not meta.copied()() and not len(schedules), "nothing changes before the append"
    change.apply()
    assert not meta.values, "only the columns contain the schedule"
    assert list(meta.copied()()) == ["schedules/0"]


def test_a_snapshot_has_all_schedules_in_parts() -> None:
    log = Log()
    schedules, copy = log.opened(Schedules), MetaLog()
    skipping = msgspec.structs.replace(FACTS, overlap="skip", group="g", tag="t", properties={"a": "1"})
    log.change(
        schedules,
        Entry("b", Progress(State.ACTIVE, 5, number=7, due_ms=10, last_queue=2, last_offset=9), skipping),
        Entry("a", Progress(State.FAILED, 3, error="no zone"), FACTS),
    )
    restored = Schedules(copy)
    copy.restore((key, bytes(value)) for key, value in log.meta.copied()().items())
    for name in ("a", "b"):
        assert restored.get(name) == schedules.get(name)
    assert list(restored.names_after("")) == ["a", "b"] and list(restored.occurrences) == [7]
    # Rows of the log after the snapshot.
    copy.restore([("schedule/b", b""), ("occurrence/b", b""), ("occurrence/a", b"[1,4]")])
    assert restored.find("b") is None and restored.get("a")[1] == Progress(State.PAUSED, 4)


def test_a_progress_row_has_a_queue_position_only_if_the_schedule_needs_it() -> None:
    plain = Progress(State.ACTIVE, 5, number=7)
    assert encode_progress(plain) == b'[0,5,7,0,0,0,0,0,""]'
    placed = msgspec.structs.replace(plain, last_queue=0, last_offset=3)
    assert encode_progress(placed) == b'[0,5,7,0,0,0,0,0,"",0,3]'
    for progress in (plain, placed):
        assert msgspec.json.decode(encode_progress(progress), type=Progress) == progress


def test_names_are_in_order_after_a_recovery_of_unsorted_rows() -> None:
    log = Log()
    schedules = log.opened(Schedules)
    for name in ("m", "a", "z", "c"):
        log.change(schedules, Entry(name, Progress(State.PAUSED, 3), FACTS))
    log.change(schedules, Entry("z", None))
    assert list(log.opened(Schedules).names_after("a")) == list(schedules.names_after("a")) == ["c", "m"]
