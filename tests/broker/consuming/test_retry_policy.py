"""Policies: RocketMQ's numbers, never shorter after one more attempt, and within bounds whatever an operator wrote."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from timeball import limits
from timeball.broker.consuming.retry_policy import LEVELS_MS, delay_ms, durations_ms
from timeball.broker.registry.groups import CustomizedRetry, ExponentialRetry, RetryPolicy

ANY = st.integers(-(1 << 40), 1 << 40)
POLICIES = st.builds(
    RetryPolicy,
    type=st.sampled_from(["CUSTOMIZED", "EXPONENTIAL", "what is this"]),
    exponential_retry_policy=st.none() | st.builds(ExponentialRetry, initial=ANY, max=ANY, multiplier=ANY),
    customized_retry_policy=st.none() | st.builds(CustomizedRetry, next=st.lists(ANY, max_size=5)),
)
SECONDS = [10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1_200, 1_800, 3_600, 7_200, 7_200]


def test_a_group_that_says_nothing_waits_as_rocketmqs_levels_do_from_ten_seconds_on() -> None:
    for policy in (None, RetryPolicy(), RetryPolicy(customized_retry_policy=CustomizedRetry([]))):
        assert [delay_ms(policy, attempt) // 1_000 for attempt in range(1, 18)] == SECONDS
    assert durations_ms(None) == list(LEVELS_MS) and len(LEVELS_MS) == 18


def test_a_list_begins_with_its_third_item_and_ends_with_its_last() -> None:
    policy = RetryPolicy(customized_retry_policy=CustomizedRetry([1, 2, 3, 4]))
    assert [delay_ms(policy, attempt) for attempt in (1, 2, 3, 99)] == [3, 4, 4, 4]
    assert delay_ms(RetryPolicy(customized_retry_policy=CustomizedRetry([7])), 1) == 7
    assert durations_ms(policy.customized_retry_policy) == [1, 2, 3, 4]


def test_exponential_grows_from_its_initial_to_its_maximum() -> None:
    policy = RetryPolicy(
        type="EXPONENTIAL", exponential_retry_policy=ExponentialRetry(initial=5, max=70, multiplier=3)
    )
    assert [delay_ms(policy, attempt) for attempt in range(1, 6)] == [5, 15, 45, 70, 70]
    assert delay_ms(RetryPolicy(type="EXPONENTIAL"), 1) == 5_000
    assert delay_ms(RetryPolicy(type="EXPONENTIAL"), 1 << 30) == 2 * limits.HOUR_MS


@given(POLICIES, st.integers(-3, 1 << 31))
def test_whatever_an_operator_has_written_the_wait_is_one_that_a_message_may_have(
    policy: RetryPolicy, attempt: int
) -> None:
    assert 0 <= delay_ms(policy, attempt) <= limits.INVISIBLE_MS_MAX


@given(
    st.builds(
        ExponentialRetry,
        initial=st.integers(0, 1 << 20),
        max=st.integers(0, 1 << 30),
        multiplier=st.integers(1, 9),
    ),
    st.integers(1, 60),
)
def test_exponential_never_waits_less_after_one_more_attempt(policy: ExponentialRetry, attempt: int) -> None:
    of_group = RetryPolicy(type="EXPONENTIAL", exponential_retry_policy=policy)
    assert delay_ms(of_group, attempt) <= delay_ms(of_group, attempt + 1) <= max(policy.max, policy.initial)
