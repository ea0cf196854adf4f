"""The next topic and delay of a returned message by RocketMQ's table, and the properties that it must not keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.consuming.retry import (
    INT_MAX,
    SPENT,
    Destination,
    dead_letter_topic,
    group_of,
    next_copy_of_returned,
    resend,
    retry_topic,
)

USERS = {"KEYS": "order-17", "TAGS": "close", "UNIQ_KEY": "A17", "region": "eu"}
NAMES = st.text("abcXYZ_", min_size=1, max_size=6) | st.sampled_from(sorted(SPENT))


def returned_copy(delay_level: int = 0, times: int = 0, most: int = 16, **properties: str) -> Destination:
    """The next copy of a message that was returned `times` times before, of at most `most` times."""
    return next_copy_of_returned(
        "readers",
        topic="orders",
        properties={**USERS, **properties},
        reconsume_times=times,
        message_id="0A00000100002A9F0000000000000011",
        delay_level=delay_level,
        times_max=most,
    )


def resent_copy(
    delay_level: int = 3, times: int = 1, most: int = 16, in_order: bool = False, **properties: str
) -> Destination:
    """The next copy of a message that a client sends again, and whose attempts it counts as `times`."""
    return resend(
        "readers",
        properties={**USERS, **properties},
        delay_level=delay_level,
        reconsume_times=times,
        times_max=most,
        in_order=in_order,
    )


# ---- handed back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", range(16))
def test_each_return_waits_one_level_longer_beginning_with_the_third(times: int) -> None:
    found = returned_copy(times=times)
    assert (found.topic, found.delay_level) == ("%RETRY%readers", 3 + times)
    assert found.reconsume_times == times + 1
    assert found.properties["DELAY"] == str(3 + times)
    assert not found.is_dead_letter


@pytest.mark.parametrize("times", [16, 17, INT_MAX])
def test_after_the_maximum_of_attempts_the_next_copy_is_a_dead_letter(times: int) -> None:
    found = returned_copy(times=times)
    assert (found.topic, found.delay_level) == ("%DLQ%readers", 0)
    assert found.is_dead_letter
    assert found.reconsume_times == min(times + 1, INT_MAX)  # fits its column


def test_a_requested_delay_level_is_used() -> None:
    assert returned_copy(delay_level=1, times=9).delay_level == 1
    assert returned_copy(delay_level=1_000).delay_level == 1_000  # the admission of the copy limits the level


def test_a_negative_delay_level_makes_a_dead_letter() -> None:
    assert returned_copy(delay_level=-1) == returned_copy(delay_level=-7)
    assert returned_copy(delay_level=-1).topic == "%DLQ%readers"


def test_a_requested_delay_level_makes_no_retry_beyond_the_maximum() -> None:
    assert returned_copy(delay_level=1, times=16).is_dead_letter


def test_a_negative_attempt_count_is_taken_as_zero() -> None:
    assert returned_copy(times=-4).delay_level == 3


def test_a_copy_names_its_original_topic_and_message_id() -> None:
    found = returned_copy(WAIT="true")
    assert found.properties == {
        **USERS,
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": "0A00000100002A9F0000000000000011",
        "WAIT": "false",
        "DELAY": "3",
    }


def test_the_first_topic_and_message_id_are_kept() -> None:
    found = returned_copy(RETRY_TOPIC="first", ORIGIN_MESSAGE_ID="1")
    assert (found.properties["RETRY_TOPIC"], found.properties["ORIGIN_MESSAGE_ID"]) == ("first", "1")


def test_a_dead_letter_inherits_no_delay() -> None:
    """RocketMQ #2722: it arrived in two hours."""
    found = returned_copy(times=16, **dict.fromkeys(SPENT, "18"))
    assert not SPENT & found.properties.keys()
    assert USERS.items() <= found.properties.items()


def test_a_retry_has_its_own_level_and_no_other_delay() -> None:
    found = returned_copy(times=2, **dict.fromkeys(SPENT, "18"))
    assert SPENT & found.properties.keys() == {"DELAY"}
    assert found.properties["DELAY"] == "5"


# ---- sent by the client itself ---------------------------------------------------------------------------


def test_a_resent_copy_keeps_the_clients_attempt_count() -> None:
    assert resent_copy(times=16) == Destination("%RETRY%readers", {**USERS, "DELAY": "3"}, 3, 16)
    assert resent_copy(times=17) == Destination("%DLQ%readers", USERS, 0, 17)


def test_a_message_sent_by_an_orderly_consumer_is_given_up() -> None:
    assert resent_copy(times=3, most=3, in_order=True, DELAY="6") == Destination("%DLQ%readers", USERS, 0, 3)
    assert not resent_copy(times=3, most=3).is_dead_letter


def test_a_resend_keeps_its_level_alone() -> None:
    found = resent_copy(delay_level=7, DELAY="7", REAL_TOPIC="orders", TIMER_DELIVER_MS="99")
    assert found == Destination("%RETRY%readers", {**USERS, "DELAY": "7"}, 7, 1)
    assert resent_copy(delay_level=0).delay_level == resent_copy(delay_level=-1).delay_level == 0


# ---- both ------------------------------------------------------------------------------------------------


def test_retry_and_dead_letter_topics_are_named_after_the_group() -> None:
    assert group_of(retry_topic("a")) == "a"
    assert dead_letter_topic("a") == "%DLQ%a"


@given(
    st.dictionaries(NAMES, st.text(max_size=4)),
    st.integers(-5, 40) | st.integers(),
    st.integers(),
    st.integers(-1, 30),
)
def test_any_returned_message_has_one_delay_as_a_retry_and_none_as_a_dead_letter(
    properties: dict[str, str], level: int, times: int, most: int
) -> None:
    before = dict(properties)
    for found in (
        next_copy_of_returned(
            "g", topic="t", properties=properties, reconsume_times=times, message_id="1", delay_level=level,
            times_max=most,
        ),
        resend(
            "g", properties=properties, delay_level=level, reconsume_times=times, times_max=most, in_order=False
        ),
    ):  # fmt: skip
        assert 0 <= found.delay_level <= INT_MAX and 0 <= found.reconsume_times <= INT_MAX
        assert SPENT & found.properties.keys() == ({"DELAY"} if found.delay_level else set())
        assert not (found.is_dead_letter and found.delay_level)
        assert {name for name in before if name not in SPENT} <= found.properties.keys()
        assert properties == before
