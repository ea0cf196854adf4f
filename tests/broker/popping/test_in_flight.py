"""What is in hand across an ordered stop: all of it, once, and nothing of an old stop."""

from __future__ import annotations

from tests.broker.on_node import batch, on_node
from tests.broker.popping.test_window import take, window
from tests.broker.registry.state_rows import StateRows
from tests.crash.world import World

from timeball.broker.popping.in_flight import InFlight
from timeball.broker.popping.popper import Ask
from timeball.broker.popping.window import Count, Window


def facts(w: Window) -> tuple[object, ...]:
    return w.next_offset, w.stored_offset, w.held, w.again, w.done_ahead, w.first_open, w.count, w.last_pop_ms


def test_a_window_goes_on_where_it_ended_and_idle_ones_are_left_out() -> None:
    busy, idle = window(), window()
    take(busy, list(range(6)), pop_ms=7)
    busy.done(0)
    busy.give_back(2)
    busy.held[3].times, busy.held[3].in_order = 4, True
    busy.finish_ahead(9)
    busy.last_pop_ms, busy.attempt_id = 7, "x"
    log = StateRows()
    log.opened(InFlight).save([busy, idle])
    (found,) = log.opened(InFlight).pop_windows(Count())
    assert facts(found) == facts(busy) and found.attempt_id == "x"
    found.done(1)
    assert found.first_open == 2


def test_it_is_found_once() -> None:
    busy = window()
    take(busy, [0])
    log = StateRows()
    assert log.opened(InFlight).pop_windows(Count()) == []
    assert log.count == 0
    log.opened(InFlight).save([busy])
    assert len(log.opened(InFlight).pop_windows(Count())) == 1
    assert log.opened(InFlight).pop_windows(Count()) == []


@on_node()
async def test_what_was_moved_while_nobody_looked_is_forgotten(world: World) -> None:
    await world.broker.create_topic("orders", 1)
    await world.broker.send(batch(3))
    await world.broker.popper.pop(Ask("g", "orders"), 0)
    await world.restart()
    await world.broker.commit_offsets("g", "orders", {0: 1})
    assert (await world.broker.popper.pop(Ask("g", "orders"), 0)).rows.num_rows == 2
