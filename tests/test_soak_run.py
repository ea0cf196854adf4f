"""The counts of a soak run: messages that are lost, doubled or early, and figures that grow."""

from __future__ import annotations

import pytest
from benchmarks.soak import GROWTH_MAX, Minute, SoakReport, add_growth, growth
from benchmarks.soak_book import BODY_BYTES, Book, body_of

GROUP, OTHER = "receivers", "pullers"


def book_of(due_ms: list[int], *groups: str) -> Book:
    """Return a book with messages due at these times."""
    book = Book("t", groups or (GROUP,))
    assert book.begin(due_ms) == list(range(len(due_ms)))
    return book


def test_a_message_once_in_each_group_is_correct() -> None:
    book = book_of([100, 200, 10_000], GROUP, OTHER)
    for group in (GROUP, OTHER):
        book.came(group, [body_of(1), body_of(0)], 250)
    assert (book.missing(300), book.doubled, book.early, book.unknown, book.received) == (0, 0, 0, 0, 4)
    assert sorted(book.drain_late_ms().tolist()) == [50, 50, 150, 150]
    assert len(book.drain_late_ms()) == 0
    assert len(body_of(7)) == BODY_BYTES


def test_a_lost_message_is_missing_from_its_due_time_on() -> None:
    book = book_of([100, 200], GROUP, OTHER)
    book.came(GROUP, [body_of(0), body_of(1)], 250)
    book.came(OTHER, [body_of(0)], 250)
    assert (book.missing(200), book.missing(201)) == (0, 1)


def test_one_that_comes_twice_or_early_or_was_never_sent_is_seen() -> None:
    book = book_of([100, 200])
    book.came(GROUP, [body_of(0)], 99)
    book.came(GROUP, [body_of(0), body_of(0)], 150)
    book.came(GROUP, [body_of(2)], 150)
    assert (book.doubled, book.early, book.unknown) == (1, 1, 1)


def test_a_message_whose_send_failed_may_come_or_not() -> None:
    book = book_of([100, 200])
    book.doubt([1])
    book.came(GROUP, [body_of(0)], 150)
    assert (book.missing(1_000), book.unsure) == (0, 1)
    book.came(GROUP, [body_of(1)], 250)
    assert (book.doubled, book.unknown) == (0, 0)


def minute(number: int, **changes: float) -> Minute:
    """Return the figures of one minute, with changes."""
    values = {"held_mb": 150.0, "descriptors": 90, "files": 500, "gone_mb": 0.0, **changes}
    return Minute(
        number=number, mapped_mb=100.0, threads=30, delta_entries=1, disk_mb=50.0, waiting=5, sent=1, received=1,
        late_p99_ms=3.0, **values,
    )  # type: ignore[arg-type]  # fmt: skip


def test_growth_in_the_first_quarter_does_not_count() -> None:
    assert growth([10.0, 40.0, 80.0, *[100.0] * 9]) == 0
    assert growth([100.0 + 2 * number for number in range(60)]) == 60
    assert growth([1.0]) == 0


@pytest.mark.parametrize(
    ("name", "step"), [("held_mb", 2), ("descriptors", 2), ("files", 20), ("gone_mb", 6)]
)
def test_a_broker_that_grows_misses_the_bar(name: str, step: int) -> None:
    """It grows for 60 minutes, each by a tenth or less of the growth by the faults that this benchmark looks for."""
    level, growing = SoakReport("soak", False), SoakReport("soak", False)
    level.minutes = [minute(number) for number in range(1, 61)]
    growing.minutes = [minute(number, **{name: 150.0 + step * number}) for number in range(1, 61)]
    for report in (level, growing):
        add_growth(report)
    missed = [figure.name for figure in growing.figures if figure.ratio is not None and figure.ratio < 1]
    assert len(missed) == 1
    assert all(figure.ratio is None or figure.ratio >= 1 for figure in level.figures)
    assert len([figure for figure in level.figures if figure.bar is not None]) == len(GROWTH_MAX)
    assert Minute.HEAD in level.lines() and minute(60).line() in level.lines()
