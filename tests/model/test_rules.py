"""The rules of a message: both forms of each rule agree for every value. A control makes them differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timeball.model import limits, rules
from timeball.model.errors import InvalidDelay, InvalidMessage

NOW_MS = 1_900_000_000_000
TYPES = {"body": pa.binary(), "queue_id": pa.int32(), "due_ms": pa.int64()}


def column(name: str, values: list[Any]) -> pa.Array:
    return pa.array(values, TYPES.get(name, pa.string()))


def near(bound: int) -> st.SearchStrategy[int]:
    return st.integers(max(0, bound - 2), bound + 2)


TEXTS = {
    name: near(most).flatmap(lambda n: st.sampled_from(["k" * n, "é" * (n // 2), "é" * (n // 2) + "x"]))
    for name, most in rules.BYTES_MAX.items()
    if name not in ("body", "topic")
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **TEXTS,
    "topic": st.text("aZ9%|_-/. é\n", max_size=4) | near(limits.TOPIC_BYTES_MAX).map("t".__mul__),
    "body": near(limits.BODY_BYTES_MAX).map(bytes),
    "keys": TEXTS["keys"] | near(limits.KEYS_PER_MESSAGE_MAX).map(lambda n: " ".join("k" * n)),
    "queue_id": st.integers(-3, limits.QUEUES_PER_TOPIC_MAX + 2),
    "tag": TEXTS["tag"] | st.text("a\x01\x02\n", max_size=2),
    "due_ms": st.integers(-2, 2)
    | st.sampled_from([limits.INSTANT_MS_MAX, NOW_MS + limits.DELAY_MS_MAX]).flatmap(near),
}


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.text[:30])
@settings(max_examples=25)
@given(data=st.data())
def test_in_column_and_in_value_agree(rule: rules.Rule, data: st.DataObject) -> None:
    values = data.draw(st.lists(VALUES[rule.column], min_size=1, max_size=2))
    is_broken = rule.in_column(column(rule.column, values), NOW_MS)
    assert is_broken.tolist() == [rule.in_value(value, NOW_MS) for value in values]


@pytest.mark.parametrize("name", sorted(rules.BYTES_MAX.keys() - {"topic"}))
@settings(max_examples=25)
@given(data=st.data())
def test_fault_and_check_columns_name_the_same_first_broken_rule(name: str, data: st.DataObject) -> None:
    value = data.draw(VALUES[name])
    broken_texts = [rule.text for rule in rules.RULES if rule.column == name and rule.in_value(value, NOW_MS)]
    assert rules.fault(name, value) == (broken_texts[0] if broken_texts else None)
    refusal = None
    try:
        rules.check_columns({name: column(name, [None, value])})
    except InvalidMessage as error:
        refusal = str(error)
    assert refusal == (f"row 1: {broken_texts[0]}" if broken_texts else None)


def test_a_null_breaks_only_the_rules_about_missing_values() -> None:
    columns = {name: column(name, [None]) for name in {rule.column for rule in rules.RULES}}
    broken = {rule.text for rule in rules.RULES if rule.in_column(columns[rule.column], NOW_MS).any()}
    missing = {"body: missing", "due: missing; leave the column out to deliver at once"}
    assert broken == {*missing, rules.RULES[0].text}


def test_each_row_has_the_first_rule_that_it_breaks() -> None:
    columns = {
        "topic": column("topic", ["fine", "a/b", "fine", "fine"]),
        "body": column("body", [b"x", None, None, b"x"]),
        "due_ms": column("due_ms", [NOW_MS, -1, -1, NOW_MS + limits.DELAY_MS_MAX + 1]),
    }
    first = rules.first_broken(columns, 4, NOW_MS)
    assert [index if index < 0 else rules.RULES[index].text[:12] for index in first] == [
        -1, "topic: missi", "body: missin", "due: more th",
    ]  # fmt: skip


def test_a_due_time_out_of_its_bounds_is_refused_with_its_row() -> None:
    values = np.array([0, 5, 11], dtype=np.int64)
    rules.check_time_range("due_ms", values, 0, 11)
    with pytest.raises(InvalidDelay, match="due_ms 11 of row 2: between 0 and 10"):
        rules.check_time_range("due_ms", values, 0, 10)
    assert rules.is_too_far(11, 0, 10) and not rules.is_too_far(10, 0, 10)


def test_a_rule_whose_forms_differ_is_seen() -> None:
    """The control: a rule for single values that counts characters instead of bytes."""
    rule = next(rule for rule in rules.RULES if rule.column == "tag")
    text = "é" * (limits.TAG_BYTES_MAX // 2 + 1)
    assert rule.in_column(column("tag", [text]), NOW_MS).any() != (len(text) > limits.TAG_BYTES_MAX)


def test_a_null_in_a_column_of_times_is_refused_with_its_row() -> None:
    columns = {"delay_ms": pa.array([5, 5, None], pa.int64()), "due_ms": pa.array([5], pa.int64())}
    rules.check_no_nulls(columns, ("due_ms", "at"))
    with pytest.raises(InvalidDelay, match="delay_ms of row 9 is null; leave the column out"):
        rules.check_no_nulls(columns, rules.TIMES, 7)


# ---- texts that separate values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys", ["customer 4", "a\tb", "a\u00a0b", "a\n", " a", "a\x01b", "a\u2003b", "a\x85b"]
)
def test_a_key_with_a_blank_is_refused_in_each_form(keys: str) -> None:
    with pytest.raises(InvalidMessage, match="a key has no blanks") as caught:
        rules.keys_text(keys)
    assert "write several keys as a list" in str(caught.value) and repr(keys) in str(caught.value)
    for form in ([keys], ["fine", keys]):
        with pytest.raises(InvalidMessage, match="a key has no blanks"):
            rules.keys_text(form)
    column = pa.array(["fine", None, keys])
    assert rules.key_faults(column).tolist() == [False, False, True]


@pytest.mark.parametrize("name", ["tag", "keys", "unique_key"])
@pytest.mark.parametrize("value", ["\x01", "red\x02KEYS\x01a", "é\x02"])
def test_a_text_with_a_property_separator_is_refused_in_both_forms(name: str, value: str) -> None:
    assert "U+0002 separate properties" in (rules.fault(name, value) or "")
    whole = pa.array(["fine", None, value, "é\n"])
    with pytest.raises(InvalidMessage, match=f"row 2: {name}: the characters U"):
        rules.check_columns({name: whole})
    rules.check_columns({name: whole.slice(3)})
    rules.check_columns({name: whole.slice(0, 2)})
    assert rules.fault(name, "é\n") is None  # other unprintable characters are allowed here


def test_keys_text_joins_one_key_or_a_list_and_refuses_other_types() -> None:
    assert rules.keys_text("order-17") == "order-17"
    assert rules.keys_text(("order-17", "änne")) == "order-17 änne"
    assert [rules.keys_text(no_keys) for no_keys in (None, "", [])] == [None] * 3
    for wrong in (4, b"order-17", [4], [""]):
        with pytest.raises(InvalidMessage, match="key"):
            rules.keys_text(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("label", [" red", "red ", "red\x02TAGS\x01blue", "a\nb", "\x7f"])
def test_a_label_with_control_characters_or_outer_blanks_is_refused(label: str) -> None:
    with pytest.raises(InvalidMessage, match=r"tag .* without control characters"):
        rules.check_label("tag", label)
    assert rules.label_faults(pa.array([label, "big order", "red||blue", None])).tolist() == [
        True,
        *[False] * 3,
    ]
    assert rules.check_label("tag", "big order") == "big order"
