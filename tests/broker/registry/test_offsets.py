"""Consumer offsets: what a group stored is what it gets, within its queues, before and after a save."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.crash_files import CrashFiles

from timeball import limits
from timeball.broker.registry import offsets as offsets_module
from timeball.broker.registry.offsets import Offsets, Parked
from timeball.errors import InvalidMessage, OutOfRange, OverLimit

ENDS = {0: 10, 1: 0, 7: 3}
NAMES = st.sampled_from(["a", "b", "%RETRY%g", "x-1_|"])
COMMITS = st.lists(
    st.tuples(NAMES, NAMES, st.dictionaries(st.sampled_from([0, 7]), st.integers(0, 3), max_size=2)),
    max_size=12,
)


def saved(offsets: Offsets, files: CrashFiles) -> Offsets:
    data = offsets.save()
    if data is not None:
        files.replace(offsets_module.NAME, data)
    return Offsets(files)


@given(COMMITS)
def test_the_last_commit_of_each_queue_counts_also_after_a_restart(
    commits: list[tuple[str, str, dict[int, int]]],
) -> None:
    files = CrashFiles()
    offsets, model = Offsets(files), {}
    for group, topic, given_offsets in commits:
        offsets.commit(group, topic, given_offsets, ENDS)
        model.setdefault((group, topic), {}).update(given_offsets)
    for read in (offsets, saved(offsets, files)):
        for (group, topic), expected in model.items():
            assert read.get(group, topic) == expected
            assert {queue: read.find(group, topic, queue) for queue in expected} == expected
        assert read.get("nobody", "a") == read.get("a", "nothing") == {}
        assert read.find("nobody", "a", 0) is read.find("a", "a", 99) is None


@pytest.mark.parametrize("wrong", [{0: 11}, {0: -1}, {1: 1}, {2: 0}, {0: 5, 7: 4}])
def test_an_offset_beyond_its_queue_is_refused_and_nothing_is_stored(wrong: dict[int, int]) -> None:
    offsets = Offsets(CrashFiles())
    offsets.commit("g", "t", {0: 2}, ENDS)
    offsets.save()
    with pytest.raises(OutOfRange, match="'t' ends at"):
        offsets.commit("g", "t", wrong, ENDS)
    assert offsets.get("g", "t") == {0: 2}
    assert offsets.save() is None


def test_who_reads_what_is_known_and_can_be_forgotten() -> None:
    files = CrashFiles()
    offsets = Offsets(files)
    for group, topic in (("g", "t"), ("g", "u"), ("h", "t")):
        offsets.commit(group, topic, {0: 1}, ENDS)
    assert (offsets.topics_of("g"), offsets.groups_of("t")) == (["t", "u"], ["g", "h"])
    assert offsets.topics_of("nobody") == offsets.groups_of("nothing") == []
    saved(offsets, files)
    offsets.forget_topic("nothing")
    offsets.forget_group("nobody")
    assert offsets.save() is None, "nothing has changed"
    offsets.forget_topic("t")
    assert saved(offsets, files).topics_of("g") == ["u"]
    offsets.forget_group("g")
    assert saved(offsets, files).topics_of("g") == []


def test_a_queue_may_be_committed_to_its_end_and_back() -> None:
    offsets = Offsets(CrashFiles())
    for offset in (10, 0, 4):
        offsets.commit("g", "t", {0: offset}, ENDS)
        assert offsets.get("g", "t") == {0: offset}


@pytest.mark.parametrize("group", ["", "a/b", "..", "a\n", "x" * (limits.GROUP_BYTES_MAX + 1)])
def test_a_group_has_a_name_that_stock_clients_know(group: str) -> None:
    with pytest.raises(InvalidMessage, match="group"):
        Offsets(CrashFiles()).commit(group, "t", {0: 1}, ENDS)


def test_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROUPS_MAX", 2)
    offsets = Offsets(CrashFiles())
    for group in ("one", "two", "one"):
        offsets.commit(group, "t", {0: 1}, ENDS)
    with pytest.raises(OverLimit, match="2 consumer groups exist"):
        offsets.commit("three", "t", {0: 1}, ENDS)


def test_only_what_has_changed_is_saved() -> None:
    offsets = Offsets(CrashFiles())
    assert offsets.save() is None
    offsets.commit("g", "t", {0: 1}, ENDS)
    assert offsets.save() is not None
    assert offsets.save() is None


def test_what_is_handed_out_is_a_copy() -> None:
    offsets = Offsets(CrashFiles())
    offsets.commit("g", "t", {0: 1}, ENDS)
    offsets.get("g", "t")[0] = 9
    assert offsets.get("g", "t") == {0: 1}


def test_what_is_promised_is_saved_with_the_offsets_it_belongs_to() -> None:
    files = CrashFiles()
    offsets = Offsets(files)
    offsets.commit("g", "t", {0: 2}, ENDS)
    parked = Parked(17, {"g": {"t": {0: [(4, 6)]}}})
    data = offsets.save(parked)
    assert data is not None and offsets.save(parked) is None
    files.replace(offsets_module.NAME, data)
    again = Offsets(files)
    assert again.parked == parked and again.get("g", "t") == {0: 2}


def test_a_start_never_has_to_look_through_much_of_the_log() -> None:
    offsets = Offsets(CrashFiles())
    offsets.unsaved()
    assert offsets.save(Parked(5, {})) is not None
    assert offsets.save(Parked(5 + offsets_module.STALE_ROWS, {})) is None, (
        "nothing has changed, and it is not far"
    )
    assert offsets.save(Parked(6 + offsets_module.STALE_ROWS, {})) is not None
    assert offsets.save(Parked(7 + offsets_module.STALE_ROWS, {"g": {"t": {0: [(1, 2)]}}})) is not None
