"""Members of a group with different subscriptions are found on every edge. A changed subscription is no conflict."""

from __future__ import annotations

import logging

import pytest
from tests.broker.consuming.subscriber import GROUP, TOPIC, receive, send
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.consuming import engine
from timeball.broker.consuming.engine import LOG_EVERY_MS, WINDOW_MS, Subscriptions
from timeball.broker.filters import EVERYTHING, compile_filter, normalized_text
from timeball.io.clock import ManualClock
from timeball.model.access import ANONYMOUS
from timeball.model.answers import Conflict


class TimedSubscriptions(Subscriptions):
    """Subscriptions with a manual clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        super().__init__(self.clock.monotonic_ns)

    def say(self, *filters: str, topic: str = "orders") -> None:
        """Let members of group g use these filters, one each second."""
        for text in filters:
            self.clock.advance(1_000)
            self.hear("g", topic, text)


def test_members_with_different_filters_conflict_while_both_repeat_them() -> None:
    heard = TimedSubscriptions()
    heard.say("red", "blue")
    assert heard.conflicts("g") == [], "one member may have changed its mind"
    heard.say("red")
    assert heard.conflicts("g") == [Conflict("orders", ["blue", "red"])]
    assert heard.conflicts("other") == [] and heard.groups() == ["g"]
    heard.clock.advance(WINDOW_MS - 500)
    heard.say("red")
    assert heard.conflicts("g") == [], "the other member is gone"


def test_a_group_that_changes_its_filter_conflicts_only_while_old_members_run() -> None:
    heard = TimedSubscriptions()
    heard.say("red", "red", "blue", "blue")
    assert heard.conflicts("g") == []
    heard.say("red", "blue")
    assert heard.conflicts("g") != []
    heard.clock.advance(WINDOW_MS)
    heard.say("blue")
    assert heard.conflicts("g") == []


def test_members_that_subscribe_to_different_topics_conflict() -> None:
    heard = TimedSubscriptions()
    for topics in (["a", "b"], ["a"], ["b", "a"]):
        heard.clock.advance(1_000)
        heard.hear_topics("g", topics)
    assert heard.conflicts("g") == [Conflict("", ["a", "a, b"])]


def test_a_conflict_is_logged_again_only_after_ten_minutes(caplog: pytest.LogCaptureFixture) -> None:
    heard = TimedSubscriptions()
    heard.say(*["red", "blue"] * 20)
    assert caplog.text.count("members filter differently group=g topic=orders filters=['blue', 'red']") == 1
    heard.clock.advance(LOG_EVERY_MS)
    heard.say(*["red", "blue"] * 2)
    assert caplog.text.count("members filter differently") == 2


def test_the_memory_of_subscriptions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "KEYS_MAX", 3)
    heard = TimedSubscriptions()
    for number in range(9):
        heard.say("red", "blue", "red", topic=f"t{number}")
    assert [conflict.topic for conflict in heard.conflicts("g")] == ["t6", "t7", "t8"]
    heard.say(*[f"x{number}" * 9_000 for number in range(20)])
    assert "orders" not in [conflict.topic for conflict in heard.conflicts("g")], "no filter is repeated"
    heard.say("y" * 9_000, "z", "y" * 9_000)
    (filters,) = [conflict.wanted for conflict in heard.conflicts("g") if conflict.topic == "orders"]
    assert len(filters) == 2 and max(map(len, filters)) < 300
    for number in range(3):
        heard.hear(f"other{number}", "orders", "red")
    assert heard.groups() == [], "the filters of the group were removed for those of other groups"


def test_equal_filters_have_the_same_text() -> None:
    assert (
        compile_filter("b || a").text
        == compile_filter("a||b", bit_mask=True).text
        == normalized_text(" b||a", "TAG")
    )
    assert compile_filter("").text == EVERYTHING.text == normalized_text("*", "TAG") == "*"
    assert compile_filter(" a = 1 ", "SQL92").text == normalized_text("a = 1", "SQL92")
    assert normalized_text("||", "TAG") == "||", "an invalid filter stays as it is"


@on_node()
async def test_conflicting_filters_of_receives_are_shown_in_the_state_of_the_group(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await send(world, [b"a", b"b"])
    logging.disable(logging.NOTSET)
    for tag in ("red", "blue", "red"):
        await receive(world, wanted=compile_filter(tag))
        await world.broker.consuming.subscriptions.drain()
        world.clock.advance(1_000)
    state = await world.broker.groups.one(GROUP, ANONYMOUS)
    assert state.conflicts == [Conflict(TOPIC, ["blue", "red"])]
    assert world.broker.status()["conflicting_groups"] == [GROUP]
    assert "members filter differently group=g topic=orders" in caplog.text
