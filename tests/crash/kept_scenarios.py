"""Scenarios with the strategies other than `hour_log`, and one that changes the strategy.

A wheel's ring is a minute here, so a message due in three minutes rolls. A cascade takes a hop for each digit of the
remaining time. Both rewrite scheduled messages, so there are moves in flight, durable ones, and ones older than a
checkpoint.
"""

from __future__ import annotations

from typing import Any

from tests.crash.steps import Step, cancel_some
from tests.crash.world import HOUR_MS, SECOND_MS, World

MINUTE_MS = 60 * SECOND_MS
SETTINGS: dict[str, dict[str, Any]] = {
    "wheel": {
        "strategy": "timer_wheel",
        "timer_wheel_ms": MINUTE_MS,
        "retention_ms": 1,
        "unread_retention_ms": 1,
    },
    "cascade": {"strategy": "level_cascade", "retention_ms": 1, "unread_retention_ms": 1},
    "change": {"timer_wheel_ms": MINUTE_MS, "retention_ms": 1, "unread_retention_ms": 1},
}


def change_to(schedule: str) -> Step:
    """Stop, and start with another strategy."""

    async def change(world: World) -> None:
        await world.restart(strategy=schedule)

    return change


# Near and far, late and beyond the ring. Cancels of pending, rolling, near and released messages. Files of a bulk job.
KEPT: list[Step] = [
    lambda w: w.start(),
    lambda w: w.send("a", [None, 500, 5 * SECOND_MS, 40 * SECOND_MS, 3 * MINUTE_MS, 2 * HOUR_MS]),  # k0 to k5
    lambda w: w.send("b", [800, 800, -HOUR_MS, 3 * MINUTE_MS]),  # k6 to k9
    lambda w: w.checkpoint(),
    lambda w: w.send_at_once("a", [[None, 45 * SECOND_MS], [3 * MINUTE_MS, 20 * SECOND_MS]]),  # k10 to k13
    cancel_some(3, 9, 77),
    lambda w: w.advance(SECOND_MS),
    lambda w: w.consume(),
    lambda w: w.bulk("b", [100, 30 * SECOND_MS, 2 * HOUR_MS], 1),  # k14 to k16
    lambda w: w.advance(29 * SECOND_MS),
    lambda w: w.send("a", [None] * 5 + [10, 50 * SECOND_MS], 100_000),  # k17 to k23
    lambda w: w.checkpoint(),
    lambda w: w.advance(25 * SECOND_MS),
    cancel_some(12, 16, 5),
    lambda w: w.advance(10 * SECOND_MS),
    lambda w: w.apply_retention(),
    lambda w: w.restart(),
    lambda w: w.advance(20 * SECOND_MS),
    lambda w: w.send("b", [None] * 8 + [70 * SECOND_MS], 100_000),  # k24 to k32
    lambda w: w.consume(),
    lambda w: w.checkpoint(),
    lambda w: w.apply_retention(),
    lambda w: w.advance(2 * MINUTE_MS),
    lambda w: w.consume(),
    cancel_some(4, 32),
    lambda w: w.restart(),
    lambda w: w.advance(HOUR_MS),
    lambda w: w.checkpoint(),
    lambda w: w.apply_retention(),
]

# Each strategy takes over from each, with scheduled messages waiting, moved, late and in the table.
CHANGE: list[Step] = [
    lambda w: w.start(),
    lambda w: w.send("a", [500, 30 * SECOND_MS, 3 * MINUTE_MS, 2 * HOUR_MS]),  # k0 to k3
    lambda w: w.compact(),
    lambda w: w.send("a", [700, 40 * SECOND_MS, 5 * MINUTE_MS]),  # k4 to k6
    lambda w: w.advance(SECOND_MS),
    change_to("timer_wheel"),
    cancel_some(3, 5),
    lambda w: w.send("b", [20, 35 * SECOND_MS, 4 * MINUTE_MS, 3 * HOUR_MS]),  # k7 to k10
    lambda w: w.advance(MINUTE_MS),
    lambda w: w.checkpoint(),
    lambda w: w.send("b", [50, 2 * MINUTE_MS]),  # k11, k12
    change_to("level_cascade"),
    lambda w: w.advance(20 * SECOND_MS),
    lambda w: w.send("a", [15 * SECOND_MS, 4 * MINUTE_MS]),  # k13, k14
    lambda w: w.checkpoint(),
    lambda w: w.apply_retention(),
    cancel_some(12),
    lambda w: w.advance(50 * SECOND_MS),
    change_to("hour_log"),
    lambda w: w.consume(),
    lambda w: w.send("a", [15 * SECOND_MS, 4 * MINUTE_MS]),  # k15, k16
    cancel_some(16, 14),
    lambda w: w.compact(),
    lambda w: w.advance(MINUTE_MS),
    change_to("level_cascade"),
    lambda w: w.advance(MINUTE_MS),
    change_to("timer_wheel"),
    lambda w: w.advance(HOUR_MS),
    lambda w: w.apply_retention(),
]

SCENARIOS: dict[str, list[Step]] = {"wheel": KEPT, "cascade": KEPT, "change": CHANGE}
