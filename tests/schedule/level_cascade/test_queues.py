"""The queues together: which is opened when, what their heads bound, and what a start forgets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from tests.crash_files import CrashFiles

from timeball.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.message import Int64Array
from timeball.schedule.level_cascade.hops import FAR_MS
from timeball.schedule.level_cascade.levels import plan
from timeball.schedule.level_cascade.queues import SCAN_MS, Queues, bound_ms

NOW = 1_700_000_000_000
LEAD_MS = 10_000
FOLDER = "cascade/00000001"
NONE = np.empty(0, np.int64)


def nothing(due: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
    return np.zeros(len(seq), dtype=np.bool_)


def entered(queues: Queues, distances: list[int], now_ms: int = NOW, first_seq: int = 1) -> list[bool]:
    """Promises so far from now, numbered from `first_seq` on and lying in their first rows; who is near."""
    due = now_ms + np.array(distances)
    seq = np.arange(first_seq, first_seq + len(due))
    return list(queues.enter(due, seq, seq, plan(due - now_ms), now_ms).tolist())


def test_each_level_has_a_queue_for_last_hops_and_one_for_others() -> None:
    queues = Queues(CrashFiles(), FOLDER, [], LEAD_MS)
    near = entered(queues, [HOUR_MS, HOUR_MS + 9_000, HOUR_MS + 30_000, 5_000, -7, HOUR_MS])
    assert near == [False, False, False, True, True, False]
    assert {queue.number: queue.rows for queue in queues if queue.rows} == {0: 2, 33: 1, 34: 3}
    assert (queues.near.opened_rows, queues.near.head_ms) == (2, None)


def test_when_queues_are_opened() -> None:
    queues = Queues(CrashFiles(), FOLDER, [], LEAD_MS)
    assert queues.heads() == (FAR_MS, FAR_MS)
    entered(queues, [HOUR_MS + 30_000], NOW + 1)
    (more,) = (queue for queue in queues if queue.rows)
    assert queues.opens_ms(more) == queues.heads().opens_ms == NOW + HOUR_MS + SCAN_MS, (
        "the hop is over a ms after"
    )
    entered(queues, [HOUR_MS + 2_000], NOW + 1, first_seq=2)
    (last,) = (queue for queue in queues if queue.rows and queue is not more)
    assert queues.opens_ms(last) == queues.heads().opens_ms == NOW + 1 + HOUR_MS - LEAD_MS // 2
    assert queues.open(last, NOW + HOUR_MS - LEAD_MS, 10).seq.tolist() == []
    assert queues.open(last, NOW + 1 + HOUR_MS - LEAD_MS, 10).seq.tolist() == [2]
    assert queues.heads().opens_ms == NOW + HOUR_MS + SCAN_MS


@given(
    batches=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3 * DAY_MS), min_size=1, max_size=8), st.integers(-HOUR_MS, HOUR_MS)
        ),
        min_size=1,
        max_size=8,
    ),
    opened=st.integers(0, 20),
)
def test_the_heads_bound_all_that_waits(batches: list[tuple[list[int], int]], opened: int) -> None:
    """Whatever clock they were entered by, and however much has been opened."""
    queues, seq, dues = Queues(CrashFiles(), FOLDER, [], LEAD_MS), 1, dict[int, int]()
    for distances, step_ms in batches:
        now_ms = NOW + step_ms
        near = entered(queues, distances, now_ms, seq)
        dues |= {seq + n: now_ms + ms for n, ms in enumerate(distances) if not near[n]}
        seq += len(distances)
    for _ in range(opened):
        if dues:
            queue = min(queues, key=queues.opens_ms)
            assert queues.opens_ms(queue) == queues.heads().opens_ms
            for taken in queues.open(queue, queues.opens_ms(queue), 3).seq.tolist():
                del dues[taken]
    assert queues.heads().bound_ms == min(map(bound_ms, queues)) <= min(dues.values(), default=FAR_MS)
    assert queues.heads().opens_ms <= min(dues.values(), default=FAR_MS)


def test_before_anybody_has_said_what_is_there_nothing_is_touched_and_nothing_settled() -> None:
    files = CrashFiles()
    entered(Queues(files, FOLDER, [], LEAD_MS), [HOUR_MS])
    (folder,) = files.list_dir(FOLDER)
    queues = Queues(files, FOLDER, None, LEAD_MS)
    assert queues.heads() == (FAR_MS, -FAR_MS)
    assert (queues.unopened_rows, queues.first_at, queues.state(), queues.take_dirty()) == (0, None, [], [])
    assert files.list_dir(f"{FOLDER}/{folder}")
    Queues(files, FOLDER, [], LEAD_MS)
    assert not files.list_dir(f"{FOLDER}/{folder}")


def test_what_moved_since_is_found_in_all_queues_and_once() -> None:
    queues = Queues(CrashFiles(), FOLDER, [], LEAD_MS)
    entered(queues, [HOUR_MS + 30_000, 3 * HOUR_MS, 30 * MINUTE_MS, HOUR_MS + 30_000])
    assert queues.unopened_rows == 4
    queues.forget_old_places(np.array([2, 4]))
    queues.forget_old_places(np.array([2, 3, 99]))
    assert queues.unopened_rows == 1
    left = [queues.take(queue, FAR_MS, 10).seq.tolist() for queue in queues if queue.head_ms is not None]
    assert [seq for seqs in left for seq in seqs] == [1]


def test_a_checkpoint_says_what_all_queues_need() -> None:
    files = CrashFiles()
    queues = Queues(files, FOLDER, [], LEAD_MS)
    entered(queues, [SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS])
    queues.advance(nothing, [np.array([1])])
    assert queues.first_at == 2
    state = queues.state()
    for folder, dirty in queues.take_dirty():
        for file in dirty:
            file.sync()
            files.sync_dir(folder)
    queues.unsynced()
    assert sum(len(dirty) for _, dirty in queues.take_dirty()) == 4
    queues.close()
    again = Queues(files.crash(3), FOLDER, state, LEAD_MS)
    assert (again.unopened_rows, again.first_at, len(again.state())) == (3, 2, 4)
