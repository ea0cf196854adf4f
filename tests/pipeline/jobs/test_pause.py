"""Tests of timeball.pipeline.jobs.pause: held or released, never both and never neither, wherever a command is cut."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.node_fixture import RunningNode, eventually, running_node
from tests.pipeline.campaigning import attach, campaign_of, released, waiting

from timeball import Timeball
from timeball.errors import InvalidMessage, StorageError
from timeball.limits import HOUR_MS
from timeball.message import TABLE_SCHEMA
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs import pause as pause_module
from timeball.pipeline.jobs.campaign import Campaign
from timeball.pipeline.jobs.campaigns import Campaigns
from timeball.pipeline.jobs.pause import Held, pause, resume

ROWS = 60


class Cut(BaseException):
    """The process ends here."""


def cut_at(patch: pytest.MonkeyPatch, owner: object, name: str, when: str = "before", times: int = 1) -> None:
    """Let the `times`th call of a step end the process, before it is done or after."""
    step: Callable[..., object] = getattr(owner, name)
    calls = 0

    def cut(*args: object, **given: object) -> object:
        nonlocal calls
        calls += 1
        if calls < times:
            return step(*args, **given)
        if when == "after":
            step(*args, **given)
        raise Cut

    patch.setattr(owner, name, cut)


def books(campaign: Campaign) -> tuple[str, int, int, int, int]:
    found = campaign.progress()
    assert found.rows == found.released + found.cancelled + found.waiting + found.held
    return found.state, found.released, found.cancelled, found.waiting, found.held


def test_a_pause_holds_what_waits_and_a_resume_gives_it_back(node: RunningNode, broker: Endpoint) -> None:
    campaign = campaign_of(node)
    attach(campaign, ROWS)
    before = waiting(broker)
    with Timeball(node.endpoint) as ball:
        ball.cancel(key="k7")
    paused = pause(campaign)
    assert (paused.number, paused.held, paused.repeated) == (1, ROWS - 1, False)
    assert books(campaign) == ("paused", 0, 1, 0, ROWS - 1)
    assert waiting(broker) == {}
    again = pause(campaign)
    assert (again.held, again.repeated) == (ROWS - 1, True)
    back = resume(campaign)
    assert (back.rows, back.shift_ms, back.repeated) == (ROWS - 1, 0, False)
    assert books(campaign) == ("active", 0, 1, ROWS - 1, 0)
    assert waiting(broker) == {key: due for key, due in before.items() if key != "k7"}
    assert resume(campaign).repeated
    assert not Path(Held(campaign, 1).uri).exists()


def test_twice_and_then_the_end(node: RunningNode, broker: Endpoint) -> None:
    """What was held, resumed and held again is counted once, and cancelled with the rest."""
    campaign = campaign_of(node)
    attach(campaign, ROWS)
    pause(campaign)
    resume(campaign)
    assert pause(campaign).number == 2
    done = pause_module.cancel(campaign)
    assert (done.rows, done.newly, done.cancelled, done.released) == (ROWS, 0, ROWS, 0)
    assert books(campaign) == ("cancelled", 0, ROWS, 0, 0)
    assert not Path(Held(campaign, 2).uri).exists()
    for act in (pause, resume):
        with pytest.raises(InvalidMessage, match="was cancelled"):
            act(campaign)
    assert waiting(broker) == {}


def test_what_fell_due_meanwhile_is_due_at_once_or_everything_is_moved(
    node: RunningNode, broker: Endpoint
) -> None:
    for name, shift in (("at-once", False), ("moved", True)):
        campaign = campaign_of(node, name)
        attach(campaign, 40, after_ms=100, step_ms=0)  # all due in a moment
        paused = pause(campaign)
        out_before = sum(released(broker).values())
        threading.Event().wait(0.2)  # so that the held ones are overdue
        assert sum(released(broker).values()) == out_before
        back = resume(campaign, shift=shift)
        assert back.rows == paused.held
        assert (back.shift_ms > 0) == shift
        eventually(lambda: sum(released(broker).values()) == out_before + paused.held, "all are released")  # noqa: B023
        assert books(campaign)[0] == "done"
    assert set(released(broker).values()) == {2}  # each key once a campaign


def test_a_pause_amid_releases_loses_and_doubles_nothing(node: RunningNode, broker: Endpoint) -> None:
    """The race itself: promises fall due every millisecond while the pause looks at them."""
    campaign = campaign_of(node)
    attach(campaign, 3_000, after_ms=-500, step_ms=1)
    paused = pause(campaign)
    state, out, cancelled, left, held = books(campaign)
    assert (state, cancelled, left, held) == ("paused", 0, 0, paused.held)
    assert out == sum(released(broker).values()) and out + held == 3_000
    resume(campaign)
    eventually(lambda: len(released(broker)) == 3_000, "the others follow")
    assert set(released(broker).values()) == {1}


def other(*values: object) -> object:
    """The same cut, and another command after it, or another cut: half a second each, and there are many."""
    return pytest.param(*values, marks=pytest.mark.slow)


PAUSE_CUTS = [
    other(Held, "copy", "before", 1),
    (Held, "copy", "after", 1),
    (Endpoint, "cancel_ranges", "after", 1),
    other(Held, "numbers", "after", 1),
    other(Campaigns, "record", "after", 1),  # pausing
    other(Campaigns, "record", "after", 2),  # paused
]
RESUME_CUTS = [
    other(Campaigns, "record", "after", 1),  # resuming
    (Endpoint, "reserve", "after", 2),
    other(Endpoint, "attach", "before", 1),
    (Endpoint, "attach", "after", 1),
    other(Campaigns, "record", "before", 2),  # resumed
    other(Campaigns, "record", "after", 2),
    other(Held, "remove", "before", 1),
]


@pytest.mark.parametrize(("owner", "name", "when", "times"), PAUSE_CUTS)
@pytest.mark.parametrize("then", ["pause", other("resume"), other("cancel")])
def test_a_pause_that_is_cut_goes_on(
    node: RunningNode, broker: Endpoint, owner: type, name: str, when: str, times: int, then: str
) -> None:
    """With the same command, with the opposite one, or with the end of it all."""
    campaign = campaign_of(node)
    attach(campaign, ROWS)
    before = waiting(broker)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Cut):
        cut_at(patch, owner, name, when, times)
        pause(campaign)
    _, out, cancelled, left, held = books(campaign)
    assert (out, cancelled, left + held) == (0, 0, ROWS)
    if then == "cancel":
        done = pause_module.cancel(campaign)
        assert (done.cancelled, waiting(broker)) == (ROWS, {})
        return
    if then == "pause":
        assert pause(campaign).held == ROWS
        assert books(campaign) == ("paused", 0, 0, 0, ROWS) and waiting(broker) == {}
    resume(campaign)
    left_over = books(campaign)
    assert left_over == ("active", 0, 0, ROWS, 0)
    assert waiting(broker) == before


@pytest.mark.parametrize(("owner", "name", "when", "times"), RESUME_CUTS)
@pytest.mark.parametrize("then", ["resume", other("pause"), other("cancel")])
def test_a_resume_that_is_cut_goes_on(
    node: RunningNode,
    broker: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    when: str,
    times: int,
    then: str,
) -> None:
    monkeypatch.setattr("timeball.pipeline.source.chunks.CHUNK_ROWS", ROWS // 2)  # two runs, two ranges
    campaign = campaign_of(node)
    attach(campaign, ROWS)
    before = waiting(broker)
    pause(campaign)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Cut):
        cut_at(patch, owner, name, when, times)
        resume(campaign)
    _, out, cancelled, left, held = books(campaign)
    assert (out, cancelled, left + held) == (0, 0, ROWS)
    if then == "cancel":
        done = pause_module.cancel(campaign)
        assert (done.cancelled, waiting(broker)) == (ROWS, {})
    elif then == "resume":
        resume(campaign)
        assert books(campaign) == ("active", 0, 0, ROWS, 0)
        assert waiting(broker) == before
    else:
        assert pause(campaign).held == ROWS
        assert books(campaign) == ("paused", 0, 0, 0, ROWS) and waiting(broker) == {}


def test_whoever_keeps_the_promises_of_the_log(tmp_path: Path) -> None:
    """Those of a bulk write lie in the table, whatever the schedule is."""
    with running_node(tmp_path / "wheel", strategy="timer_wheel") as node:
        campaign = campaign_of(node)
        attach(campaign, ROWS)
        assert pause(campaign).held == ROWS
        assert resume(campaign).rows == ROWS
        assert pause_module.cancel(campaign).cancelled == ROWS


def test_two_at_the_same_time_are_one(node: RunningNode, broker: Endpoint) -> None:
    attach(campaign_of(node), ROWS)
    before = waiting(broker)
    for act in (pause, resume):
        threads = [threading.Thread(target=act, args=(campaign_of(node),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert books(campaign_of(node)) == ("active", 0, 0, ROWS, 0)
    assert waiting(broker) == before


def test_a_promise_that_was_not_copied_is_not_lost_in_silence(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a pause that cancels more than it has copied says so."""
    campaign = campaign_of(node)
    attach(campaign, ROWS)
    copied = Held._waiting
    monkeypatch.setattr(Held, "_waiting", lambda *args: (batch.slice(1) for batch in copied(*args)))
    with pytest.raises(StorageError, match=r"promises were cancelled by pause 1 and are not among the"):
        pause(campaign)


def test_rows_wait_again_no_earlier_than_now_and_in_order() -> None:
    rows = TABLE_SCHEMA.empty_table().slice(0, 0)
    count = 4
    columns = {f.name: pa.nulls(count, f.type) for f in TABLE_SCHEMA}
    columns["due_ms"] = pa.array([HOUR_MS, 5, 2 * HOUR_MS, 7])
    columns["seq"] = pa.array(np.arange(count))
    rows = pa.table(columns, schema=TABLE_SCHEMA)
    found = pause_module.again(rows, 100, 0)
    assert found.column("due_ms").to_pylist() == [100, 100, HOUR_MS, 2 * HOUR_MS]
    assert found.column("seq").to_pylist() == [1, 3, 0, 2]
    assert pause_module.again(rows, 100, 95).column("due_ms").to_pylist()[:2] == [100, 102]
