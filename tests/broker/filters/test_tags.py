"""Tags: parsed as RocketMQ parses them, selected by hash or bit, then compared by text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.filters.messages import entries_of, tagged

from timeball.broker.filters import EVERYTHING, Filter, compile_filter, tag_hash, tag_mask, tags
from timeball.model import limits
from timeball.model.errors import InvalidFilter

# "Aa" and "BB" have the same hash. Far more tags share a bit: there are only 63 bits.
WORDS = ["Aa", "BB", "TagA", "TagB", "C#", "Bb", "é", "😀", "a b", "*"]


def matched(filter_: Filter, message_tags: list[str | None], *, bit_mask: bool = False) -> list[bool]:
    """Return which messages a pull delivers: candidates by the index, whose rows match.

    Checks that the index excludes no message that matches.
    """
    encode = tag_mask if bit_mask else tag_hash
    entries = entries_of([0 if tag is None else encode(tag) for tag in message_tags])
    candidates, exact = filter_.candidates(entries).tolist(), filter_.exact(tagged(message_tags)).tolist()
    excluded = [
        tag for tag, is_candidate, matches in zip(message_tags, candidates, exact) if matches > is_candidate
    ]
    assert not excluded
    return [is_candidate and matches for is_candidate, matches in zip(candidates, exact)]


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 0), ("a", 97), ("TagA", 2598919), ("polygenelubricants", -(1 << 31)), ("é", 233), ("😀", 1772899)],
)
def test_tags_hash_as_in_java(text: str, value: int) -> None:
    assert tags.java_hash(text) == tag_hash(text) == value


@pytest.mark.parametrize("text", [None, "", "*"])
def test_a_subscription_without_tags_or_with_a_star_matches_all_messages(text: str | None) -> None:
    assert compile_filter(text) is EVERYTHING
    assert compile_filter(text, bit_mask=True) is EVERYTHING


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("TagA", ["TagA"]),
        ("TagA||TagB", ["TagA", "TagB"]),
        (" TagA || TagB\t||\n", ["TagA", "TagB"]),
        ("||a||||b||", ["a", "b"]),
        ("a|||b", ["a", "|b"]),  # as Java's split reads it
        ("a|b", ["a|b"]),
        ("a b", ["a b"]),
        ("a || a", ["a"]),
        ("a || *", ["*", "a"]),  # the star means all only if it is alone
        (" * ", ["*"]),
        ("\u00a0a\u3000", ["\u00a0a\u3000"]),  # Java's trim removes only blanks of ASCII
    ],
)
def test_a_subscription_is_read_as_rocketmq_reads_it(text: str, names: list[str]) -> None:
    assert sorted(tags.parse(text) or []) == names


@pytest.mark.parametrize("text", ["||", " ", " || ", "||||", "\x00||\x1f"])
def test_a_subscription_without_tags_is_refused(text: str) -> None:
    with pytest.raises(InvalidFilter, match="names no tag; write \\* for all"):
        compile_filter(text)


def test_too_many_tags_are_refused() -> None:
    largest = "||".join(map(str, range(limits.FILTER_TAGS_MAX)))
    assert matched(compile_filter(largest), ["0", "1023", "1024"]) == [True, True, False]
    with pytest.raises(InvalidFilter, match=r"1025 tags, at most 1024 \(FILTER_TAGS_MAX\)") as error_info:
        compile_filter(largest + "||x")
    assert error_info.value.limit == "FILTER_TAGS_MAX"


def test_two_tags_with_one_hash_are_told_apart() -> None:
    filter_ = compile_filter("Aa")
    assert tag_hash("Aa") == tag_hash("BB")
    # The control: the index alone would also deliver "BB".
    assert filter_.candidates(entries_of([tag_hash("Aa"), tag_hash("BB")])).tolist() == [True, True]
    assert matched(filter_, ["Aa", "BB"]) == [True, False]


def test_a_message_without_a_tag_matches_no_tag_filter() -> None:
    assert matched(compile_filter("Aa"), [None, "", "Aa"]) == [False, False, True]
    assert matched(compile_filter("Aa"), [None, None]) == [False, False]
    # The tag of the subscription is trimmed, so it matches no message.
    assert matched(compile_filter("\0x"), [None, "\0x"]) == [False, False]


def test_in_a_topic_of_single_tags_the_whole_text_is_the_tag() -> None:
    assert matched(compile_filter("a"), ["a||b", "a"]) == [False, True]


def test_a_multi_tag_message_matches_any_of_its_tags() -> None:
    filter_ = compile_filter("a || b", bit_mask=True)
    messages = ["a", "b||c", "c", "c || a", None, "", "||", "ab"]
    assert matched(filter_, messages, bit_mask=True) == [True, True, False, True, False, False, False, False]


def test_two_tags_with_one_bit_are_told_apart() -> None:
    twin = next(str(i) for i in range(1000) if tag_mask(str(i)) == tag_mask("a"))
    filter_ = compile_filter("a", bit_mask=True)
    assert filter_.candidates(entries_of([tag_mask(twin)])).tolist() == [True]
    assert matched(filter_, [twin, f"{twin}||a", "a"], bit_mask=True) == [False, True, True]


def test_a_mask_has_one_bit_for_each_tag_and_is_never_negative() -> None:
    masks = [tag_mask(str(i)) for i in range(1000)]
    assert all(mask.bit_count() == 1 and 0 < mask < 1 << 63 for mask in masks)
    assert len(set(masks)) == tags.BITS
    assert tag_mask("1||2") == tag_mask(" 2 || 1 ") == tag_mask("1") | tag_mask("2")
    assert tag_mask("") == tag_mask("||") == 0


TAGS = st.one_of(st.none(), st.sampled_from(WORDS), st.text(max_size=5))
SUBSCRIPTIONS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4)


@given(SUBSCRIPTIONS, st.lists(TAGS))
def test_a_filter_by_hash_matches_exactly_the_messages_with_its_tags(
    subscribed: list[str], message_tags: list[str | None]
) -> None:
    if subscribed == ["*"]:  # the star alone means all messages
        return
    expected = [tag in subscribed for tag in message_tags]
    assert matched(compile_filter(" || ".join(subscribed)), message_tags) == expected


@given(SUBSCRIPTIONS, st.lists(st.one_of(TAGS, st.lists(st.sampled_from(WORDS)).map("||".join))))
def test_a_filter_by_bits_matches_exactly_the_messages_with_its_tags(
    subscribed: list[str], message_tags: list[str | None]
) -> None:
    if subscribed == ["*"]:  # the star alone means all messages
        return
    expected = [bool(set(tags.split(tag or "")) & set(subscribed)) for tag in message_tags]
    assert (
        matched(compile_filter("||".join(subscribed), bit_mask=True), message_tags, bit_mask=True) == expected
    )


def test_the_caches_of_hashes_take_at_most_16_mib() -> None:
    entry_bytes = limits.TAG_BYTES_MAX + 400  # the longest tag with the objects around it
    for function in (tags.tag_hash, tags.tag_mask):
        entries_max = function.cache_parameters()["maxsize"]
        assert entries_max is not None and entries_max * entry_bytes <= 16 * 1024 * 1024


def test_the_filter_for_everything_matches_all() -> None:
    assert EVERYTHING.matches_all
    assert EVERYTHING.candidates(entries_of([0, -1, 5])).tolist() == [True] * 3
    assert EVERYTHING.exact(tagged([None, "a"])).tolist() == [True] * 2
    assert EVERYTHING.exact(tagged([])).tolist() == EVERYTHING.candidates(entries_of([])).tolist() == []
