"""The level table and its text, and the stored form of messages of a level, which must restore to the original."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.model.config import Settings
from timeball.model.errors import Corrupt, InvalidMessage, SetupError
from timeball.model.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.model.message import (
    SCHEDULE_TOPIC,
    Kind,
    build_rows,
    decode_properties,
    encode_properties,
    with_seq,
)
from timeball.schedule.levels import OVERRULED, LevelTable, disguised_properties, restored


def test_default_table_equals_rocketmqs() -> None:
    table = LevelTable.parse(Settings().delay_levels)
    minutes = [MINUTE_MS * n for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)]
    seconds = [SECOND_MS * n for n in (1, 5, 10, 30)]
    assert list(table.durations_ms) == [*seconds, *minutes, HOUR_MS, 2 * HOUR_MS]
    assert len(table) == table.queues == 18


UNITS = {"s": SECOND_MS, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS}


@given(st.lists(st.tuples(st.integers(0, 3_000), st.sampled_from(sorted(UNITS))), min_size=1, max_size=30))
def test_level_n_is_the_nth_item_even_if_levels_do_not_ascend(items: list[tuple[int, str]]) -> None:
    table = LevelTable.parse(" ".join(f"{count}{unit}" for count, unit in items))
    assert list(table.durations_ms) == [count * UNITS[unit] for count, unit in items]
    assert table.queues == max(18, len(items))
    levels = np.arange(1, len(items) + 1)
    assert table.delay_ms(levels).tolist() == list(table.durations_ms)


def test_levels_above_the_last_are_clamped_to_the_last() -> None:
    table = LevelTable.parse("1s +2m 3h ")
    assert table.clamp(np.array([0, 1, 3, 4, 1_959])).tolist() == [0, 1, 3, 3, 3]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1s",
        "1s  5s",
        "1s 5",
        "5ms",
        "s",
        "1S",
        "1.5s",
        "-1s",
        "1s,5s",
        "1s\t5s",
        "٣s",
        "3654d",
        "9" * 19 + "s",
    ],
)
def test_invalid_table_is_refused_with_the_name_of_the_item(text: str) -> None:
    with pytest.raises(SetupError, match="--delay-levels"):
        LevelTable.parse(text)


def test_more_levels_than_a_topic_has_queues_are_refused() -> None:
    LevelTable.parse("1s " * 1_024)
    with pytest.raises(SetupError, match="--delay-levels: 1025 levels"):
        LevelTable.parse("1s " * 1_025)


OURS = {"DELAY", "REAL_TOPIC", "REAL_QID", *OVERRULED}
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), max_size=12)
NAMES = st.one_of(st.sampled_from(sorted(OURS)), TEXT.filter(bool))
PROPERTIES = st.dictionaries(NAMES, TEXT, max_size=6)


def disguised(texts: list[str | None], level: int = 3, topic: str = "orders", queue: int = -1) -> list[str]:
    count = len(texts)
    return disguised_properties(
        pa.array(texts, pa.string()), np.full(count, level), pa.array([topic] * count),
        pa.array([queue] * count, pa.int32()),
    ).to_pylist()  # fmt: skip


def waiting(texts: list[str]) -> pa.RecordBatch:
    rows = build_rows(
        len(texts), kind=int(Kind.SCHEDULED), topic=SCHEDULE_TOPIC, queue_id=2, body=b"b", properties=texts,
        queue_offset=list(range(len(texts))), due_ms=7, store_ms=5,
    )  # fmt: skip
    return with_seq(rows, 40)


@given(st.lists(PROPERTIES, min_size=1, max_size=5), st.booleans())
def test_other_properties_keep_their_order_and_ours_occur_once(
    sent: list[dict[str, str]], ends: bool
) -> None:
    texts = [
        encode_properties(each) if ends else encode_properties(each).removesuffix("\x02") for each in sent
    ]
    for before, after in zip(sent, disguised([*texts]), strict=True):
        other_properties = {name: value for name, value in before.items() if name not in OURS}
        expected = {**other_properties, "DELAY": "3", "REAL_TOPIC": "orders", "REAL_QID": "-1"}
        assert list(decode_properties(after).items()) == list(expected.items())
        assert after == encode_properties(expected)


def test_message_without_properties_gets_only_ours() -> None:
    assert disguised([None, "", "\x02"]) == ["DELAY\x013\x02REAL_TOPIC\x01orders\x02REAL_QID\x01-1\x02"] * 3


def test_properties_that_become_too_long_are_refused_with_the_row() -> None:
    with pytest.raises(InvalidMessage, match="properties of row 1"):
        disguised(["a\x01b", "a\x01" + "x" * 32_760])


@given(st.text("abcXYZ019_-%|", min_size=1, max_size=30), st.integers(-1, 1_023))
def test_restored_message_equals_the_original(topic: str, queue: int) -> None:
    rows = waiting(disguised(["k\x01v", None], topic=topic, queue=queue))
    real = restored(rows)
    assert real.column("topic").to_pylist() == [topic] * 2
    assert real.column("queue_id").to_pylist() == [queue] * 2
    assert real.column("queue_offset").null_count == 2, "its place in the real queue is not known yet"
    assert real.column("due_ms").equals(rows.column("due_ms"))
    assert set(real.column("kind").to_pylist()) == {Kind.SCHEDULED}, (
        "the row must not be indexed in a level's queue"
    )
    assert real.column("properties").equals(rows.column("properties"))


@pytest.mark.parametrize("text", ["", "REAL_TOPIC\x01orders\x02", "REAL_TOPIC\x01t\x02REAL_QID\x01x\x02"])
def test_row_without_its_real_topic_is_corrupt(text: str) -> None:
    with pytest.raises(Corrupt, match="seq 41"):
        good = "REAL_TOPIC\x01t\x02REAL_QID\x010\x02"
        restored(waiting([good, text]))
