"""Short runs of a broker that together use every call to the disk.

A scenario is a list of steps, so that a test may continue after a step that was refused. Delays are in
milliseconds from the moment of the step.
"""

from __future__ import annotations

from typing import Any

from tests.crash import dispatch_scenarios, kept_scenarios, moved_scenarios
from tests.crash.steps import Step, cancel_some
from tests.crash.world import HOUR_MS, SECOND_MS

Scenario = list[Step]

FAR_MS = 30 * SECOND_MS  # beyond the ten seconds gathered ahead


# Append and release. Cancels of near, far, released and unknown messages. Consumers, checkpoint, clean stop, restart.
PLAIN: Scenario = [
    lambda w: w.start(),
    lambda w: w.create_topic("made", 3),
    lambda w: w.send("a", [None, 500, 2 * SECOND_MS, None, FAR_MS, 2 * HOUR_MS]),  # k0 to k5
    lambda w: w.send("b", [800, 800, FAR_MS]),  # k6 to k8
    lambda w: w.send_at_once("a", [[None, 900], [None], [FAR_MS, 700]]),  # k9 to k13
    lambda w: w.consume(),
    cancel_some(5, 6, 8, 77),
    lambda w: w.advance(SECOND_MS),
    lambda w: w.consume(),
    lambda w: w.save_offsets(),
    lambda w: w.checkpoint(),
    cancel_some(1, 2, 4, 5),
    lambda w: w.send("b", [None, 100, FAR_MS]),  # k14 to k16
    lambda w: w.advance(2 * SECOND_MS),
    lambda w: w.restart(),
    lambda w: w.send("made", [None, 100, 5 * SECOND_MS]),  # k17 to k19
    lambda w: w.advance(40 * SECOND_MS),
    lambda w: w.consume(),
    cancel_some(19, 16),
    lambda w: w.stop(),
]

# The broker's own compaction, twice. Cancels and releases of messages in the table. A rewritten file.
COMPACT: Scenario = [
    lambda w: w.start(),
    lambda w: w.send("a", [None, 500, 2 * SECOND_MS, FAR_MS, FAR_MS, 3 * HOUR_MS]),  # k0 to k5
    lambda w: w.send("b", [5 * SECOND_MS, FAR_MS, 2 * HOUR_MS]),  # k6 to k8
    lambda w: w.compact(),
    cancel_some(3, 8),
    lambda w: w.send("b", [700, FAR_MS + 1, 4 * HOUR_MS]),  # k9 to k11
    lambda w: w.advance(SECOND_MS),
    lambda w: w.consume(),
    lambda w: w.compact(),
    lambda w: w.checkpoint(),
    lambda w: w.advance(FAR_MS),
    cancel_some(4, 5, 7),
    lambda w: w.rewrite(1),
    lambda w: w.merge(),
    lambda w: w.apply_retention(),
    lambda w: w.consume(),
    lambda w: w.restart(),
    cancel_some(11, 3),
    lambda w: w.send("a", [10, 50]),  # k12, k13
    lambda w: w.compact(),
    lambda w: w.merge(),
    lambda w: w.advance(SECOND_MS),
    lambda w: w.apply_retention(),
    lambda w: w.compact(),
]

# Rows that come in as files: far, near and late ones; some cancelled; with a checkpoint between.
BULK: Scenario = [
    lambda w: w.start(),
    lambda w: w.send("a", [None, 300, FAR_MS]),  # k0 to k2
    lambda w: w.bulk("a", [100, 2 * SECOND_MS, FAR_MS, 2 * HOUR_MS, 2 * HOUR_MS], 1),  # k3 to k7
    lambda w: w.advance(SECOND_MS),
    cancel_some(4, 6),
    lambda w: w.bulk("c", [-HOUR_MS, -1, 50, FAR_MS + 5], 2),  # k8 to k11: late when they come
    lambda w: w.settled(),
    lambda w: w.consume(),
    lambda w: w.checkpoint(),
    lambda w: w.bulk("c", [-HOUR_MS, 20, FAR_MS], 3),  # k12 to k14
    cancel_some(14, 12),
    lambda w: w.settled(),
    lambda w: w.compact(),
    lambda w: w.restart(),
    lambda w: w.merge(),
    lambda w: w.advance(FAR_MS),
    cancel_some(11, 7),
    lambda w: w.apply_retention(),
    lambda w: w.consume(),
    lambda w: w.apply_retention(),
    lambda w: w.compact(),
    lambda w: w.checkpoint(),
]

# A campaign that is paused, resumed and ended, with other messages in its files. Some of its messages are cancelled
# meanwhile.
CAMPAIGN: Scenario = [
    lambda w: w.start(),
    lambda w: w.campaign("spring", "a", [100, 2 * SECOND_MS, FAR_MS, FAR_MS, 2 * HOUR_MS]),  # k0 to k4
    lambda w: w.bulk("a", [200, 3 * SECOND_MS, FAR_MS], 1),  # k5 to k7
    lambda w: w.merge(),
    lambda w: w.advance(SECOND_MS),
    lambda w: w.pause("spring"),
    lambda w: w.advance(3 * SECOND_MS),
    lambda w: w.consume(),
    cancel_some(2),
    lambda w: w.checkpoint(),
    lambda w: w.resume("spring", ["k00001", "k00003", "k00004"], shift=True),
    lambda w: w.advance(SECOND_MS),
    lambda w: w.restart(),
    lambda w: w.pause("spring"),
    lambda w: w.advance(2 * FAR_MS),
    lambda w: w.merge(),
    lambda w: w.apply_retention(),
    lambda w: w.restart(),
    lambda w: w.resume("spring", ["k00003", "k00004"]),
    lambda w: w.settled(),
    lambda w: w.consume(),
    lambda w: w.pause("spring"),
    lambda w: w.end_campaign("spring"),
    lambda w: w.campaign("autumn", "a", [100, 2 * SECOND_MS, FAR_MS, 2 * HOUR_MS]),  # k8 to k11
    lambda w: w.advance(SECOND_MS),
    lambda w: w.end_campaign("autumn"),
    lambda w: w.checkpoint(),
]


def keys(*numbers: int) -> list[str]:
    """Return the keys with these numbers."""
    return [f"k{number:05d}" for number in numbers]


# Two selections: of one topic, and of all pending messages. Both are undone, after some messages were due.
SELECT: Scenario = [
    lambda w: w.start(),
    lambda w: w.send("a", [500, 2 * SECOND_MS, FAR_MS, FAR_MS, 2 * HOUR_MS, 2 * HOUR_MS]),  # k0 to k5
    lambda w: w.send("b", [FAR_MS, 3 * HOUR_MS]),  # k6, k7
    lambda w: w.compact(),
    lambda w: w.send("a", [3 * SECOND_MS, FAR_MS, 2 * HOUR_MS]),  # k8 to k10
    lambda w: w.select(keys(0, 1, 2, 3, 4, 5, 8, 9, 10), topics=["a"]),
    lambda w: w.advance(SECOND_MS),
    lambda w: w.checkpoint(),
    lambda w: w.send("a", [2 * HOUR_MS]),  # k11
    lambda w: w.undo(0, keys(1, 2, 3, 4, 5, 8, 9, 10)),
    lambda w: w.select(keys(*range(1, 12)), where="TRUE"),
    lambda w: w.advance(3 * SECOND_MS),
    lambda w: w.restart(),
    cancel_some(2),
    lambda w: w.broker.selections.count(),
    lambda w: w.rewrite(1),
    lambda w: w.compact(),
    lambda w: w.consume(),
    lambda w: w.undo(1, keys(3, 4, 5, 6, 7, 9, 10, 11)),
    lambda w: w.apply_retention(),
    lambda w: w.advance(FAR_MS),
    lambda w: w.consume(),
    lambda w: w.stop(),
]

# The other operations of selections. Each message has exactly the due time and topic of its operations.
OPERATE: Scenario = [
    lambda w: w.start(),
    lambda w: w.send("a", [500, 2 * SECOND_MS, FAR_MS, 2 * HOUR_MS]),  # k0 to k3
    lambda w: w.compact(),
    lambda w: w.send("b", [3 * SECOND_MS, FAR_MS, 2 * HOUR_MS]),  # k4 to k6
    lambda w: w.operate(keys(0, 1, 2, 3), topics=["a"], action="shift", shift_ms=HOUR_MS),
    lambda w: w.operate(keys(*range(7)), where="TRUE", action="pause"),
    lambda w: w.advance(SECOND_MS),
    lambda w: w.checkpoint(),
    lambda w: w.operate(keys(4, 5, 6), topics=["b"], action="move", to_topic="a"),
    lambda w: w.advance(3 * SECOND_MS),
    lambda w: w.take_back(0, keys(0, 1, 2, 3)),
    lambda w: w.operate(keys(*range(7)), topics=["a"], action="resume"),
    lambda w: w.compact(),
    lambda w: w.broker.selections.count(),
    lambda w: w.restart(),
    lambda w: w.wake(),
    lambda w: w.operate(keys(3, 6), from_ms=w.clock.wall + HOUR_MS, action="release"),
    lambda w: w.consume(),
    lambda w: w.apply_retention(),
    lambda w: w.advance(FAR_MS),
    lambda w: w.stop(),
]

# Segments that fill up and are removed, with pending messages in them. Files without pending messages are removed.
ROLL: Scenario = [
    lambda w: w.start(),
    lambda w: w.send("a", [None, 500, FAR_MS, HOUR_MS], 100_000),  # k0 to k3
    lambda w: w.send("a", [600, 700, FAR_MS], 100_000),  # k4 to k6: more than half full, so a spare is made
    lambda w: w.advance(SECOND_MS),  # the releases do not fit: roll
    lambda w: w.send("b", [None, 10 * SECOND_MS, 2 * HOUR_MS], 100_000),  # k7 to k9
    cancel_some(3),
    lambda w: w.send("b", [None] * 14, 100_000),  # one commit larger than a segment
    lambda w: w.consume(),
    lambda w: w.save_offsets(),
    lambda w: w.compact(),
    lambda w: w.checkpoint(),
    lambda w: w.apply_retention(),
    lambda w: w.advance(FAR_MS),
    lambda w: w.compact(),
    lambda w: w.consume(),
    lambda w: w.checkpoint(),
    lambda w: w.apply_retention(),
    lambda w: w.send("a", [100, FAR_MS], 1_000),  # k24, k25
    lambda w: w.restart(),
    cancel_some(9, 0, 25),
    lambda w: w.advance(SECOND_MS),
    lambda w: w.apply_retention(),
]

# Scheduled messages with past due times, saved in the middle: the mark "all before T is settled" steps
# back.
LATE: Scenario = [
    lambda w: w.start(),
    lambda w: w.send("a", [100, 200, 4 * SECOND_MS, 5 * SECOND_MS, FAR_MS]),  # k0 to k4
    lambda w: w.advance(SECOND_MS),
    lambda w: w.consume(),
    cancel_some(2),
    lambda w: w.checkpoint(),
    lambda w: w.restart(),
    lambda w: w.advance(2 * SECOND_MS),
    lambda w: w.advance(2 * SECOND_MS),
    lambda w: w.consume(),
    lambda w: w.send("a", [-HOUR_MS, 60, 8 * SECOND_MS]),  # k5 to k7
    lambda w: w.checkpoint(),
    lambda w: w.bulk("a", [-HOUR_MS, 70, FAR_MS], 1),  # k8 to k10
    lambda w: w.checkpoint(),
    lambda w: w.compact(),
    lambda w: w.send("a", [-2 * HOUR_MS]),  # k11
    lambda w: w.checkpoint(),
    lambda w: w.stop(),
    lambda w: w.start(),
    lambda w: w.send("a", [-2 * HOUR_MS, 20]),  # k12, k13
    lambda w: w.compact(),
    lambda w: w.send("a", [-2 * HOUR_MS]),  # k14
    lambda w: w.checkpoint(),
    lambda w: w.advance(SECOND_MS),
]

# Delay levels: near and far, some cancelled. Pending messages keep segments from removal.
LEVELS: Scenario = [
    lambda w: w.start(),
    lambda w: w.send_levels("a", [1, 2, 3, 4, 5, 14]),  # k0 to k5: 1 s, 5 s, 10 s, 30 s, 1 min, 10 min
    lambda w: w.send("a", [None, 500, FAR_MS]),  # k6 to k8
    lambda w: w.send_levels("b", [3, 3, 1, 18]),  # k9 to k12
    cancel_some(3, 5, 10, 77),
    lambda w: w.advance(SECOND_MS),
    lambda w: w.consume(),
    lambda w: w.checkpoint(),
    lambda w: w.send_levels("a", [2, 4, 4], 100_000),  # k13 to k15
    lambda w: w.send("b", [None] * 9, 100_000),  # k16 to k24: roll
    cancel_some(1, 14, 0),
    lambda w: w.advance(4 * SECOND_MS),
    lambda w: w.compact(),
    lambda w: w.checkpoint(),
    lambda w: w.apply_retention(),
    lambda w: w.restart(),
    lambda w: w.advance(6 * SECOND_MS),
    lambda w: w.send_levels("a", [1, 3]),  # k25, k26
    lambda w: w.consume(),
    lambda w: w.save_offsets(),
    lambda w: w.advance(FAR_MS),
    cancel_some(26, 12, 15),
    lambda w: w.checkpoint(),
    lambda w: w.restart(),
    lambda w: w.send_levels("b", [5]),  # k27
    lambda w: w.advance(600 * SECOND_MS),
    lambda w: w.apply_retention(),
    lambda w: w.compact(),
    lambda w: w.checkpoint(),
    lambda w: w.apply_retention(),
]

SCENARIOS: dict[str, Scenario] = {
    "levels": LEVELS,
    "late": LATE,
    "plain": PLAIN,
    "compact": COMPACT,
    "bulk": BULK,
    "campaign": CAMPAIGN,
    "select": SELECT,
    "operate": OPERATE,
    "roll": ROLL,
    **kept_scenarios.SCENARIOS,
    **dispatch_scenarios.SCENARIOS,
    **moved_scenarios.SCENARIOS,
}
# Retention keeps only needed rows, so that these scenarios see the removal of segments.
SETTINGS: dict[str, dict[str, Any]] = {
    "roll": {"retention_ms": 1, "unread_retention_ms": 1},
    "levels": {"retention_ms": 1, "unread_retention_ms": 1},
    **kept_scenarios.SETTINGS,
    **moved_scenarios.SETTINGS,
}
