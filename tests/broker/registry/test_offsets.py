"""Consumer offsets: a group reads the offsets that it stored, within its queues, before and after a save."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.registry.state_rows import StateRows

from timeball.broker.registry.groups import PARKED, Offsets, Unit
from timeball.model import limits
from timeball.model.errors import InvalidMessage, OutOfRange, OverLimit

ENDS = {0: 10, 1: 0, 7: 3}  # the end offset of each queue
NAMES = st.sampled_from(["a", "b", "%RETRY%g", "x-1_|"])
COMMITS = st.lists(
    st.tuples(NAMES, NAMES, st.dictionaries(st.sampled_from([0, 7]), st.integers(0, 3), max_size=2)),
    max_size=12,
)


def new_offsets() -> Offsets:
    return StateRows().opened(Offsets)


def save(offsets: Offsets, log: StateRows, units: list[Unit] | None = None) -> None:
    """Append the changes, as the saver of the leases does."""
    change = offsets.build_change(units)
    if change.rows.num_rows:
        log.appended.append(change.rows)
    change.apply()


def save_and_reopen(offsets: Offsets, log: StateRows) -> Offsets:
    save(offsets, log)
    return log.opened(Offsets)


@given(COMMITS)
def test_the_last_commit_of_each_queue_counts_also_after_a_restart(
    commits: list[tuple[str, str, dict[int, int]]],
) -> None:
    log = StateRows()
    offsets, model = log.opened(Offsets), {}
    for group, topic, given_offsets in commits:
        offsets.commit(group, topic, given_offsets, ENDS)
        model.setdefault((group, topic), {}).update(given_offsets)
    for read in (offsets, save_and_reopen(offsets, log)):
        for (group, topic), expected in model.items():
            assert read.get(group, topic) == expected
            assert {queue: read.find_offset(group, topic, queue) for queue in expected} == expected
        assert read.get("nobody", "a") == read.get("a", "nothing") == {}
        assert read.find_offset("nobody", "a", 0) is read.find_offset("a", "a", 99) is None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({0: 11}, "offset 11 of queue 0: the queue of 't' ends at 10"),
        ({1: 1}, "offset 1 of queue 1: the queue of 't' ends at 0"),
        ({0: -1}, "offset -1 of queue 0: offsets are not negative"),
        ({2: 0}, "queue 2: 't' does not have it"),
        ({0: 5, 7: 4}, "offset 4 of queue 7: the queue of 't' ends at 3"),
        ({-1: 0}, "queue -1: 't' does not have it"),
    ],
)
def test_an_offset_outside_its_queue_is_refused_with_the_reason(wrong: dict[int, int], text: str) -> None:
    log = StateRows()
    offsets = log.opened(Offsets)
    offsets.commit("g", "t", {0: 2}, ENDS)
    save(offsets, log)
    with pytest.raises(OutOfRange, match=f"^{text}$"):
        offsets.commit("g", "t", wrong, ENDS)
    assert offsets.get("g", "t") == {0: 2}
    save(offsets, log)
    assert log.count == 1


def test_groups_and_topics_with_offsets_are_listed_until_they_are_forgotten() -> None:
    log = StateRows()
    offsets = log.opened(Offsets)
    for group, topic in (("g", "t"), ("g", "u"), ("h", "t")):
        offsets.commit(group, topic, {0: 1}, ENDS)
    assert (offsets.topics_of("g"), offsets.groups_of("t")) == (["t", "u"], ["g", "h"])
    assert offsets.topics_of("nobody") == offsets.groups_of("nothing") == []
    save_and_reopen(offsets, log)
    offsets.forget_topic("nothing")
    offsets.forget_group("nobody")
    save(offsets, log)
    assert log.count == 1, "nothing has changed"
    offsets.forget_topic("t")
    assert save_and_reopen(offsets, log).topics_of("g") == ["u"]
    offsets.forget_group("g")
    assert save_and_reopen(offsets, log).topics_of("g") == []


def test_an_offset_may_be_committed_up_to_the_end_and_back() -> None:
    offsets = new_offsets()
    for offset in (10, 0, 4):
        offsets.commit("g", "t", {0: offset}, ENDS)
        assert offsets.get("g", "t") == {0: offset}


@pytest.mark.parametrize("group", ["", "a/b", "..", "a\n", "x" * (limits.GROUP_BYTES_MAX + 1)])
def test_an_offset_of_a_group_with_an_invalid_name_is_refused(group: str) -> None:
    with pytest.raises(InvalidMessage, match="group"):
        new_offsets().commit(group, "t", {0: 1}, ENDS)


def test_at_the_limit_a_new_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROUPS_MAX", 2)
    offsets = new_offsets()
    for group in ("one", "two", "one"):
        offsets.commit(group, "t", {0: 1}, ENDS)
    with pytest.raises(OverLimit, match="2 consumer groups exist"):
        offsets.commit("three", "t", {0: 1}, ENDS)


def keys(log: StateRows) -> list[list[str]]:
    """The keys of the rows of each frame."""
    return [rows.column("unique_key").to_pylist() for rows in log.appended]


def test_a_save_without_changes_appends_no_row() -> None:
    log = StateRows()
    offsets = log.opened(Offsets)
    save(offsets, log)
    assert log.count == 0
    for topic in ("t", "u"):
        offsets.commit("g", topic, {0: 1}, ENDS)
        save(offsets, log)
        save(offsets, log)
    assert keys(log) == [["offsets/g@t"], ["offsets/g@u"]]


def test_a_save_of_some_units_leaves_the_changes_of_the_others_for_the_next_one() -> None:
    log = StateRows()
    offsets = log.opened(Offsets)
    for group in ("g", "h"):
        offsets.commit(group, "t", {0: 1}, ENDS)
    offsets.advance("g", "t", 0, 2)
    save(offsets, log, [("g", "t"), ("nobody", "t")])
    assert offsets.moved() == {("h", "t")}
    assert (log.opened(Offsets).get("g", "t"), log.opened(Offsets).get("h", "t")) == ({0: 2}, {})
    save(offsets, log)
    assert keys(log) == [["offsets/g@t"], ["offsets/h@t"]]


def test_an_append_that_is_refused_leaves_all_changes_for_the_next_save() -> None:
    log = StateRows()
    offsets = log.opened(Offsets)
    offsets.commit("g", "t", {0: 1}, ENDS)
    assert offsets.build_change().rows.num_rows == 1, "built, and not appended"
    assert offsets.moved() == {("g", "t")}
    assert save_and_reopen(offsets, log).get("g", "t") == {0: 1}


def test_offsets_changed_by_advance_are_not_moved() -> None:
    """The leases of a moved unit end, so a unit whose offset follows from its leases must not count as moved."""
    log = StateRows()
    offsets = log.opened(Offsets)
    offsets.commit("g", "t", {0: 1, 7: 1}, ENDS)
    assert offsets.moved() == {("g", "t")}
    save(offsets, log)
    offsets.advance("g", "t", 7, 3)
    assert offsets.moved() == set()
    assert save_and_reopen(offsets, log).get("g", "t") == {0: 1, 7: 3}
    offsets.forget_topic("t")
    assert offsets.moved() == {("g", "t")}
    save(offsets, log)
    assert offsets.moved() == set()


def test_the_offsets_that_get_returns_are_a_copy() -> None:
    offsets = new_offsets()
    offsets.commit("g", "t", {0: 1}, ENDS)
    offsets.get("g", "t")[0] = 9
    assert offsets.get("g", "t") == {0: 1}


def test_an_offsets_row_of_earlier_versions_is_ignored() -> None:
    offsets = new_offsets()
    offsets.restore(PARKED, b'{"from_seq":17,"ahead":{"g":{"t":{"0":[[4,6]]}}}}')
    assert offsets.table == {}
