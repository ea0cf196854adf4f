"""Consumer groups keep their configuration, before and after a save, under RocketMQ's names."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import on_node
from tests.broker.registry.state_rows import StateRows
from tests.crash.world import World

from timeball.broker.registry.groups import (
    LEVELS_MS,
    PUSH_FIRST,
    CustomizedRetry,
    ExponentialRetry,
    Groups,
    RequestMode,
    RequestModes,
    RetryPolicy,
    SubscriptionGroup,
    durations_ms,
    retry_delay_ms,
    times_max,
)
from timeball.model import limits
from timeball.model.errors import InvalidMessage, NotFound, OverLimit

NAMES = st.sampled_from(["a", "b", "x-1_|%"])
CONFIGS = st.builds(
    SubscriptionGroup,
    NAMES,
    consume_enable=st.booleans(),
    retry_queue_nums=st.integers(0, 8),
    retry_max_times=st.integers(-1, 100),
    attributes=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)


def new_groups() -> Groups:
    return StateRows().opened(Groups)


# A configuration updates its group, a name ensures the group, a tuple of a name removes it.
@given(st.lists(st.one_of(CONFIGS, NAMES, NAMES.map(lambda name: (name,))), max_size=12))
def test_the_last_configuration_of_each_group_counts_also_after_a_restart(
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
        assert {group.group_name: group for group in read.all()} == model
        for name in ("a", "b", "x-1_|%"):
            assert read.find_group(name) == model.get(name)


def test_a_group_that_does_not_exist_is_not_found() -> None:
    groups = new_groups()
    assert groups.find_group("g") is None
    with pytest.raises(NotFound, match="'g' does not exist"):
        groups.get("g")


def test_the_json_form_of_a_new_group_equals_rocketmqs() -> None:
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


def test_a_retry_policy_is_restored_as_it_was_received() -> None:
    log = StateRows()
    groups = log.opened(Groups)
    policy = RetryPolicy("EXPONENTIAL", exponential_retry_policy=ExponentialRetry(1, 2, 3))
    groups.update(SubscriptionGroup("g", group_retry_policy=policy))
    assert log.opened(Groups).get("g").group_retry_policy == policy


@pytest.mark.parametrize("name", ["", "a/b", "..", "ü", "x" * (limits.GROUP_BYTES_MAX + 1)])
def test_an_invalid_group_name_is_refused(name: str) -> None:
    log = StateRows()
    groups = log.opened(Groups)
    with pytest.raises(InvalidMessage, match="group"):
        groups.ensure(name)
    assert not groups.all()
    assert log.count == 0


def test_at_the_limit_a_new_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROUPS_MAX", 2)
    groups = new_groups()
    groups.ensure("a")
    groups.ensure("b")
    with pytest.raises(OverLimit):
        groups.ensure("c")
    assert groups.ensure("b").group_name == "b"
    groups.update(SubscriptionGroup("b", retry_max_times=3))


def test_an_unchanged_group_appends_no_row_and_keeps_the_version() -> None:
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
async def test_groups_survive_a_restart(world: World) -> None:
    world.broker.tables.groups.update(SubscriptionGroup("g", retry_max_times=2))
    await world.restart()
    assert world.broker.tables.groups.get("g").retry_max_times == 2


@on_node()
async def test_a_group_whose_creation_was_answered_survives_a_power_cut(world: World) -> None:
    world.broker.tables.groups.update(SubscriptionGroup("g", retry_max_times=2))
    await world.broker.log.writer.flushed()
    files = world.files.crash(survival="nothing")
    await world.abandon()
    world.files = files
    await world.start()
    assert world.broker.tables.groups.get("g").retry_max_times == 2


def test_a_negative_maximum_of_attempts_is_the_default_and_a_clients_value_wins() -> None:
    assert times_max(5, None) == 5
    assert times_max(5, 2) == 2
    assert times_max(5, 0) == 0
    assert times_max(5, -1) == times_max(-1, None) == 16


ANY = st.integers(-(1 << 40), 1 << 40)
POLICIES = st.builds(
    RetryPolicy,
    type=st.sampled_from(["CUSTOMIZED", "EXPONENTIAL", "what is this"]),
    exponential_retry_policy=st.none() | st.builds(ExponentialRetry, initial=ANY, max=ANY, multiplier=ANY),
    customized_retry_policy=st.none() | st.builds(CustomizedRetry, next=st.lists(ANY, max_size=5)),
)
SECONDS = [10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1_200, 1_800, 3_600, 7_200, 7_200]


def test_a_group_without_a_policy_uses_rocketmqs_levels_from_10_s_on() -> None:
    for policy in (None, RetryPolicy(), RetryPolicy(customized_retry_policy=CustomizedRetry([]))):
        assert [retry_delay_ms(policy, attempt) // 1_000 for attempt in range(1, 18)] == SECONDS
    assert durations_ms(None) == list(LEVELS_MS) and len(LEVELS_MS) == 18


def test_a_customized_policy_begins_with_its_third_item_and_repeats_the_last() -> None:
    policy = RetryPolicy(customized_retry_policy=CustomizedRetry([1, 2, 3, 4]))
    assert [retry_delay_ms(policy, attempt) for attempt in (1, 2, 3, 99)] == [3, 4, 4, 4]
    assert retry_delay_ms(RetryPolicy(customized_retry_policy=CustomizedRetry([7])), 1) == 7
    assert durations_ms(policy.customized_retry_policy) == [1, 2, 3, 4]


def test_a_push_consumer_over_grpc_begins_with_the_first_item() -> None:
    seconds = [retry_delay_ms(None, attempt, first=PUSH_FIRST) // 1_000 for attempt in range(1, 20)]
    assert seconds == [1, 5, *SECONDS[:16], 7_200]
    policy = RetryPolicy(customized_retry_policy=CustomizedRetry([1, 2, 3, 4]))
    assert [retry_delay_ms(policy, attempt, first=PUSH_FIRST) for attempt in (1, 2, 3, 4, 99)] == [
        1,
        2,
        3,
        4,
        4,
    ]
    exponential = RetryPolicy(type="EXPONENTIAL")
    assert retry_delay_ms(exponential, 1, first=PUSH_FIRST) == retry_delay_ms(exponential, 1) == 5_000


def test_an_exponential_policy_grows_from_its_initial_delay_to_its_maximum() -> None:
    policy = RetryPolicy(
        type="EXPONENTIAL", exponential_retry_policy=ExponentialRetry(initial=5, max=70, multiplier=3)
    )
    assert [retry_delay_ms(policy, attempt) for attempt in range(1, 6)] == [5, 15, 45, 70, 70]
    assert retry_delay_ms(RetryPolicy(type="EXPONENTIAL"), 1) == 5_000
    assert retry_delay_ms(RetryPolicy(type="EXPONENTIAL"), 1 << 30) == 2 * limits.HOUR_MS


@given(POLICIES, st.integers(-3, 1 << 31))
def test_any_policy_gives_a_delay_between_0_and_the_longest_invisible_time(
    policy: RetryPolicy, attempt: int
) -> None:
    assert 0 <= retry_delay_ms(policy, attempt) <= limits.INVISIBLE_MS_MAX


@given(
    st.builds(
        ExponentialRetry,
        initial=st.integers(0, 1 << 20),
        max=st.integers(0, 1 << 30),
        multiplier=st.integers(1, 9),
    ),
    st.integers(1, 60),
)
def test_the_delay_of_an_exponential_policy_never_decreases_with_the_attempts(
    policy: ExponentialRetry, attempt: int
) -> None:
    of_group = RetryPolicy(type="EXPONENTIAL", exponential_retry_policy=policy)
    assert (
        retry_delay_ms(of_group, attempt)
        <= retry_delay_ms(of_group, attempt + 1)
        <= max(policy.max, policy.initial)
    )


MODE = RequestMode("t", "g", "POP", 3)


@on_node()
async def test_stored_request_modes_survive_a_restart_and_the_default_is_pull(world: World) -> None:
    modes = world.broker.tables.request_modes
    assert modes.get("t", "g") == RequestMode("t", "g", "PULL", 0)
    modes.set(MODE)
    await world.restart()
    modes = world.broker.tables.request_modes
    assert modes.get("t", "g") == MODE
    assert modes.get("t", "h").mode == "PULL"


def test_request_modes_with_invalid_names_or_beyond_the_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = StateRows().opened(RequestModes)
    for invalid_mode in (RequestMode("", "g"), RequestMode("t", "../g")):
        with pytest.raises(InvalidMessage):
            modes.set(invalid_mode)
    monkeypatch.setattr(limits, "GROUPS_MAX", 1)
    modes.set(MODE)
    modes.set(RequestMode("t", "g", "PULL"))
    with pytest.raises(OverLimit):
        modes.set(RequestMode("u", "g"))
