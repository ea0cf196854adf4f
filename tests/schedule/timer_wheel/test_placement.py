"""Slots: the same reach in time whatever the precision, and a place within it for everything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball import limits
from timeball.schedule.timer_wheel.placement import MARGIN_MS, Slots

AHEAD_MS = 10_000
PRECISIONS_MS = [1, 10, 100, 1_000]


@pytest.mark.parametrize("precision_ms", PRECISIONS_MS)
@pytest.mark.parametrize("wheel_ms", [limits.MINUTE_MS, 3 * limits.DAY_MS, 30 * limits.DAY_MS, 61_234])
def test_the_reach_is_a_length_of_time(precision_ms: int, wheel_ms: int) -> None:
    slots = Slots.of(precision_ms, wheel_ms, AHEAD_MS)
    assert wheel_ms <= (slots.reach - 1) * precision_ms < wheel_ms + precision_ms
    assert slots.margin * precision_ms >= AHEAD_MS + MARGIN_MS


@given(
    precision_ms=st.sampled_from(PRECISIONS_MS),
    wheel_ms=st.integers(limits.MINUTE_MS, 3 * limits.DAY_MS),
    bound=st.integers(0, 1 << 41),
    ahead=st.lists(st.one_of(st.integers(0, 1 << 36), st.integers(0, 200_000)), min_size=1, max_size=20),
)
def test_everything_has_a_place_within_reach(
    precision_ms: int, wheel_ms: int, bound: int, ahead: list[int]
) -> None:
    slots = Slots.of(precision_ms, wheel_ms, AHEAD_MS)
    wanted = bound + np.array(ahead)
    placed = slots.place(wanted, bound)
    assert (placed >= bound).all() and (placed < bound + slots.reach).all()
    within = wanted < bound + slots.reach
    assert (placed[within] == wanted[within]).all()
    # A roll is never urgent: when its slot comes up, what remains is a third of the ring, or all but.
    assert (wanted[~within] - placed[~within] >= slots.reach // 3).all()
    # And never in vain: it waits for half of the ring at least.
    assert (placed[~within] - bound >= slots.reach // 2).all()


@given(
    precision_ms=st.sampled_from(PRECISIONS_MS),
    wheel_ms=st.integers(limits.MINUTE_MS, limits.DAY_MS),
    bound=st.integers(0, 1 << 41),
)
def test_no_two_slots_within_reach_share_a_place(precision_ms: int, wheel_ms: int, bound: int) -> None:
    slots = Slots.of(precision_ms, wheel_ms, AHEAD_MS)
    first, last = bound - slots.margin, bound + slots.reach - 1
    some = np.unique(np.linspace(first, last, 1_000).astype(np.int64))
    assert last - first + 1 == slots.count
    assert len(np.unique(slots.index(some))) == len(some)


@pytest.mark.parametrize("precision_ms", PRECISIONS_MS)
def test_an_instant_lies_in_its_slot(precision_ms: int) -> None:
    slots = Slots.of(precision_ms, limits.DAY_MS, AHEAD_MS)
    for ms in (0, 1, 999, 1_000, 1_700_000_000_123, limits.INSTANT_MS_MAX):
        slot = slots.of_instant(ms)
        assert slots.begin_ms(slot) <= ms < slots.begin_ms(slot + 1)
        assert slots.of_instants(np.array([ms])).tolist() == [slot]


def test_three_days_at_a_second_are_four_megabytes_and_at_a_millisecond_four_gigabytes() -> None:
    """What ring.py and the settings say of the file."""
    sizes = {p: Slots.of(p, 3 * limits.DAY_MS, AHEAD_MS).count * 16 for p in (1_000, 1)}
    assert 4.1e6 < sizes[1_000] < 4.2e6
    assert 4.1e9 < sizes[1] < 4.2e9
