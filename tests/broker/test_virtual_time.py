"""An advance in steps: one for each deadline, with all its work done before the next step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node_fixture import RunningNode, running_node

from timeball import OutOfRange
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.virtual_time import Step, VirtualTime
from timeball.io.clock import ManualClock
from timeball.model.config import STRATEGIES, StrategyName
from timeball.model.limits import DAY_MS, DELAY_MS_MAX, HOUR_MS
from timeball.model.time_parsing import delay_ms


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("virtual") / "data", ManualClock()) as running:
        yield running


@pytest.fixture
def time(node: RunningNode) -> VirtualTime:
    assert node.broker.virtual_time is not None
    return node.broker.virtual_time


def steps_to(node: RunningNode, time: VirtualTime, target_ms: int) -> list[Step]:
    """Advance to `target_ms`, and list all steps."""
    steps = [node.run(time.step(target_ms))]
    while not steps[-1].is_last:
        steps.append(node.run(time.step(target_ms)))
    return steps


def test_each_due_time_is_a_step_whose_messages_are_durable(node: RunningNode, time: VirtualTime) -> None:
    begin_ms = time.now_ms
    with node.client() as ball:
        for after in ("3d", "1d", "1d", "2d"):
            ball.send("steps", after.encode(), after=after)
    steps = steps_to(node, time, begin_ms + 4 * DAY_MS)
    released = {
        step.now_ms - begin_ms: [body for rows in step.released for body in rows.column("body").to_pylist()]
        for step in steps
        if step.released
    }
    assert released == {DAY_MS: [b"1d", b"1d"], 2 * DAY_MS: [b"2d"], 3 * DAY_MS: [b"3d"]}
    # One step for each due time, and the last step to the target. No step only opens or loads messages ahead.
    assert [step.now_ms - begin_ms for step in steps] == [DAY_MS, 2 * DAY_MS, 3 * DAY_MS, 4 * DAY_MS]
    assert [step.is_last for step in steps].count(True) == 1 and steps[-1].now_ms == begin_ms + 4 * DAY_MS
    assert node.broker.scheduling.scheduler.in_flight_rows == 0


# The actions of selections on a message that is due in 2 h, and the minutes after which it is released.
SELECTED = {
    "a shift": (["shift", "-90m"], 30),
    "a release": (["release"], 0),
    "a pause and its end": (["pause", "resume"], 120),
    "a shift to later": (["shift", "1h"], 180),
}


@pytest.mark.parametrize("name", SELECTED)
def test_selected_messages_are_released_at_their_new_times(
    node: RunningNode, time: VirtualTime, name: str
) -> None:
    topic, begin_ms = f"selected-{list(SELECTED).index(name)}", time.now_ms
    actions, minutes = SELECTED[name]
    with node.client() as ball:
        for _ in range(2):
            sent_ms = time.now_ms
            ball.send(topic, b"x", after="2h")
            if actions[0] == "shift":
                ball.selections.shift(actions[1], "TRUE", topics=[topic])
            else:
                for action in actions:
                    getattr(ball.selections, action)("TRUE", topics=[topic])
            steps = steps_to(node, time, time.now_ms + 4 * HOUR_MS)
            assert [step.now_ms - sent_ms for step in steps if step.released] == [minutes * 60_000]
    assert time.now_ms == begin_ms + 8 * HOUR_MS


def test_a_step_stops_at_the_deadline_of_an_activity_and_waits_for_its_work(
    node: RunningNode, time: VirtualTime
) -> None:
    class Activity:
        """Has work in five seconds, and is busy the first three times that it is asked then."""

        due_ms, busy_looks, done_ms = time.now_ms + 5_000, 3, 0

        @property
        def is_busy(self) -> bool:
            if time.now_ms < self.due_ms or not self.busy_looks:
                return False
            self.busy_looks -= 1
            self.done_ms = time.now_ms
            return True

        def wait_ms(self) -> int | None:
            return self.due_ms - time.now_ms if time.now_ms < self.due_ms else None

        def wake(self) -> None:
            pass

    activity = Activity()
    time.activities.append(activity)
    steps = steps_to(node, time, time.now_ms + 60_000)
    time.activities.remove(activity)
    assert (activity.busy_looks, activity.done_ms) == (0, activity.due_ms)
    assert activity.due_ms in [step.now_ms for step in steps]


def test_an_acknowledged_lease_is_no_deadline(node: RunningNode, time: VirtualTime) -> None:
    async def receive() -> list[bool]:
        received = await node.broker.consuming.receive(
            ReceiveRequest("g", "acknowledged", invisible_ms=HOUR_MS), 0
        )
        return await node.broker.consuming.acknowledge(received.receipts)

    with node.client() as ball:
        ball.send("acknowledged", b"x")
    assert node.run(receive()) == [True]
    assert len(steps_to(node, time, time.now_ms + DAY_MS)) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_a_manual_clock_every_strategy_releases_exactly_at_the_due_time(
    strategy: StrategyName, tmp_path: Path
) -> None:
    afters = [f"{days}d" for days in (1, 2, 9, 40)] + ["1s", "3s", "7s", "20s", "1h"]
    with running_node(tmp_path / "data", ManualClock(), strategy=strategy) as node:
        time = node.broker.virtual_time
        assert time is not None
        begin_ms = time.now_ms
        with node.client() as ball:
            for after in afters:
                ball.send("steps", after.encode(), after=after)
        steps = steps_to(node, time, begin_ms + 50 * DAY_MS)
        released = [
            (body.decode(), step.now_ms)
            for step in steps
            for rows in step.released
            for body in rows.column("body").to_pylist()
        ]
    due_ms = sorted((begin_ms + delay_ms(after), after) for after in afters)
    assert released == [(after, at_ms) for at_ms, after in due_ms]


@pytest.mark.parametrize("ms", [-1, DELAY_MS_MAX + 1], ids=["past", "too far"])
def test_a_target_out_of_range_moves_nothing(node: RunningNode, time: VirtualTime, ms: int) -> None:
    before_ms = time.now_ms
    with pytest.raises(OutOfRange):
        node.run(time.step(before_ms + ms))
    assert time.now_ms == before_ms


def test_a_broker_with_the_system_clock_has_no_virtual_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_node(tmp_path_factory.mktemp("system") / "data") as node:
        assert node.broker.virtual_time is None
