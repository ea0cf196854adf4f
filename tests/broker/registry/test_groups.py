"""Consumer groups: what was configured is what is there, before and after a save, in RocketMQ's words."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import on_node
from tests.broker.registry.state_rows import StateRows
from tests.crash.world import World

from timeball import limits
from timeball.broker.registry.groups import ExponentialRetry, Groups, RetryPolicy, SubscriptionGroup
from timeball.errors import InvalidMessage, NotFound, OverLimit

NAMES = st.sampled_from(["a", "b", "x-1_|%"])
CONFIGS = st.builds(
    SubscriptionGroup,
    NAMES,
    consume_enable=st.booleans(),
    retry_queue_nums=st.integers(0, 8),
    retry_max_times=st.integers(-1, 100),
    attributes=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)


def fresh() -> Groups:
    return StateRows().opened(Groups)


@given(st.lists(st.one_of(CONFIGS, NAMES, NAMES.map(lambda name: (name,))), max_size=12))
def test_the_last_word_on_each_group_counts_also_after_a_restart(
    steps: list[SubscriptionGroup | str | tuple[str]],
) -> None:
    log = StateRows()
    groups, model = log.opened(Groups), {}
    for step in steps:
        if isinstance(step, SubscriptionGroup):
            model[step.group_name] = groups.update(step)
        elif isinstance(step, str):
            model.setdefault(step, SubscriptionGroup(step))
            assert groups.ensure(step) == model[step]
        else:
            model.pop(step[0], None)
            groups.remove(step[0])
    for read in (groups, log.opened(Groups)):
        assert {g.group_name: g for g in read.all()} == model
        for name in ("a", "b", "x-1_|%"):
            assert read.find(name) == model.get(name)


def test_a_group_that_does_not_exist_is_not_found() -> None:
    groups = fresh()
    assert groups.find("g") is None
    with pytest.raises(NotFound, match="'g' does not exist"):
        groups.get("g")


def test_the_defaults_and_the_names_are_rocketmqs() -> None:
    assert msgspec.to_builtins(SubscriptionGroup("g")) == {
        "groupName": "g",
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeBroadcastEnable": True,
        "consumeMessageOrderly": False,
        "retryQueueNums": 1,
        "retryMaxTimes": 16,
        "groupRetryPolicy": {
            "type": "CUSTOMIZED", "exponentialRetryPolicy": None, "customizedRetryPolicy": None,
        },
        "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1,
        "notifyConsumerIdsChangedEnable": True,
        "groupSysFlag": 0,
        "consumeTimeoutMinute": 15,
        "attributes": {},
    }  # fmt: skip


def test_a_retry_policy_is_given_back_as_it_came() -> None:
    log = StateRows()
    groups = log.opened(Groups)
    policy = RetryPolicy("EXPONENTIAL", exponential_retry_policy=ExponentialRetry(1, 2, 3))
    groups.update(SubscriptionGroup("g", group_retry_policy=policy))
    assert log.opened(Groups).get("g").group_retry_policy == policy


@pytest.mark.parametrize("name", ["", "a/b", "..", "ü", "x" * (limits.GROUP_BYTES_MAX + 1)])
def test_a_name_that_no_client_may_use_is_refused(name: str) -> None:
    log = StateRows()
    groups = log.opened(Groups)
    with pytest.raises(InvalidMessage, match="group"):
        groups.ensure(name)
    assert not groups.all()
    assert log.count == 0


def test_there_is_an_end_to_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROUPS_MAX", 2)
    groups = fresh()
    groups.ensure("a")
    groups.ensure("b")
    with pytest.raises(OverLimit):
        groups.ensure("c")
    assert groups.ensure("b").group_name == "b"
    groups.update(SubscriptionGroup("b", retry_max_times=3))


def test_what_has_not_changed_is_not_saved_and_has_no_new_version() -> None:
    log = StateRows()
    groups = log.opened(Groups)
    groups.ensure("g")
    version = groups.version
    groups.ensure("g")
    groups.update(SubscriptionGroup("g"))
    groups.remove("nobody")
    assert log.count == 1
    assert groups.version == version


@on_node()
async def test_groups_outlive_the_broker(world: World) -> None:
    world.broker.parts.groups.update(SubscriptionGroup("g", retry_max_times=2))
    await world.restart()
    assert world.broker.parts.groups.get("g").retry_max_times == 2


@on_node()
async def test_a_group_that_was_answered_outlives_a_cut(world: World) -> None:
    world.broker.parts.groups.update(SubscriptionGroup("g", retry_max_times=2))
    await world.broker.parts.writer.flushed()
    files = world.files.crash(survival="nothing")
    await world.abandon()
    world.files = files
    await world.start()
    assert world.broker.parts.groups.get("g").retry_max_times == 2
