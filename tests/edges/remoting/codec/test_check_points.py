"""POP's check points and header fields, as RocketMQ's client builds and parses them."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.remoting.codec import records
from timeball.edges.remoting.codec.records import CheckPoint, parse_check_point
from timeball.model.errors import InvalidMessage

INTS = st.integers(0, 1 << 62)
MARKS = st.sampled_from("012")
NAMES = st.text("abz-_.", min_size=1)
POINTS = st.builds(CheckPoint, INTS, INTS, INTS, INTS, MARKS, NAMES, INTS, INTS)


def test_a_check_point_is_parsed_as_rocketmqs_client_builds_it() -> None:
    # Recorded from rocketmq-client 5.3.3.
    text = "1 1795285770276 5000 0 1 timeball 0 1"
    point = CheckPoint(1, 1795285770276, 5000, 0, "1", "timeball", 0, 1)
    assert parse_check_point(text) == point and point.encode() == text


@given(POINTS)
def test_an_encoded_check_point_is_parsed_to_the_same(point: CheckPoint) -> None:
    assert parse_check_point(point.encode()) == point


@given(st.one_of(st.text(), st.lists(st.sampled_from(["1", "x", "", "9" * 30]), max_size=9).map(" ".join)))
def test_any_text_is_refused_or_a_check_point_of_eight_words(text: str) -> None:
    try:
        parse_check_point(text)
    except InvalidMessage:
        return
    assert len(text.split(" ")) == 8


@pytest.mark.parametrize(
    "text", ["", "1 2 3 4 0 b 6", "1 2 3 4 0 b 6 7 8", "1 2 3 4 9 b 6 7", "x 2 3 4 0 b 6 7"]
)
def test_an_invalid_check_point_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessage, match="not a check point"):
        parse_check_point(text)


def test_the_lists_by_queue_keep_the_order_of_the_answer() -> None:
    places = [("0", 1, 7), ("1", 0, 3), ("0", 1, 9), ("0", 2, 4)]
    assert records.start_offset_info(places) == "0 1 7;1 0 3;0 2 4"
    assert records.msg_offset_info(places) == "0 1 7,9;1 0 3;0 2 4"


def test_order_counts_name_single_messages_and_the_least_of_each_queue() -> None:
    places = [("0", 1, 7), ("0", 1, 9), ("0", 2, 4)]
    assert records.order_count_info(places, [2, 0, 3]) == "0 qo1%7 2;0 qo2%4 3;0 1 0;0 2 3"
    assert records.order_count_info(places, [0, 0, 0]) == "0 1 0;0 2 0"


@given(NAMES, NAMES)
def test_the_retry_word_names_the_topic(topic: str, group: str) -> None:
    assert records.real_topic(topic, group, "0") == topic
    for word in "12":
        retry = records.real_topic(topic, group, word)
        assert records.retry_word(retry) == word
        assert records.real_topic(retry, group, word) == retry  # clients send both names
    assert records.retry_word(topic) == "0"


def test_a_java_bit_set_is_decoded() -> None:
    assert records.decode_bit_set("BQE=") == [0, 2, 8]  # BitSet {0, 2, 8}: bytes 05 01
    assert records.decode_bit_set("") == []
    assert records.decode_bit_set("AAAAAAAAAIA=") == [63]
    for wrong in ("?", "AAAA" * 10_000):
        with pytest.raises(InvalidMessage, match="bits"):
            records.decode_bit_set(wrong)


@given(st.binary(max_size=40))
def test_the_bits_of_a_set_are_counted_without_decoding(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    assert records.bit_count(text) == 8 * len(data)
    number = int.from_bytes(data, "little")
    assert records.decode_bit_set(text) == [bit for bit in range(8 * len(data)) if number >> bit & 1]
