"""What `timeball forecast` counts on a real broker, and its document: as it is, and with what is only thought of."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.forecast.days import EIGHT_MS, EXTRA, NINE_MS, TEN_MS, answered, asked, counted
from tests.cli.unreachable import NOWHERE
from tests.node_fixture import running_node
from tests.pipeline.traffic import send

from timeball.cli.forecast.options import Extra, Moment, Window
from timeball.cli.forecast.report import answer, count
from timeball.errors import NotFound, Unavailable
from timeball.limits import DAY_MS
from timeball.pipeline.views.due_histogram import Peak
from timeball.pipeline.views.forecast import Bar


def test_what_waits_in_bars_peaks_and_topics() -> None:
    document = answered().document
    assert (document.waiting, document.extra, document.from_ms, document.until_ms) == (110, 0, EIGHT_MS, None)
    assert document.load.curve == [Bar(NINE_MS, 100), Bar(TEN_MS, 10)]
    assert document.load.peaks == [Peak(NINE_MS, 100, 100), Peak(TEN_MS, 1, 10)]
    assert list(document.load.topics) == ["orders", "mail"]
    assert document.what_if is document.rate_needed is None
    assert answered().queues == {}


def test_an_extra_load_is_in_the_bars_and_beside_the_rest() -> None:
    found = answered(EXTRA, rates={"*": 10}, within_ms=2_000)
    document = found.document
    assert (document.waiting, document.extra, document.load.rows) == (110, 60, 170)
    assert document.load.curve == [Bar(NINE_MS, 100), Bar(TEN_MS, 70)]
    assert document.what_if and document.what_if_extra
    assert (document.what_if.queues["*"].rows, document.what_if_extra.queues["*"].rows) == (110, 170)
    assert document.what_if_extra.queues["*"].lateness_max_ms == 10_000
    assert document.rate_needed == pytest.approx(50, rel=0.002)
    assert document.rate_needed_extra == pytest.approx(
        50, rel=0.002
    )  # a hundred at nine are the worst of both
    assert list(found.queues) == ["*"]


def test_only_some_topics_but_all_that_is_extra() -> None:
    document = answered(EXTRA, topics=["mail"]).document
    assert (document.waiting, document.extra) == (10, 60)
    assert list(document.load.topics) == ["campaign", "mail"]


def test_what_is_extra_outside_of_the_window_is_counted_apart() -> None:
    wide = Extra(rows=60, at=Moment(TEN_MS), over_ms=60_000)
    document = answer(counted((NINE_MS, TEN_MS + 30_000)), asked(), wide).document
    assert (document.extra, document.extra_outside) == (30, 30)
    early = answer(counted(), asked(), Extra(rows=5, at=Moment(EIGHT_MS - 1_000))).document
    assert (early.extra, early.extra_outside) == (0, 5)


def test_a_backlog_is_there_from_the_beginning_of_the_window() -> None:
    document = answered(rates={"*": 10}, backlog=600, within_ms=60_000).document
    assert document.what_if
    outcome = document.what_if.queues["*"]
    assert (outcome.backlog_max, outcome.backlog_max_at_ms, outcome.caught_up_ms) == (
        600,
        EIGHT_MS,
        EIGHT_MS + 60_000,
    )
    assert document.rate_needed == pytest.approx(10, rel=0.002)


def test_only_what_came_of_some_topics_is_held_against_them() -> None:
    document = answer(counted(came=90), asked(topics=["orders"]), Extra()).document
    assert document.check and (document.check.said, document.check.came) == (100, 90)
    others = answer(counted(came=90), asked(topics=["mail"]), Extra()).document
    assert others.check and (others.check.said, others.check.came, others.check.same_hour) == (0, 0, 1)
    assert answered().document.check is None


def test_what_is_counted_within_the_window_as_of_now_or_of_a_version(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", compact_self=False) as node:
        send(node.endpoint, 10)
        node.run(node.broker.compact())
        send(node.endpoint, 5, topic="mail", after_ms=DAY_MS)
        found = count(node.endpoint, None, Window(), by_topic=True)
        assert {name: part.total for name, part in found.load.by_topic().items()} == {"orders": 10, "mail": 5}
        assert (found.version, found.is_whole, found.due) == (1, True, (None, None))
        near = count(node.endpoint, None, Window(end=Moment(2 * DAY_MS, is_relative=True)))
        assert (near.load.total, near.load.topics) == (5, ("",))
        node.run(node.broker.compact())
        send(node.endpoint, 5)
        assert count(node.endpoint, None, Window(version=1)).load.total == 10  # what waited when it was made
        assert count(node.endpoint, None, Window(version=0)).load.total == 0
        made = count(node.endpoint, None, Window(timestamp_ms=found.now_ms + DAY_MS))
        assert (made.version, made.load.total) == (2, 15)
        with pytest.raises(NotFound, match="no version so old"):
            count(node.endpoint, None, Window(timestamp_ms=1_000))


def test_a_broker_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(Unavailable, match="no broker answers"):
        count(NOWHERE, None, Window())
