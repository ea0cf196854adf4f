"""Delivery windows with the spread `level`: no second of a window gets more messages than it must."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.crash.world import SECOND_MS, World
from tests.rounds import rounds

from timeball.broker.pending import window_loads
from timeball.broker.pending.window_loads import DeliveryWindow
from timeball.model import limits
from timeball.model.errors import InvalidDelay
from timeball.model.message import Int64Array
from timeball.model.send_options import even_offset_ms, last_offset_ms

WINDOW_S = 60


def busiest_to_mean(due_ms: list[int] | Int64Array, first_s: int, seconds: int) -> float:
    """Divide the messages of the busiest second by the mean of all seconds."""
    loads = np.bincount(np.asarray(due_ms) // SECOND_MS - first_s, minlength=seconds)
    assert len(loads) == seconds
    return float(loads.max() / loads.mean())


async def choose_due_times(world: World, count: int, window: DeliveryWindow) -> list[int]:
    """Choose due times in a window, one after another, and check that they are in it."""
    due_ms_chosen: list[int] = await world.broker.window_loads.choose([window] * count)
    assert all(window.begin_ms <= due_ms <= window.end_ms for due_ms in due_ms_chosen)
    return due_ms_chosen


def window_of(world: World, after_s: int = 100, seconds: int = WINDOW_S) -> DeliveryWindow:
    """Build a window of whole seconds that begins some seconds from now."""
    first_s = world.clock.wall // SECOND_MS + after_s
    return DeliveryWindow(first_s * SECOND_MS, (first_s + seconds) * SECOND_MS - 1)


@on_node()
async def test_a_level_window_has_no_busy_second(world: World) -> None:
    await fill_seconds(world, 50_000)


@pytest.mark.slow
@pytest.mark.siege
@on_node()
async def test_a_level_window_of_many_messages_has_no_busy_second(world: World) -> None:
    await fill_seconds(world, rounds(1_000_000, 10_000_000))


async def fill_seconds(world: World, messages: int) -> None:
    """Choose due times in ten minutes, and check that all seconds have nearly the same number."""
    window = window_of(world, seconds=600)
    first_s, loads = window.begin_ms // SECOND_MS, np.zeros(600, np.int64)
    for _ in range(messages // 10_000):
        due_ms_chosen = np.asarray(await choose_due_times(world, 10_000, window))
        loads += np.bincount(due_ms_chosen // SECOND_MS - first_s, minlength=600)
    assert loads.max() <= 1.05 * messages / 600
    assert len(np.unique(due_ms_chosen)) > 5_000  # the due times are also spread within the seconds


@on_node()
async def test_a_level_window_fills_the_gaps_beside_pending_messages(world: World) -> None:
    window = window_of(world)
    first_s = window.begin_ms // SECOND_MS
    earlier_ms = [(first_s + second) * SECOND_MS for second in range(0, WINDOW_S, 3) for _ in range(20)]
    await world.broker.send(batch(len(earlier_ms), due_ms=earlier_ms))
    due_ms_chosen = await choose_due_times(world, 800, window)
    assert busiest_to_mean(earlier_ms + due_ms_chosen, first_s, WINDOW_S) == 1.0
    # After the restart the messages are counted again, from log and table. The choices so far are pending messages now.
    await world.broker.send(batch(len(due_ms_chosen), due_ms=due_ms_chosen))
    await world.compact()
    await world.restart()
    later_ms = await choose_due_times(world, 1_200, window)
    assert busiest_to_mean(earlier_ms + due_ms_chosen + later_ms, first_s, WINDOW_S) == 1.0


@on_node()
async def test_overlapping_windows_share_the_load_of_their_seconds(world: World) -> None:
    first, second = window_of(world, 100), window_of(world, 110, WINDOW_S * 3)
    due_ms_chosen = [
        *await choose_due_times(world, 300, first),
        *await choose_due_times(world, 900, second),
        *await choose_due_times(world, 300, first),
    ]
    loads = np.bincount(np.asarray(due_ms_chosen) // SECOND_MS - first.begin_ms // SECOND_MS)
    assert loads.max() <= 12


@on_node()
async def test_concurrent_sends_with_a_window_count_the_pending_messages_once(world: World) -> None:
    window = window_of(world)
    due_ms_chosen = await asyncio.gather(*(choose_due_times(world, 60, window) for _ in range(5)))
    assert (
        busiest_to_mean(
            [due_ms for part in due_ms_chosen for due_ms in part], window.begin_ms // SECOND_MS, WINDOW_S
        )
        == 1.0
    )
    assert world.broker.forecast.counts == 1


@on_node()
async def test_windows_that_are_short_or_past_or_long_get_valid_due_times(world: World) -> None:
    now_ms = world.clock.wall
    for begin_ms, end_ms in ((now_ms + 100_500, now_ms + 100_900), (now_ms + 5_000, now_ms + 5_000)):
        await choose_due_times(world, 3, DeliveryWindow(begin_ms, end_ms))
    past = DeliveryWindow(now_ms - 10_000, now_ms - 5_000)
    assert await world.broker.window_loads.choose([past]) == [past.end_ms]
    begun = DeliveryWindow(now_ms - 10_000, now_ms + 10_000)
    assert min(await choose_due_times(world, 100, begun)) >= now_ms
    with pytest.raises(InvalidDelay, match="use the spread even"):
        await choose_due_times(
            world, 1, DeliveryWindow(now_ms, now_ms + limits.FORECAST_BUCKETS_MAX * SECOND_MS + 2_000)
        )


@on_node()
async def test_a_choice_that_counts_nothing_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: if choices are not counted, some seconds get more messages than others."""

    async def count_none(self: object, *_: object) -> window_loads._Range:
        return window_loads._Range(window.begin_ms // SECOND_MS, np.zeros(WINDOW_S, np.int64), 0.0)

    window = window_of(world)
    monkeypatch.setattr(window_loads.WindowLoads, "_find_range", count_none)
    due_ms_chosen = await choose_due_times(world, 600, window)
    assert busiest_to_mean(due_ms_chosen, window.begin_ms // SECOND_MS, WINDOW_S) > 1.05


@given(st.text(max_size=40), st.integers(0, limits.DELAY_MS_MAX))
def test_an_even_offset_is_in_the_window_and_repeats(message_id: str, window_ms: int) -> None:
    offset_ms = even_offset_ms(message_id, window_ms)
    assert 0 <= offset_ms <= last_offset_ms(window_ms) <= window_ms and offset_ms == even_offset_ms(
        message_id, window_ms
    )


def test_even_offsets_are_spread_over_the_window() -> None:
    offsets = [even_offset_ms(f"m{number}", 61_000) for number in range(60_000)]
    assert busiest_to_mean([min(offset, 59_999) for offset in offsets], 0, 60) < 1.2
