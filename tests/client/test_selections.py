"""`ball.selections`, blocking and awaitable, against a real broker."""

from __future__ import annotations

import asyncio
import inspect
from datetime import timedelta

import pytest
from tests.node_fixture import RunningNode, eventually

from timeball import AsyncTimeball, InvalidMessage, NotFound, Timeball
from timeball.client.async_timeball import AsyncSelections
from timeball.client.selections import Selections


def test_a_cancelling_selection_is_counted_made_and_undone(node: RunningNode) -> None:
    with Timeball(node.http_endpoint) as ball:
        sent = [ball.send("selected", "x", after="1h", tag=tag) for tag in ("red", "blue")]
        dry_run = ball.selections.dry_run("tag = 'red'", topics=["selected"])
        assert (dry_run.count, [sample.id for sample in dry_run.samples]) == (1, [sent[0].id])
        selection = ball.selections.cancel("tag = 'red'", topics=["selected"])
        assert (selection.state, selection.where) == ("active", "tag = 'red'")
        assert [ball.get(receipt.id).state for receipt in sent] == ["cancelled", "waiting"]
        assert ball.selections.get(selection.id).id == selection.id
        assert ball.selections.undo(selection.id).state == "undone"
        assert ball.get(sent[0].id).state == "waiting"
        due_ms = sent[0].due_ms
        assert due_ms is not None
        by_due_time = ball.selections.cancel(topics=["selected"], start=due_ms, to=due_ms + 1)
        assert ball.get(sent[0].id).state == "cancelled"
        assert [selection.id for selection in ball.selections.all()][-2:] == [selection.id, by_due_time.id]
        assert ball.cancel(sent[0].id).verdict == "already_cancelled"


def test_shift_move_pause_resume_and_release_change_the_selected_message(node: RunningNode) -> None:
    with Timeball(node.http_endpoint) as ball:
        sent = ball.send("changed", "x", after="1h")
        assert sent.due_ms is not None
        by_topic = {"topics": ["changed"]}
        dry_run = ball.selections.dry_run(action="shift", by="-30m", **by_topic)
        assert dry_run.count == 1
        # Both times may be in one hour, together with messages of other tests.
        assert sum(hour.before for hour in dry_run.load) == sum(hour.after for hour in dry_run.load) >= 1
        first_shift = ball.selections.shift(timedelta(hours=2), **by_topic)
        assert (first_shift.action, first_shift.shift_ms) == ("shift", 7_200_000)
        assert ball.get(sent.id).due_ms == sent.due_ms + 7_200_000
        ball.selections.shift("-30m", **by_topic)
        assert ball.get(sent.id).due_ms == sent.due_ms + 5_400_000
        assert ball.selections.undo(first_shift.id).state == "undone"
        assert ball.get(sent.id).due_ms == sent.due_ms - 1_800_000
        assert ball.selections.move("elsewhere", **by_topic).to_topic == "elsewhere"
        assert ball.get(sent.id).topic == "elsewhere"
        by_new_topic = {"topics": ["elsewhere"]}
        paused = ball.selections.pause(**by_new_topic)
        assert ball.get(sent.id).reason == f"paused by selection {paused.id}"
        assert ball.selections.resume(**by_new_topic).action == "resume"
        assert ball.get(sent.id).reason is None
        ball.selections.release(**by_new_topic)
        eventually(lambda: ball.get(sent.id).state == "visible", "the message is visible")
        assert ball.get(sent.id).topic == "elsewhere"


def test_wrong_arguments_of_selections_are_refused(node: RunningNode) -> None:
    with Timeball(node.http_endpoint) as ball:
        with pytest.raises(InvalidMessage, match="give a condition"):
            ball.selections.cancel()
        with pytest.raises(InvalidMessage, match="a shift needs a duration"):
            ball.selections.shift("0s", topics=["a"])
        for operation in (ball.selections.cancel, ball.selections.dry_run):
            with pytest.raises(InvalidMessage, match=r"topics='abc': give a list, as in topics=\['abc'\]"):
                operation(topics="abc")
        with pytest.raises(NotFound):
            ball.selections.undo("77")


def test_asyncselections_has_all_methods_of_selections(node: RunningNode) -> None:
    names = {name for name, _ in inspect.getmembers(Selections, inspect.isfunction) if name[0] != "_"}
    assert names == {name for name in vars(AsyncSelections) if name[0] != "_"}

    async def main() -> int:
        async with AsyncTimeball(node.http_endpoint) as ball:
            return (await ball.selections.dry_run("TRUE", topics=["nothing-here"])).count

    assert asyncio.run(main()) == 0
