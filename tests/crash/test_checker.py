"""The checker finds each kind of contradiction, and none where there is none."""

from __future__ import annotations

import pytest
from tests.crash.checker import Observed, Outcome, Place, Row, Sent, check

DEAD = "%DLQ%g"


def row(key: str, offset: int, *, due_ms: int | None = 50, store_ms: int = 60, queue_id: int = 0) -> Row:
    """Build a row of topic t."""
    return Row(Place("t", queue_id, offset), key, key.encode(), due_ms, store_ms, 100 + offset, 10 + offset)


def world() -> tuple[Observed, Outcome]:
    """Build answers and a final state without a contradiction.

    Two scheduled messages are delivered (a, b), one was cancelled (off), and one was never acknowledged (unsure).
    """
    sent = {
        key: Sent(key, "t", key.encode(), 50, acked=key != "unsure") for key in ("a", "b", "off", "unsure")
    }
    observed = Observed(sent=sent, cancel_asked={"off"}, verdicts={"off": ["cancelled"]}, topics={"t": 1})
    observed.see(row("a", 0), 60)
    observed.saved_offsets[("g", "t")] = {0: 1}
    outcome = Outcome(
        rows=[row("a", 0), row("b", 1)],
        ranges={("t", 0): (0, 2)},
        offsets={("g", "t"): {0: 2}},
        scheduled_rows={10, 11, 12},
        settled=[10, 11, 12],
    )
    return observed, outcome


def kinds(observed: Observed, outcome: Outcome) -> set[str]:
    """Return the kinds of the faults that the checker finds."""
    return {fault.kind for fault in check(observed, outcome)}


def test_a_state_without_contradictions_has_no_faults() -> None:
    assert check(*world()) == []


def test_an_unacknowledged_message_may_be_missing_or_delivered_once_but_not_twice() -> None:
    observed, outcome = world()
    outcome.rows.append(row("unsure", 2))
    outcome.ranges[("t", 0)] = (0, 3)
    assert check(observed, outcome) == []
    outcome.rows.append(row("unsure", 3))
    outcome.ranges[("t", 0)] = (0, 4)
    assert kinds(observed, outcome) == {"doubled"}


def test_a_message_with_an_unanswered_cancel_may_be_delivered_or_missing() -> None:
    observed, outcome = world()
    observed.cancel_asked.add("b")
    assert check(observed, outcome) == []
    outcome.rows.pop()
    outcome.ranges[("t", 0)] = (0, 1)
    outcome.offsets.clear()
    observed.saved_offsets.clear()
    assert check(observed, outcome) == []


def test_a_row_removed_after_it_was_seen_is_not_lost() -> None:
    observed, outcome = world()
    del outcome.rows[0]
    outcome.ranges[("t", 0)] = (1, 2)
    assert check(observed, outcome) == []
    observed.seen.clear()
    assert kinds(observed, outcome) == {"lost"}


def test_a_message_of_a_delay_level_may_be_due_later_but_not_earlier() -> None:
    observed, outcome = world()
    late = row("b", 1, due_ms=55)
    outcome.rows[1] = late
    assert kinds(observed, outcome) == {"corrupted"}
    observed.sent["b"].is_at_least = True
    assert check(observed, outcome) == []
    outcome.rows[1] = row("b", 1, due_ms=49)
    assert kinds(observed, outcome) == {"corrupted"}


def test_a_gap_in_the_queue_of_a_delay_level_is_a_fault_and_its_rows_are_not_deliveries() -> None:
    observed, outcome = world()
    outcome.ranges[("levels", 2)] = (0, 2)
    outcome.waited = [row("a", offset)._replace(place=Place("levels", 2, offset)) for offset in (0, 1)]
    assert check(observed, outcome) == [], "rows in the queues of delay levels are no deliveries"
    del outcome.waited[0]
    assert kinds(observed, outcome) == {"gap"}


def dead(key: str, offset: int) -> Row:
    """Build a row of a dead-letter topic."""
    return row(key, offset)._replace(place=Place(DEAD, 0, offset))


def give_up(observed: Observed, outcome: Outcome) -> None:
    """Let a consumer give up "a" with an answer, and "b" without one."""
    observed.dead_asked, observed.dead = {"a": DEAD, "b": DEAD}, {"a"}
    outcome.dead = [dead("a", 0)]
    outcome.ranges[(DEAD, 0)] = (0, 1)


def test_a_message_that_was_given_up_is_in_its_queue_and_among_the_dead_letters() -> None:
    observed, outcome = world()
    give_up(observed, outcome)
    assert check(observed, outcome) == []
    outcome.dead.append(dead("b", 1))
    outcome.ranges[(DEAD, 0)] = (0, 2)
    assert check(observed, outcome) == []


def lose_a_dead_letter(observed: Observed, outcome: Outcome) -> None:
    give_up(observed, outcome)
    outcome.dead, outcome.ranges[(DEAD, 0)] = [], (0, 0)


def double_a_dead_letter(observed: Observed, outcome: Outcome) -> None:
    give_up(observed, outcome)
    outcome.dead.append(dead("a", 1))
    outcome.ranges[(DEAD, 0)] = (0, 2)


def invent_a_dead_letter(observed: Observed, outcome: Outcome) -> None:
    give_up(observed, outcome)
    outcome.dead.append(dead("off", 1))
    outcome.ranges[(DEAD, 0)] = (0, 2)


def lose(observed: Observed, outcome: Outcome) -> None:
    outcome.rows.pop()
    outcome.ranges[("t", 0)] = (0, 1)
    outcome.offsets[("g", "t")] = {0: 1}


def double(observed: Observed, outcome: Outcome) -> None:
    outcome.rows.append(row("b", 2))
    outcome.ranges[("t", 0)] = (0, 3)


def settle_twice(observed: Observed, outcome: Outcome) -> None:
    outcome.settled.append(12)


def release_early(observed: Observed, outcome: Outcome) -> None:
    outcome.rows[1] = row("b", 1, store_ms=49)


def see_early(observed: Observed, outcome: Outcome) -> None:
    observed.see(row("a", 0), 49)


def resurrect(observed: Observed, outcome: Outcome) -> None:
    outcome.rows.append(row("off", 2))
    outcome.ranges[("t", 0)] = (0, 3)


def corrupt(observed: Observed, outcome: Outcome) -> None:
    outcome.rows[1] = outcome.rows[1]._replace(body=b"B")


def change_due(observed: Observed, outcome: Outcome) -> None:
    outcome.rows[1] = outcome.rows[1]._replace(due_ms=51)


def invent(observed: Observed, outcome: Outcome) -> None:
    outcome.rows.append(row("nobody's", 2))
    outcome.ranges[("t", 0)] = (0, 3)


def swap(observed: Observed, outcome: Outcome) -> None:
    first, second = outcome.rows
    outcome.rows = [
        second._replace(place=first.place, seq=first.seq),
        first._replace(place=second.place, seq=second.seq),
    ]


def leave_gap(observed: Observed, outcome: Outcome) -> None:
    outcome.rows[1] = row("b", 2)
    outcome.ranges[("t", 0)] = (0, 3)


def disorder(observed: Observed, outcome: Outcome) -> None:
    outcome.rows[1] = outcome.rows[1]._replace(seq=99)


def say_released(observed: Observed, outcome: Outcome) -> None:
    observed.verdicts["unsure"] = ["released"]


def say_not_found(observed: Observed, outcome: Outcome) -> None:
    observed.verdicts["b"] = ["not_found"]


def cancel_twice(observed: Observed, outcome: Outcome) -> None:
    observed.verdicts["off"].append("cancelled")


def forget_to_settle(observed: Observed, outcome: Outcome) -> None:
    outcome.settled.remove(12)


def run_ahead(observed: Observed, outcome: Outcome) -> None:
    outcome.offsets[("g", "t")] = {0: 3}


def fall_behind(observed: Observed, outcome: Outcome) -> None:
    outcome.offsets[("g", "t")] = {0: 0}


def drop_topic(observed: Observed, outcome: Outcome) -> None:
    observed.topics["other"] = 1


@pytest.mark.parametrize(
    ("contradict", "kind"),
    [
        (lose, "lost"),
        (double, "doubled"),
        (settle_twice, "doubled"),
        (release_early, "early"),
        (see_early, "early"),
        (resurrect, "resurrected"),
        (corrupt, "corrupted"),
        (change_due, "corrupted"),
        (invent, "unexpected"),
        (swap, "moved"),
        (leave_gap, "gap"),
        (disorder, "gap"),
        (say_released, "misjudged"),
        (say_not_found, "misjudged"),
        (cancel_twice, "misjudged"),
        (forget_to_settle, "unsettled"),
        (run_ahead, "offset"),
        (fall_behind, "offset"),
        (drop_topic, "topic"),
        (lose_a_dead_letter, "lost"),
        (double_a_dead_letter, "doubled"),
        (invent_a_dead_letter, "unexpected"),
    ],
    ids=lambda value: value.__name__ if callable(value) else value,
)
def test_each_contradiction_is_found_under_its_kind(contradict, kind: str) -> None:
    observed, outcome = world()
    contradict(observed, outcome)
    assert kind in kinds(observed, outcome)
