"""Scenarios with rescheduled messages: to earlier, to later, and again, with each strategy and in each place."""

from __future__ import annotations

from typing import Any

from tests.crash.steps import Step, cancel_some
from tests.crash.world import HOUR_MS, SECOND_MS, World

FAR_MS = 30 * SECOND_MS
MINUTE_MS = 60 * SECOND_MS


def move_some(delay_ms: int, *numbers: int) -> Step:
    """Reschedule to a time relative to now, by the numbers of the keys."""

    async def move(world: World) -> None:
        await world.reschedule([f"k{number:05d}" for number in numbers], delay_ms)

    return move


# Near, in the tail, in files of both sorts, in levels; moved twice; moved and cancelled; too late.
MOVES: list[Step] = [
    lambda w: w.start(),
    lambda w: w.send("a", [500, 2 * SECOND_MS, FAR_MS, FAR_MS, 2 * HOUR_MS, None]),  # k0 to k5
    move_some(900, 0, 3),
    lambda w: w.compact(),
    lambda w: w.send_levels("b", [1, 3, 5]),  # k6 to k8
    lambda w: w.bulk("c", [700, FAR_MS, HOUR_MS], 1),  # k9 to k11
    move_some(FAR_MS, 1, 2, 7, 9, 5, 77),
    lambda w: w.advance(SECOND_MS),
    lambda w: w.consume(),
    lambda w: w.checkpoint(),
    cancel_some(1, 4, 0),
    move_some(SECOND_MS, 2, 4, 8, 10, 0),
    lambda w: w.advance(SECOND_MS),
    lambda w: w.restart(),
    move_some(-HOUR_MS, 11),
    lambda w: w.settled(),
    lambda w: w.compact(),
    move_some(3 * HOUR_MS, 7, 9),
    lambda w: w.merge(),
    lambda w: w.checkpoint(),
    lambda w: w.advance(FAR_MS),
    move_some(SECOND_MS, 7),
    lambda w: w.consume(),
    lambda w: w.apply_retention(),
    cancel_some(9),
    lambda w: w.stop(),
]

# As above, with a strategy that rolls messages, or moves them by hops.
KEPT: list[Step] = [
    lambda w: w.start(),
    lambda w: w.send("a", [500, 5 * SECOND_MS, 40 * SECOND_MS, 3 * MINUTE_MS, 2 * HOUR_MS]),  # k0 to k4
    lambda w: w.bulk("b", [100, 30 * SECOND_MS, 2 * HOUR_MS], 1),  # k5 to k7
    move_some(50 * SECOND_MS, 0, 4, 6),
    lambda w: w.checkpoint(),
    move_some(3 * MINUTE_MS, 1, 5, 2),
    lambda w: w.advance(40 * SECOND_MS),
    move_some(SECOND_MS, 1, 3),
    cancel_some(2),
    lambda w: w.advance(10 * SECOND_MS),
    lambda w: w.checkpoint(),
    lambda w: w.restart(),
    move_some(2 * MINUTE_MS, 5, 7),
    lambda w: w.advance(70 * SECOND_MS),
    lambda w: w.consume(),
    lambda w: w.apply_retention(),
    move_some(SECOND_MS, 7),
    lambda w: w.advance(SECOND_MS),
]

SCENARIOS: dict[str, list[Step]] = {"moves": MOVES, "moves on a wheel": KEPT, "moves on a cascade": KEPT}
SETTINGS: dict[str, dict[str, Any]] = {
    "moves": {"retention_ms": 1, "unread_retention_ms": 1},
    "moves on a wheel": {
        "strategy": "timer_wheel",
        "timer_wheel_ms": MINUTE_MS,
        "retention_ms": 1,
        "unread_retention_ms": 1,
    },
    "moves on a cascade": {"strategy": "level_cascade", "retention_ms": 1, "unread_retention_ms": 1},
}
