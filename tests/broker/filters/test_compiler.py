"""Compiling: every text is a filter or an InvalidFilter, and a filter selects the same messages as the reference."""

from __future__ import annotations

import re

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from tests.broker.filters import reference
from tests.broker.filters.messages import Message, entries_of, matches, rows_of
from tests.broker.filters.reference import MESSAGES, TREES, Tree, is_delivered, show
from tests.docs_pages import page

from timeball.broker.filters import EVERYTHING, SQL92, TAG, compile_filter
from timeball.model import limits
from timeball.model.errors import InvalidFilter, RequestError


def delivered(text: str, messages: list[Message]) -> list[bool]:
    """Return for each message whether the SQL filter selects it."""
    return matches(text, rows_of(messages))


@settings(max_examples=600, deadline=None)
@given(TREES, MESSAGES)
def test_delivered_messages_agree_with_the_reference(tree: Tree, messages: list[Message]) -> None:
    assert delivered(show(tree), messages) == [is_delivered(tree, message) for message in messages]


def is_delivered_wrongly(defect: str, tree: Tree, message: Message) -> bool:
    """Evaluate with a defect: the outcome NULL or ERROR of a comparison counts as False."""
    with pytest.MonkeyPatch.context() as patch:
        if defect == "null is false":
            patch.setitem(reference.EVALUATORS, "compare", lambda *args: bool(reference.compare_sides(*args)))
        else:
            patch.setattr(reference, "Failed", type("Ignored", (Exception,), {}))
            patch.setitem(reference.EVALUATORS, "compare", _compare_leniently)
        return is_delivered(tree, message)


def _compare_leniently(*args: object) -> bool | None:
    """Compare with the outcome False in place of ERROR."""
    try:
        return reference.compare_sides(*args)  # type: ignore[arg-type]
    except reference.Failed:
        return False


@pytest.mark.parametrize("defect", ["null is false", pytest.param("error is false", marks=pytest.mark.slow)])
def test_a_wrong_evaluator_is_noticed(defect: str) -> None:
    """The control: some filter and messages have another result with the defect."""

    def disagree(case: tuple[Tree, list[Message]]) -> bool:
        tree, messages = case
        wrong = [is_delivered_wrongly(defect, tree, message) for message in messages]
        return delivered(show(tree), messages) != wrong

    tree, _ = find(
        st.tuples(TREES, MESSAGES), disagree, settings=settings(max_examples=20_000, deadline=None)
    )
    assert show(tree)


WORDS = [
    "a", "b", "TAGS", "'x'", "''", "1", "2.5", "1e9", "TRUE", "null", "AND", "or", "NOT", "IN", "BETWEEN", "IS",
    "CONTAINS", "STARTSWITH", "ENDSWITH", "(", ")", "=", "<>", "<", ">=", ",", "-", "+", "--", "/*", "*/", "\n", "'",
    ".", "9" * 30, "1e999", "\x00", "é", "||", "*",
]  # fmt: skip
EXPRESSIONS = st.one_of(
    st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join),
    st.lists(st.sampled_from(WORDS), max_size=12).map("".join),
    st.text(max_size=30),
    st.text(st.characters(codec=None), max_size=6),  # halves of surrogate pairs among them
    TREES.map(show),
)


@settings(max_examples=1_500, deadline=None)
@given(EXPRESSIONS, st.sampled_from([TAG, SQL92]), st.booleans(), MESSAGES)
def test_any_text_is_a_filter_or_refused(
    text: str, expression_type: str, bit_mask: bool, messages: list[Message]
) -> None:
    try:
        filter_ = compile_filter(text, expression_type, bit_mask=bit_mask)
    except InvalidFilter as error:
        assert error.position is None or 1 <= error.position <= len(text) + 1
        return
    assert filter_.exact(rows_of(messages)).shape == (len(messages),)
    assert filter_.candidates(entries_of([0] * len(messages))).shape == (len(messages),)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 8_000, "NOT " * 4_000, "NOT(" * 4_000, "-" * 16_000 + "1", "- " * 4_000 + "1", "a" * 16_000,
        "a = b = " * 2_000 + "c", "a IS NULL " * 1_500, "/*" * 8_000, "--\n" * 5_000, "''" * 8_000, "'" * 16_001,
        "a IN (" + "'', " * 4_000, "a = 1 AND " * 1_500, "1" * 16_000, "1e" * 8_000, "a>" + "9" * 5_000,
        "a > 0." + "1" * 16_000, "(a=1)=" * 2_000 + "TRUE", "é" * 8_100,
    ],
)  # fmt: skip
def test_a_long_or_deep_text_is_refused_or_evaluated_without_another_error(text: str) -> None:
    try:
        filter_ = compile_filter(text, SQL92)
    except InvalidFilter:
        return
    filter_.exact(rows_of([{"a": "1"}]))


def test_the_deepest_and_the_widest_allowed_expressions_are_evaluated() -> None:
    deep = "(" * limits.FILTER_DEPTH_MAX + "a = 1" + ")" * limits.FILTER_DEPTH_MAX
    assert delivered(deep, [{"a": "1"}, {}]) == [True, False]
    negated = "NOT " * (limits.FILTER_DEPTH_MAX - 1) + "(a = 1)"
    assert delivered(negated, [{"a": "2"}, {"a": "1"}, {}]) == [True, False, False]
    wide = " OR ".join(f"a = {i}" for i in range(limits.FILTER_TOKENS_MAX // 4))
    assert delivered(wide, [{"a": "1023"}, {"a": "1024"}, {"a": "0"}]) == [True, False, True]


@pytest.mark.parametrize(
    ("text", "limit", "position"),
    [
        ("a" * (limits.FILTER_BYTES_MAX + 1), "FILTER_BYTES_MAX", None),
        ("é" * (limits.FILTER_BYTES_MAX // 2 + 1), "FILTER_BYTES_MAX", None),
        ("a " * (limits.FILTER_TOKENS_MAX + 1), "FILTER_TOKENS_MAX", 2 * limits.FILTER_TOKENS_MAX + 1),
        (
            "(" * (limits.FILTER_DEPTH_MAX + 2) + "a = 1" + ")" * (limits.FILTER_DEPTH_MAX + 2),
            "FILTER_DEPTH_MAX",
            3,
        ),
        (
            f"a IN ({','.join(['1'.join(chr(39) * 2)] * (limits.FILTER_IN_ITEMS_MAX + 1))})",
            "FILTER_IN_ITEMS_MAX",
            7 + 4 * limits.FILTER_IN_ITEMS_MAX,
        ),
    ],
    ids=["bytes", "bytes of two each", "tokens", "depth", "items"],
)
def test_the_error_names_the_exceeded_limit_and_its_position(
    text: str, limit: str, position: int | None
) -> None:
    with pytest.raises(InvalidFilter, match=limit) as error_info:
        compile_filter(text, SQL92)
    assert (error_info.value.limit, error_info.value.position) == (limit, position)
    if position:
        assert f"at character {position}" in str(error_info.value)


def test_the_limit_in_bytes_applies_to_tags_too() -> None:
    with pytest.raises(InvalidFilter, match="more than 16384 bytes"):
        compile_filter("t" * (limits.FILTER_BYTES_MAX + 1))
    compile_filter("t" * limits.FILTER_BYTES_MAX)


@pytest.mark.parametrize("expression_type", [None, "", "TAG"])
def test_a_subscription_without_a_type_has_tags(expression_type: str | None) -> None:
    assert compile_filter("*", expression_type) is EVERYTHING
    assert not compile_filter("a", expression_type).matches_all


@pytest.mark.parametrize("expression_type", ["sql92", "CLASS", "x" * 10_000])
def test_an_unknown_expression_type_is_refused_with_a_short_text(expression_type: str) -> None:
    with pytest.raises(InvalidFilter, match="it is TAG or SQL92") as error_info:
        compile_filter("a", expression_type)
    assert len(str(error_info.value)) < 200


@pytest.mark.parametrize("text", [None, "", " ", "*"])
def test_an_empty_text_or_a_star_is_no_sql_expression(text: str | None) -> None:
    with pytest.raises(InvalidFilter):
        compile_filter(text, SQL92)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidFilter, match="character 3 is half") as error_info:
        compile_filter("a \ud800")
    assert error_info.value.position == 3


def test_an_invalid_filter_error_is_a_request_error() -> None:
    assert issubclass(InvalidFilter, RequestError)


# ---- docs/filters.md ---------------------------------------------------------------------------------------


def code_lines(language: str) -> list[str]:
    """List the lines of the code blocks of a language on the page."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", page("docs/filters.md"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_the_examples_of_the_page_are_filters() -> None:
    for text in code_lines("sql"):
        assert not compile_filter(text, SQL92).matches_all
    assert [compile_filter(text).matches_all for text in code_lines("tags")] == [True, False, False]
    assert len(code_lines("sql")) > 4


def test_the_page_lists_all_limits_with_their_values() -> None:
    rows = re.findall(r"\| ([\d,]+)(?: bytes)? \| `(\w+)` \|", page("docs/filters.md"))
    documented = {name: int(number.replace(",", "")) for number, name in rows}
    assert documented == {name: value for name, value in vars(limits).items() if name.startswith("FILTER_")}


@pytest.mark.parametrize(
    "text",
    [
        "a = 1 b", "NOT a = 5", "paid", "a = b = c", "(a = 1) = 5", "TRUE = 5", "1 = 'x'", "-a = 1", "a LIKE 'x'",
    ],
)  # fmt: skip
def test_documented_refusals_are_refused(text: str) -> None:
    assert text in page("docs/filters.md") or text in ("-a = 1", "a LIKE 'x'")
    with pytest.raises(InvalidFilter):
        compile_filter(text, SQL92)


def test_documented_rules_of_missing_properties_hold() -> None:
    messages: list[Message] = [{}, {"b": "x"}, {"a": "3000000000", "b": "0"}, {"a": "-9223372036854775808"}]
    for text, expected in [
        ("a = b", [False] * 4),
        ("a <> b", [False, False, True, False]),
        ("'x' <> a", [False, False, True, True]),
        ("NOT (a CONTAINS 'x')", [False, False, True, True]),
        ("a > 5", [False, False, True, False]),
        ("a = -9223372036854775808", [False, False, False, True]),
        ("b = 0.0 -- the end", [False, False, True, False]),
    ]:
        assert delivered(text, messages) == expected, text
