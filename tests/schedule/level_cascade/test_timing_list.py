"""TIMING-LIST: the remaining levels occur once, and all other properties stay unchanged."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.model import limits
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.model.message import Kind, build_rows, decode_properties, encode_properties, with_seq
from timeball.schedule import level_cascade
from timeball.schedule.level_cascade import (
    NAME,
    NAMES,
    encode_for_log,
    encode_rewrite,
    hop_texts,
    levels_after_first,
    plan,
    with_list,
    without_list,
)

NOW = 1_700_000_000_000
OTHERS = ["TIMING", "TIMING-LIST2", "X-TIMING-LIST", "KEYS"]
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), max_size=12)
NAMES_OF = st.one_of(st.sampled_from([NAME, NAME, *OTHERS]), TEXT.filter(bool))
ENTRIES = st.lists(st.tuples(NAMES_OF, TEXT), max_size=6)
HOPS = st.integers(0, 2 * DAY_MS).map(lambda ms: int(plan(np.array([ms]))[0]))


def text_of(entries: list[tuple[str, str]], *, ends: bool) -> str:
    text = "".join(f"{name}\x01{value}\x02" for name, value in entries)
    return text if ends else text.removesuffix("\x02")


def packed(text: str) -> int:
    """Parse the text into a packed list, as a tool would do it."""
    return sum(int(number) << (6 * place) for place, number in enumerate(text.split(","))) if text else 0


@given(st.lists(HOPS, max_size=20))
def test_texts_parse_to_the_same_lists(hops: list[int]) -> None:
    list_texts = hop_texts(np.array(hops, dtype=np.int64)).to_pylist()
    assert [packed(text) for text in list_texts] == hops


def test_text_of_a_list_is_its_level_numbers() -> None:
    (text,) = hop_texts(plan(np.array([18 * HOUR_MS + 31 * 60_000 + 36_000]))).to_pylist()
    assert [NAMES[int(number) - 1] for number in text.split(",")] == [
        "10h", "7h", "1h", "30m", "1m", "30s", "5s", "1s",
    ]  # fmt: skip


@given(rows=st.lists(st.tuples(ENTRIES, st.booleans(), HOPS), min_size=1, max_size=5))
def test_with_list_adds_one_list_and_keeps_other_properties(
    rows: list[tuple[list[tuple[str, str]], bool, int]],
) -> None:
    properties = pa.array([text_of(entries, ends=ends) for entries, ends, _ in rows], pa.string())
    hops = np.array([h for _, _, h in rows], dtype=np.int64)
    with_lists = with_list(properties, hops).to_pylist()
    for (entries, _, left), text in zip(rows, with_lists, strict=True):
        pairs = [entry.split("\x01", 1) for entry in text.split("\x02") if entry]
        others = [[name, value] for name, value in entries if name != NAME]
        assert [pair for pair in pairs if pair[0] != NAME] == others
        assert [packed(value) for name, value in pairs if name == NAME] == ([left] if left else [])
    without_lists = without_list(properties).to_pylist()
    for (entries, _, _), text in zip(rows, without_lists, strict=True):
        other_properties = [(name, value) for name, value in entries if name != NAME]
        assert text.removesuffix("\x02") == text_of(other_properties, ends=False)


@pytest.mark.parametrize(
    "text", [None, "", "a\x01b", "a\x01b\x02", "TIMING-LISTS\x01TIMING-LIST\x02", "\x02\x02"]
)
def test_properties_without_a_list_are_unchanged(text: str | None) -> None:
    assert without_list(pa.array([text], pa.string())).to_pylist() == [text]
    assert with_list(pa.array([text], pa.string()), np.array([0])).to_pylist() == [text]


def test_list_is_omitted_if_the_properties_would_be_too_long() -> None:
    room = len(f"{NAME}\x0132,19\x02")
    full = [
        encode_properties({"k": "v" * (limits.PROPERTIES_BYTES_MAX - 3 - room + more)}) for more in (0, 1)
    ]
    longest, too_long = with_list(pa.array(full), np.array([packed("32,19")] * 2)).to_pylist()
    assert decode_properties(longest)[NAME] == "32,19"
    assert len(longest.encode()) == limits.PROPERTIES_BYTES_MAX
    assert too_long == full[1]


def rows_of(kinds: list[Kind], due_times: list[int | None], properties: list[str | None]) -> pa.RecordBatch:
    return build_rows(
        len(kinds), kind=np.array(kinds, dtype=np.int8), topic="t", body=[b"b"] * len(kinds), store_ms=NOW,
        due_ms=due_times, properties=properties,
    )  # fmt: skip


def test_only_scheduled_messages_get_a_list() -> None:
    sent_properties = encode_properties({NAME: "1,1,1", "TIMING": "08:00:00"})
    rows = rows_of(
        [Kind.SCHEDULED, Kind.MESSAGE, Kind.SCHEDULED, Kind.CANCEL, Kind.SCHEDULED],
        [NOW + 61_000, None, NOW + 5_000, NOW + 61_000, NOW - 1],
        [sent_properties, sent_properties, sent_properties, sent_properties, None],
    )
    with_lists = encode_for_log(rows, NOW)
    list_texts = [decode_properties(text or "").get(NAME) for text in with_lists["properties"].to_pylist()]
    assert list_texts == ["1", "1,1,1", None, "1,1,1", None]
    assert with_lists.schema == rows.schema
    for name in (n for n in rows.schema.names if n != "properties"):
        assert with_lists[name].equals(rows[name]), name
    kept_properties = decode_properties(with_lists["properties"][2].as_py())
    assert kept_properties == {"TIMING": "08:00:00"}


def test_numbered_rows_get_a_list_and_immediate_messages_do_not() -> None:
    rows = rows_of([Kind.SCHEDULED], [NOW + 90_000], [None])
    assert decode_properties(encode_for_log(with_seq(rows, 7), NOW)["properties"][0].as_py()) == {NAME: "4"}
    messages = rows_of([Kind.MESSAGE], [None], [f"{NAME}\x01x\x02"])
    assert encode_for_log(messages, NOW) is messages


@given(st.integers(1_000, 2 * DAY_MS))
def test_rewrite_removes_the_first_level_of_the_list(remaining_ms: int) -> None:
    hops = plan(np.array([remaining_ms]))
    rows = with_seq(rows_of([Kind.SCHEDULED], [NOW + remaining_ms], ["a\x01b"]), 1)
    properties = decode_properties(encode_rewrite(rows, hops)["properties"][0].as_py())
    assert properties.pop("a") == "b"
    assert packed(properties.get(level_cascade.NAME, "")) == int(levels_after_first(hops)[0])
