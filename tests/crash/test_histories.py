"""Recorded histories of messages are linearizable while the broker is killed, and the checker finds invented faults.

`make siege` kills brokers for 20 minutes: `TIMEBALL_SIEGE=all pytest tests/crash/test_histories.py -s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.crash.histories import UNKNOWN, History, Op, Recording, judge, make_topic
from tests.crash.siege import BUSY, BrokerProcess
from tests.rounds import rounds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.siege,
    pytest.mark.timeout(0),
    pytest.mark.xdist_group("histories"),
]

KILLS, EVERY_S, CLIENTS = rounds(2, 400), 3.0, 8
MS = 1_000_000


def record(folder: Path, kills: int) -> History:
    """Record a history while a broker is killed every three seconds."""
    broker = BrokerProcess(folder / "data", BUSY)
    try:
        assert broker.start()
        with broker.client() as ball:
            make_topic(ball)
        with Recording(lambda: [("127.0.0.1", broker.http_port)], 1, CLIENTS) as recording:
            for _ in range(kills):
                time.sleep(EVERY_S)
                broker.kill()
                assert broker.start()
            time.sleep(EVERY_S)
        with broker.client() as ball:
            recording.settle(ball)
    finally:
        broker.clear()
    return recording.history


def test_messages_are_linearizable_while_the_broker_is_killed(tmp_path: Path) -> None:
    history = record(tmp_path, KILLS)
    verdict = judge(history.ops, tmp_path)
    print(f"{KILLS} kills: {dict(verdict.counts)}")
    assert not verdict.wrong, verdict.text
    for kind in ("send", "cancel", "reschedule", "look-up", "release", UNKNOWN):
        assert verdict.counts[kind], f"the history has no {kind}"


# ---- controls ---------------------------------------------------------------------------------------------------

CANCELLED = [
    Op("m", "send", "sent", 0, 1 * MS, due_ms=50),
    Op("m", "cancel", "cancelled", 2 * MS, 3 * MS),
    Op("m", "look-up", "cancelled", 60 * MS, 61 * MS),
]
RELEASED = [
    Op("m", "send", "sent", 0, 1 * MS, due_ms=50),
    Op("m", "reschedule", "rescheduled", 2 * MS, 3 * MS, due_ms=70),
    Op("m", "release", "", 71 * MS, 80 * MS, due_ms=70, store_ms=71),
    Op("m", "look-up", "released", 90 * MS, 91 * MS),
]


def lose_an_acknowledged_message(ops: list[Op]) -> list[Op]:
    changes = [op for op in ops if op.kind in ("send", "reschedule")]
    return [*changes, Op("m", "look-up", "not_found", 99 * MS, 100 * MS)]


def resurrect_a_cancelled_message(ops: list[Op]) -> list[Op]:
    return [*CANCELLED, Op("m", "release", "", 51 * MS, 80 * MS, due_ms=50, store_ms=51)]


def release_early(ops: list[Op]) -> list[Op]:
    return [op._replace(store_ms=69, call_ns=69 * MS) if op.kind == "release" else op for op in ops]


def release_at_the_former_due_time(ops: list[Op]) -> list[Op]:
    return [
        op._replace(due_ms=50, store_ms=51, call_ns=51 * MS) if op.kind == "release" else op for op in ops
    ]


def release_twice(ops: list[Op]) -> list[Op]:
    return [*ops, ops[2]._replace(store_ms=75, call_ns=75 * MS)]


def read_a_stale_state(ops: list[Op]) -> list[Op]:
    return [*ops, Op("m", "look-up", "pending", 95 * MS, 96 * MS, due_ms=70)]


def read_a_stale_due_time(ops: list[Op]) -> list[Op]:
    return [*ops, Op("m", "look-up", "pending", 4 * MS, 5 * MS, due_ms=50)]


def cancel_twice(ops: list[Op]) -> list[Op]:
    return [*CANCELLED, Op("m", "cancel", "cancelled", 4 * MS, 5 * MS)]


@pytest.mark.parametrize(
    "contradict",
    [
        lose_an_acknowledged_message, resurrect_a_cancelled_message, release_early, release_at_the_former_due_time,
        release_twice, read_a_stale_state, read_a_stale_due_time, cancel_twice,
    ],
)  # fmt: skip
def test_a_history_without_an_order_is_noticed(
    tmp_path: Path, contradict: Callable[[list[Op]], list[Op]]
) -> None:
    assert judge(contradict(RELEASED), tmp_path).wrong == 1


def test_a_history_with_an_order_is_accepted(tmp_path: Path) -> None:
    # A send and a cancel without an answer, whose effect is seen only later.
    unknown = [
        Op("u", "send", UNKNOWN, 0, 1 * MS, due_ms=50),
        Op("u", "cancel", UNKNOWN, 2 * MS, 3 * MS),
        Op("u", "look-up", "not_found", 4 * MS, 5 * MS),
        Op("u", "cancel", "already_cancelled", 6 * MS, 7 * MS),
    ]
    # A message that is released later than a reschedule without an answer has requested.
    late = [
        Op("l", "send", "sent", 0, 1 * MS, due_ms=50),
        Op("l", "reschedule", UNKNOWN, 2 * MS, 3 * MS, due_ms=4),
        Op("l", "release", "", 9 * MS, 80 * MS, due_ms=8, store_ms=9),
    ]
    verdict = judge([*RELEASED, *late, *(op._replace(message="c") for op in CANCELLED), *unknown], tmp_path)
    assert not verdict.wrong and verdict.counts[UNKNOWN] == 3, verdict.text
