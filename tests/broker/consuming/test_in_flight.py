"""What is in hand across an ordered stop: all of it, once, and nothing of an old stop."""

from __future__ import annotations

from tests.broker.consuming.test_queue_leases import leases_of_queue, take
from tests.broker.on_node import batch, on_node
from tests.broker.registry.state_rows import StateRows
from tests.crash.world import World

from timeball.broker.consuming.in_flight import InFlight
from timeball.broker.consuming.queue_leases import OpenCount, QueueLeases
from timeball.broker.consuming.requests import ReceiveRequest


def facts(w: QueueLeases) -> tuple[object, ...]:
    return (
        w.next_offset,
        w.stored_offset,
        w.in_flight,
        w.returned,
        w.acked_ahead,
        w.first_open,
        w.count,
        w.last_pop_ms,
    )


def test_a_window_goes_on_where_it_ended_and_idle_ones_are_left_out() -> None:
    busy, idle = leases_of_queue(), leases_of_queue()
    take(busy, list(range(6)), pop_ms=7)
    busy.done(0)
    busy.give_back(2)
    busy.in_flight[3].times, busy.in_flight[3].in_order = 4, True
    busy.ack_ahead(9)
    busy.last_pop_ms, busy.attempt_id = 7, "x"
    log = StateRows()
    log.opened(InFlight).save([busy, idle])
    (found,) = log.opened(InFlight).pop_leases(OpenCount())
    assert facts(found) == facts(busy) and found.attempt_id == "x"
    found.done(1)
    assert found.first_open == 2


def test_it_is_found_once() -> None:
    busy = leases_of_queue()
    take(busy, [0])
    log = StateRows()
    assert log.opened(InFlight).pop_leases(OpenCount()) == []
    assert log.count == 0
    log.opened(InFlight).save([busy])
    assert len(log.opened(InFlight).pop_leases(OpenCount())) == 1
    assert log.opened(InFlight).pop_leases(OpenCount()) == []


@on_node()
async def test_what_was_moved_while_nobody_looked_is_forgotten(world: World) -> None:
    await world.broker.create_topic("orders", 1)
    await world.broker.send(batch(3))
    await world.broker.consuming.receive(ReceiveRequest("g", "orders"), 0)
    await world.restart()
    await world.broker.commit_offsets("g", "orders", {0: 1})
    assert (await world.broker.consuming.receive(ReceiveRequest("g", "orders"), 0)).rows.num_rows == 2
