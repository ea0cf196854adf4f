"""Tests of timeball.spark.jobs.campaign: progress and changes of a campaign on a real broker."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node_fixture import RunningNode, eventually, running_node
from tests.spark.campaigning import attach, campaign_of, released, waiting
from tests.written_again import apply_retention, fill_segment

from timeball.model.config import MIB
from timeball.model.errors import InvalidMessage, NotFound, OutOfRange
from timeball.model.limits import HOUR_MS
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs.campaign import Campaign, find_attach, held, is_in, sorted_distinct, table_rows

ROWS = 60


def counts(campaign: Campaign) -> tuple[str, int, int, int, int]:
    """Read (state, released, cancelled, waiting, held), and check that the counts add up to all rows."""
    result = campaign.progress()
    assert result.rows == result.released + result.cancelled + result.waiting + result.held
    return result.state, result.released, result.cancelled, result.waiting, result.held


def test_progress_counts_messages_until_all_are_released(node: RunningNode, broker: Endpoint) -> None:
    campaign = campaign_of(node)
    with pytest.raises(NotFound, match="no campaign 'spring'"):
        campaign.progress()
    attach(campaign, 30, after_ms=HOUR_MS)
    result = campaign.progress()
    assert (result.state, result.rows, result.waiting) == ("running", 30, 30)
    assert (result.percent, result.whole) == (0.0, True)
    due = sorted(waiting(broker).values())
    assert (result.next_due_ms, result.last_due_ms) == (due[0], due[-1])
    with node.client() as ball:
        ball.cancel(key="k0")
        assert campaign.progress().next_due_ms == due[1]
        assert counts(campaign) == ("running", 0, 1, 29, 0)
        # Messages of another campaign do not count.
        attach(campaign_of(node, "other"), 5, after_ms=0, step_ms=0)
        eventually(lambda: sum(released(broker).values()) == 5, "the other campaign is released")
    assert counts(campaign) == ("running", 0, 1, 29, 0)
    assert counts(campaign_of(node, "other")) == ("finished", 5, 0, 0, 0)


def test_a_cancel_ends_all_pending_messages_and_a_repeated_one_changes_nothing(
    node: RunningNode, broker: Endpoint
) -> None:
    campaign = campaign_of(node)
    attach(campaign, 100, after_ms=-20_500, step_ms=1_000)  # about twenty are due already
    eventually(lambda: sum(released(broker).values()) >= 20, "the due messages are released")
    first = campaign.cancel()
    assert first.rows == 100 and first.cancelled == first.newly
    assert first.cancelled + first.released == 100 and first.released >= 20
    assert waiting(broker) == {}
    assert sum(released(broker).values()) == first.released
    repeated = campaign.cancel()
    assert (repeated.newly, repeated.cancelled, repeated.released) == (0, first.cancelled, first.released)
    assert counts(campaign) == ("cancelled", first.released, first.cancelled, 0, 0)
    assert campaign.progress().percent == 100.0


def test_a_campaign_without_an_attach_is_planned_and_can_only_be_cancelled(node: RunningNode) -> None:
    campaign = campaign_of(node)
    campaign.plan(10, 1_000)
    result = campaign.progress()
    assert (result.state, result.rows, result.waiting, result.percent) == ("planned", 10, 0, 0.0)
    with pytest.raises(OutOfRange, match="nothing of it is attached yet"):
        campaign.pause()
    result = campaign.cancel()
    assert (result.rows, result.newly, result.cancelled) == (0, 0, 0)
    for change in (campaign.pause, campaign.resume):
        with pytest.raises(InvalidMessage, match="was cancelled"):
            change()
    with pytest.raises(InvalidMessage, match="was cancelled"):
        attach(campaign, 10)


def test_pause_holds_pending_messages_and_resume_makes_them_wait_again(
    node: RunningNode, broker: Endpoint
) -> None:
    campaign = campaign_of(node)
    attach(campaign, ROWS)
    before = waiting(broker)
    with node.client() as ball:
        ball.cancel(key="k7")
    paused = campaign.pause()
    assert (paused.held, paused.repeated) == (ROWS - 1, False)
    assert counts(campaign) == ("paused", 0, 1, 0, ROWS - 1)
    assert waiting(broker) == {}
    assert held(broker) == {"spring": ROWS - 1}
    assert campaign.pause().repeated
    resumed = campaign.resume()
    assert (resumed.rows, resumed.shift_ms, resumed.repeated) == (ROWS - 1, 0, False)
    assert counts(campaign) == ("running", 0, 1, ROWS - 1, 0)
    assert waiting(broker) == {key: due_ms for key, due_ms in before.items() if key != "k7"}
    assert campaign.resume().repeated and held(broker) == {}


def test_resume_releases_overdue_messages_or_shifts_all(node: RunningNode, broker: Endpoint) -> None:
    for name, shift in (("at-once", False), ("shifted", True)):
        campaign = campaign_of(node, name)
        attach(campaign, 40, after_ms=100, step_ms=0)  # all due in 100 ms
        paused = campaign.pause()
        released_before = sum(released(broker).values())
        threading.Event().wait(0.2)  # the held messages are then overdue
        assert sum(released(broker).values()) == released_before
        resumed = campaign.resume(shift=shift)
        assert resumed.rows == paused.held
        assert (resumed.shift_ms > 0) == shift
        expected = released_before + paused.held
        eventually(lambda: sum(released(broker).values()) == expected, "all are released")  # noqa: B023
        eventually(lambda: counts(campaign)[0] == "finished", "no message is pending")  # noqa: B023
    assert set(released(broker).values()) == {2}, "each key once in each campaign"


def test_pause_during_releases_loses_and_repeats_no_message(node: RunningNode, broker: Endpoint) -> None:
    """The messages are due one per millisecond, before, during and after the pause."""
    campaign = campaign_of(node)
    attach(campaign, 3_000, after_ms=-500, step_ms=1)
    paused = campaign.pause()
    state, released_rows, cancelled_rows, waiting_rows, held_rows = counts(campaign)
    assert (state, cancelled_rows, waiting_rows, held_rows) == ("paused", 0, 0, paused.held)
    assert released_rows == sum(released(broker).values()) and released_rows + held_rows == 3_000
    campaign.resume()
    eventually(lambda: len(released(broker)) == 3_000, "the held messages are released")
    assert set(released(broker).values()) == {1}


def test_pause_resume_and_cancel_work_with_the_timer_wheel(tmp_path: Path) -> None:
    """With any strategy, messages of a bulk write are in the pending table."""
    with running_node(tmp_path / "wheel", strategy="timer_wheel") as node:
        campaign = campaign_of(node)
        attach(campaign, ROWS)
        assert campaign.pause().held == ROWS
        assert campaign.resume().rows == ROWS
        assert campaign.cancel().cancelled == ROWS


def test_two_concurrent_pauses_or_resumes_have_the_effect_of_one(node: RunningNode, broker: Endpoint) -> None:
    attach(campaign_of(node), ROWS)
    before = waiting(broker)
    for change in (Campaign.pause, Campaign.resume):
        threads = [threading.Thread(target=change, args=(campaign_of(node),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts(campaign_of(node)) == ("running", 0, 0, ROWS, 0)
    assert waiting(broker) == before


def test_find_attach_finds_the_attach_with_exactly_this_name(node: RunningNode, broker: Endpoint) -> None:
    attach(campaign_of(node, "spring"), 3)
    attach(campaign_of(node, "spring-2"), 4)
    result = find_attach(broker, "spring", 0)
    assert result is not None and result.rows == 3
    assert find_attach(broker, "spring", broker.status().log.durable_seq) is None
    assert find_attach(broker, "sprin", 0) is None


def test_progress_is_the_same_after_retention_has_removed_log_rows(tmp_path: Path) -> None:
    """The broker keeps the count of a cancel. Messages without a row in the log or the table count as released."""
    with running_node(tmp_path / "data", segment_bytes=MIB, compact_rows=0) as node:
        names = ("plain", "paused", "resumed", "cancelled")
        plain, paused, resumed, cancelled = (campaign_of(node, name) for name in names)
        with Endpoint(node.endpoint) as broker:
            for campaign in (plain, paused, resumed, cancelled):
                attach(campaign, 10, after_ms=-300, step_ms=100 * HOUR_MS)  # only its first message is due
            eventually(lambda: released(broker)["k0"] == len(names), "the first messages are released")
        paused.pause()
        resumed.pause()
        resumed.resume()
        cancelled.cancel()
        before = [counts(campaign) for campaign in (plain, paused, resumed, cancelled)]
        assert before == [
            ("running", 1, 0, 9, 0),
            ("paused", 1, 0, 0, 9),
            ("running", 1, 0, 9, 0),
            ("cancelled", 1, 9, 0, 0),
        ]
        fill_segment(node)
        assert apply_retention(node) > plain.read_state().planned_seq
        assert [counts(campaign) for campaign in (plain, paused, resumed, cancelled)] == before
        assert not plain.progress().whole and not paused.progress().whole
        assert paused.resume().rows == 9
        assert counts(paused) == ("running", 1, 0, 9, 0)
        assert resumed.pause().held == 9
        assert cancelled.cancel().cancelled == 9


NUMBERS = st.sets(st.integers(0, 60), max_size=40)


@given(NUMBERS)
def test_sorted_distinct_merges_arrays_in_any_order(numbers: set[int]) -> None:
    expected = np.array(sorted(numbers), np.int64)
    parts = [expected[::2], expected[::-1], expected[:0]]
    assert sorted_distinct(parts).tolist() == expected.tolist()


@given(NUMBERS, st.lists(st.integers(0, 70), max_size=20))
def test_is_in_marks_the_values_that_are_among_the_numbers(numbers: set[int], values: list[int]) -> None:
    result = is_in(np.array(values, np.int64), np.array(sorted(numbers), np.int64))
    assert result.tolist() == [value in numbers for value in values]


def test_table_rows_selects_rows_by_number_and_due_time(node: RunningNode, broker: Endpoint) -> None:
    one, other = campaign_of(node, "one"), campaign_of(node, "other")
    attach(one, 20)
    attach(other, 7)
    status = broker.status()
    ranges = one.read_state().ranges

    def rows(ranges: list[tuple[int, int]], due_from_ms: int = 0) -> list[dict[str, object]]:
        result = table_rows(
            status.table.uri, status.table.version, ranges, ["seq", "due_ms", "keys"], due_from_ms
        )
        return [row for batch in result for row in batch.to_pylist()]

    assert {row["keys"] for row in rows(ranges)} == {f"k{n}" for n in range(20)}
    due = sorted(row["due_ms"] for row in rows(ranges))
    assert len(rows(ranges, due[5])) == 15
    first, _ = ranges[0]
    assert [row["seq"] for row in rows([(first + 2, 3)])] == [first + 2, first + 3, first + 4]
    assert rows([]) == rows([(10**9, 5)]) == []
