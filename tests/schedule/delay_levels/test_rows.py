"""The disguise of what waits for a level: what is put on comes off; what clients sent under our names goes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.errors import Corrupt, InvalidMessage
from timeball.log.format import with_seq
from timeball.message import SCHEDULE_TOPIC, Kind, build_rows, decode_properties, encode_properties
from timeball.schedule.delay_levels import rows as disguise

OURS = {"DELAY", "REAL_TOPIC", "REAL_QID", *disguise.OVERRULED}
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), max_size=12)
NAMES = st.one_of(st.sampled_from(sorted(OURS)), TEXT.filter(bool))
PROPERTIES = st.dictionaries(NAMES, TEXT, max_size=6)


def disguised(texts: list[str | None], level: int = 3, topic: str = "orders", queue: int = -1) -> list[str]:
    count = len(texts)
    return disguise.disguised_properties(
        pa.array(texts, pa.string()), np.full(count, level), pa.array([topic] * count),
        pa.array([queue] * count, pa.int32()),
    ).to_pylist()  # fmt: skip


def waiting(texts: list[str]) -> pa.RecordBatch:
    rows = build_rows(
        len(texts), kind=int(Kind.PROMISE), topic=SCHEDULE_TOPIC, queue_id=2, body=b"b", properties=texts,
        queue_offset=list(range(len(texts))), due_ms=7, store_ms=5,
    )  # fmt: skip
    return with_seq(rows, 40)


@given(st.lists(PROPERTIES, min_size=1, max_size=5), st.booleans())
def test_the_rest_stays_in_its_order_and_ours_stand_once(sent: list[dict[str, str]], ends: bool) -> None:
    texts = [
        encode_properties(each) if ends else encode_properties(each).removesuffix("\x02") for each in sent
    ]
    for before, after in zip(sent, disguised([*texts]), strict=True):
        kept = {name: value for name, value in before.items() if name not in OURS}
        expected = {**kept, "DELAY": "3", "REAL_TOPIC": "orders", "REAL_QID": "-1"}
        assert list(decode_properties(after).items()) == list(expected.items())
        assert after == encode_properties(expected)


def test_no_properties_at_all() -> None:
    assert disguised([None, "", "\x02"]) == ["DELAY\x013\x02REAL_TOPIC\x01orders\x02REAL_QID\x01-1\x02"] * 3


def test_a_text_that_becomes_too_long_is_refused_by_its_row() -> None:
    with pytest.raises(InvalidMessage, match="properties of row 1"):
        disguised(["a\x01b", "a\x01" + "x" * 32_760])


@given(st.text("abcXYZ019_-%|", min_size=1, max_size=30), st.integers(-1, 1_023))
def test_what_was_put_on_comes_off(topic: str, queue: int) -> None:
    rows = waiting(disguised(["k\x01v", None], topic=topic, queue=queue))
    real = disguise.restored(rows)
    assert real.column("topic").to_pylist() == [topic] * 2
    assert real.column("queue_id").to_pylist() == [queue] * 2
    assert real.column("queue_offset").null_count == 2, "its place in the real queue is not known yet"
    assert real.column("due_ms").equals(rows.column("due_ms"))
    assert set(real.column("kind").to_pylist()) == {Kind.PROMISE}, "nobody is to index it as a level's"
    assert real.column("properties").equals(rows.column("properties"))


@pytest.mark.parametrize("text", ["", "REAL_TOPIC\x01orders\x02", "REAL_TOPIC\x01t\x02REAL_QID\x01x\x02"])
def test_a_row_that_does_not_say_where_it_belongs_is_corrupt(text: str) -> None:
    with pytest.raises(Corrupt, match="seq 41"):
        good = "REAL_TOPIC\x01t\x02REAL_QID\x010\x02"
        disguise.restored(waiting([good, text]))
