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
KNOWN = [verdict for verdict in VERDICTS if verdict not in ("not_found", UNAVAILABLE, HANDED)]


def of_subject(subject: str) -> st.SearchStrategy[list[Verdict]]:
    """Verdicts of one group on one name: some scheduled messages, or none."""
    known = st.lists(
        st.builds(Verdict, st.just(subject), st.sampled_from(KNOWN), st.integers(1, 99)), min_size=1
    )
    return st.one_of(known, st.just([Verdict(subject, "not_found")]))


ANSWER = st.tuples(*map(of_subject, SUBJECTS)).map(lambda each: [verdict for of in each for verdict in of])


@given(st.lists(st.one_of(st.none(), ANSWER), min_size=1, max_size=5))
def test_any_answers_and_silences_make_one_answer(told: list[list[Verdict] | None]) -> None:
    merged = merge_verdicts(SUBJECTS, told)
    answers = [verdict for verdicts in told if verdicts is not None for verdict in verdicts]
    is_silent = None in told
    assert [v.subject for v in merged] == sorted(v.subject for v in merged), "in the order asked"
    for subject in SUBJECTS:
        of = [verdict for verdict in merged if verdict.subject == subject]
        known = [v for v in answers if v.subject == subject and v.verdict != "not_found"]
        assert of, "each name has a verdict"
        # Every message that a group has settled is reported, once.
        assert Counter(v for v in of if v.verdict not in ("not_found", UNAVAILABLE)) == Counter(known)
        words = [verdict.verdict for verdict in of]
        assert words.count(UNAVAILABLE) == is_silent and words.count("not_found") == (
            not known and not is_silent
        )
        if is_silent:
            assert words[0] == UNAVAILABLE, "who reads one verdict reads this one"
        done = [word in ("cancelled", "rescheduled") for word in words[is_silent:]]
        assert done == sorted(done, reverse=True), "first what this call has done"


@given(ANSWER)
def test_a_group_that_found_nothing_changes_no_answer(answer: list[Verdict]) -> None:
    nothing = [Verdict(subject, "not_found") for subject in SUBJECTS]
    assert merge_verdicts(SUBJECTS, [answer, nothing]) == merge_verdicts(SUBJECTS, [nothing, answer])
    assert Counter(merge_verdicts(SUBJECTS, [answer, nothing])) == Counter(answer)


def test_a_name_given_twice_is_answered_once_for_each_message() -> None:
    here = [Verdict("x", "cancelled", 1), Verdict("x", "already_cancelled", 1)]
    there = [Verdict("x", "not_found"), Verdict("x", "not_found")]
    assert merge_verdicts(["x", "x"], [here, there]) == here
    assert merge_verdicts(["x", "x"], [there, there]) == [Verdict("x", "not_found")]


def test_a_place_is_found_through_a_silence_and_no_place_is_not() -> None:
    place = MessagePlace("visible", 7, at_ms=5)
    assert merge_places([[], None, [place]]) == [place]
    assert merge_places([[], []]) == []
    with pytest.raises(Unavailable, match="did not answer"):
        merge_places([[], None])


def test_pending_states_come_before_visible_ones() -> None:
    old, new = MessagePlace("visible", 90, at_ms=5), MessagePlace("visible", 3, at_ms=9)
    waiting = MessagePlace("waiting", 2, due_ms=50)
    assert merge_places([[old], [waiting, new]]) == [waiting, new, old]


def test_one_that_was_handed_over_is_what_its_heir_says() -> None:
    handed, moving = Verdict("x", HANDED, 3, 7), Verdict("x", UNAVAILABLE, 3, 7)
    there, unknown = Verdict("x", "cancelled", 9, 8), Verdict("x", "not_found")
    assert merge_verdicts(["x"], [[handed], [there]]) == [there]
    assert merge_verdicts(["x"], [[unknown], [handed]]) == [handed], "to be asked once more"
    assert merge_verdicts(["x"], [[handed], None]) == [Verdict("x", UNAVAILABLE)]
    # On its way: the heir may have been asked too early, or have another one of the name.
    assert merge_verdicts(["x"], [[moving], [unknown]]) == [Verdict("x", UNAVAILABLE)]
    assert merge_verdicts(["x"], [[moving, handed], [there]]) == [Verdict("x", UNAVAILABLE), there]
