"""The answers of all groups of a cluster, merged to one answer."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.revoking.group_questions import merge_places, merge_verdicts
from timeball.model.answers import HANDED, UNAVAILABLE, VERDICTS, MessagePlace, Verdict
from timeball.model.errors import Unavailable

SUBJECTS = ("x", "y")
FOUND = [verdict for verdict in VERDICTS if verdict not in ("not_found", UNAVAILABLE, HANDED)]  # of a message


def of_subject(subject: str) -> st.SearchStrategy[list[Verdict]]:
    """Build the verdicts of one group on one name: of some messages, or `not_found`."""
    found = st.lists(
        st.builds(Verdict, st.just(subject), st.sampled_from(FOUND), st.integers(1, 99)), min_size=1
    )
    return st.one_of(found, st.just([Verdict(subject, "not_found")]))


ANSWER = st.tuples(*map(of_subject, SUBJECTS)).map(
    lambda by_subject: [verdict for verdicts in by_subject for verdict in verdicts]
)


@given(st.lists(st.one_of(st.none(), ANSWER), min_size=1, max_size=5))
def test_merged_verdicts_report_each_message_once_and_missing_answers_first(
    answers: list[list[Verdict] | None],
) -> None:
    """None: a group that did not answer."""
    merged = merge_verdicts(SUBJECTS, answers)
    answered = [verdict for verdicts in answers if verdicts is not None for verdict in verdicts]
    is_silent = None in answers
    assert [verdict.subject for verdict in merged] == sorted(verdict.subject for verdict in merged), (
        "in the order of SUBJECTS"
    )
    for subject in SUBJECTS:
        of_name = [verdict for verdict in merged if verdict.subject == subject]
        found = [
            verdict for verdict in answered if verdict.subject == subject and verdict.verdict != "not_found"
        ]
        assert of_name, "each name has a verdict"
        reported = Counter(
            verdict for verdict in of_name if verdict.verdict not in ("not_found", UNAVAILABLE)
        )
        assert reported == Counter(found), "each message of a group is reported once"
        words = [verdict.verdict for verdict in of_name]
        assert words.count(UNAVAILABLE) == is_silent
        assert words.count("not_found") == (not found and not is_silent)
        if is_silent:
            assert words[0] == UNAVAILABLE, "a caller that reads only the first verdict learns of it"
        done = [word in ("cancelled", "rescheduled") for word in words[is_silent:]]
        assert done == sorted(done, reverse=True), "messages that this request settled come first"


@given(ANSWER)
def test_a_group_that_found_nothing_changes_no_answer(answer: list[Verdict]) -> None:
    nothing = [Verdict(subject, "not_found") for subject in SUBJECTS]
    assert merge_verdicts(SUBJECTS, [answer, nothing]) == merge_verdicts(SUBJECTS, [nothing, answer])
    assert Counter(merge_verdicts(SUBJECTS, [answer, nothing])) == Counter(answer)


def test_a_name_in_a_request_twice_is_reported_once() -> None:
    here = [Verdict("x", "cancelled", 1), Verdict("x", "already_cancelled", 1)]
    there = [Verdict("x", "not_found"), Verdict("x", "not_found")]
    assert merge_verdicts(["x", "x"], [here, there]) == here
    assert merge_verdicts(["x", "x"], [there, there]) == [Verdict("x", "not_found")]


def test_a_missing_answer_fails_a_look_up_only_if_no_group_found_a_message() -> None:
    place = MessagePlace("visible", 7, at_ms=5)
    assert merge_places([[], None, [place]]) == [place]
    assert merge_places([[], []]) == []
    with pytest.raises(Unavailable, match="did not answer"):
        merge_places([[], None])


def test_pending_states_come_before_visible_ones() -> None:
    old, new = MessagePlace("visible", 90, at_ms=5), MessagePlace("visible", 3, at_ms=9)
    waiting = MessagePlace("waiting", 2, due_ms=50)
    assert merge_places([[old], [waiting, new]]) == [waiting, new, old]


def test_a_message_that_was_handed_over_has_the_verdict_of_the_receiving_group() -> None:
    handed, received = Verdict("x", HANDED, 3, 7), Verdict("x", "cancelled", 9, 8)
    not_found = Verdict("x", "not_found")
    assert merge_verdicts(["x"], [[handed], [received]]) == [received]
    assert merge_verdicts(["x"], [[not_found], [handed]]) == [handed], "the caller asks the groups again"
    assert merge_verdicts(["x"], [[handed], None]) == [Verdict("x", UNAVAILABLE)]


def test_a_message_that_is_being_transferred_is_unavailable() -> None:
    """The receiving group may have been asked too early, or have another message with the name."""
    moving, handed, received = (
        Verdict("x", UNAVAILABLE, 3, 7),
        Verdict("x", HANDED, 3, 7),
        Verdict("x", "cancelled", 9),
    )
    assert merge_verdicts(["x"], [[moving], [Verdict("x", "not_found")]]) == [Verdict("x", UNAVAILABLE)]
    assert merge_verdicts(["x"], [[moving, handed], [received]]) == [Verdict("x", UNAVAILABLE), received]
