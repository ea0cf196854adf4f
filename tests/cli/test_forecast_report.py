"""The counts of `timeball forecast` on a real broker, and its document, with and without assumed loads."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.cli.forecast_days import EIGHT_MS, EXTRA, NINE_MS, NO_EXTRA, TEN_MS, answered, asked, counted
from tests.cli.forecast_days import NO_EXTRA as NONE
from tests.cli.unreachable import NO_FLIGHT
from tests.edges.http.client import client_of
from tests.node_fixture import running_node
from tests.spark.traffic import send
from tests.spark.two_groups import two_groups

from timeball.cli import forecast_report as report
from timeball.cli.forecast_options import Extra, Moment, Window
from timeball.cli.forecast_report import answer, count, describe, show_span
from timeball.model.errors import NotFound, RequestError, SetupError, Unavailable
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.spark.views.due_histogram import Peak
from timeball.spark.views.forecast import Bar


def test_pending_messages_are_counted_in_bars_peaks_and_topics() -> None:
    document = answered().document
    assert (document.waiting, document.extra, document.from_ms, document.until_ms) == (110, 0, EIGHT_MS, None)
    assert document.load.curve == [Bar(NINE_MS, 100), Bar(TEN_MS, 10)]
    assert document.load.peaks == [Peak(NINE_MS, 100, 100), Peak(TEN_MS, 1, 10)]
    assert list(document.load.topics) == ["orders", "mail"]
    assert document.what_if is document.rate_needed is None
    assert answered().queues == {}


def test_an_extra_load_is_in_the_bars_and_in_figures_of_its_own() -> None:
    forecast = answered(EXTRA, rates={"*": 10}, within_ms=2_000)
    document = forecast.document
    assert (document.waiting, document.extra, document.load.rows) == (110, 60, 170)
    assert document.load.curve == [Bar(NINE_MS, 100), Bar(TEN_MS, 70)]
    assert document.what_if and document.what_if_extra
    assert (document.what_if.queues["*"].rows, document.what_if_extra.queues["*"].rows) == (110, 170)
    assert document.what_if_extra.queues["*"].lateness_max_ms == 10_000
    assert document.rate_needed == pytest.approx(50, rel=0.002)
    # The hundred orders at 9:00 need the largest rate, with and without the extra load.
    assert document.rate_needed_extra == pytest.approx(50, rel=0.002)
    assert list(forecast.queues) == ["*"]


def test_a_choice_of_topics_leaves_the_extra_load_whole() -> None:
    document = answered(EXTRA, topics=["mail"]).document
    assert (document.waiting, document.extra) == (10, 60)
    assert list(document.load.topics) == ["campaign", "mail"]


def test_extra_messages_outside_the_window_count_apart() -> None:
    wide = Extra(rows=60, at=Moment(TEN_MS), over_ms=60_000)
    document = answer(counted((NINE_MS, TEN_MS + 30_000)), asked(), wide).document
    assert (document.extra, document.extra_outside) == (30, 30)
    early = answer(counted(), asked(), Extra(rows=5, at=Moment(EIGHT_MS - 1_000))).document
    assert (early.extra, early.extra_outside) == (0, 5)


def test_a_backlog_exists_from_the_beginning_of_the_window() -> None:
    document = answered(rates={"*": 10}, backlog=600, within_ms=60_000).document
    assert document.what_if
    outcome = document.what_if.queues["*"]
    assert (outcome.backlog_max, outcome.backlog_max_at_ms, outcome.caught_up_ms) == (
        600,
        EIGHT_MS,
        EIGHT_MS + 60_000,
    )
    assert document.rate_needed == pytest.approx(10, rel=0.002)


def test_a_check_compares_only_the_chosen_topics() -> None:
    document = answer(counted(came=90), asked(topics=["orders"]), Extra()).document
    assert document.check and (document.check.said, document.check.came) == (100, 90)
    with_mail = answer(counted(came=90), asked(topics=["mail"]), Extra()).document
    assert with_mail.check and (with_mail.check.said, with_mail.check.came, with_mail.check.same_hour) == (
        0,
        0,
        1,
    )
    assert answered().document.check is None


def test_messages_are_counted_within_a_window_and_at_older_versions(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", compact_rows=0) as node:
        send(node.endpoint, 10)
        node.run(node.broker.compact())
        send(node.endpoint, 5, topic="mail", after_ms=DAY_MS)
        present = count(node.endpoint, None, Window(), by_topic=True)
        assert {name: part.total for name, part in present.load.by_topic().items()} == {
            "orders": 10,
            "mail": 5,
        }
        assert (present.version, present.is_whole, present.due) == (1, True, (None, None))
        near = count(node.endpoint, None, Window(end=Moment(2 * DAY_MS, is_relative=True)))
        assert (near.load.total, near.load.topics) == (5, ("",))
        node.run(node.broker.compact())
        send(node.endpoint, 5)
        assert (
            count(node.endpoint, None, Window(version=1)).load.total == 10
        )  # the ten that were pending then
        assert count(node.endpoint, None, Window(version=0)).load.total == 0
        newest = count(node.endpoint, None, Window(timestamp_ms=present.now_ms + DAY_MS))
        assert (newest.version, newest.load.total) == (2, 15)
        with pytest.raises(NotFound, match="no version so old"):
            count(node.endpoint, None, Window(timestamp_ms=1_000))


def test_later_times_of_schedules_are_counted_up_to_the_end_of_the_window(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", http_port=0) as node, client_of(node) as client:
        rule = {"every": "1h"}
        for name, topic in (("one", "orders"), ("two", "mail")):
            client.ask("PUT", f"/v1/schedules/{name}", {"rule": rule, "topic": topic, "body": "x"})
        assert count(node.endpoint, None, Window()).recurring_until_ms is None  # these schedules have no end
        window = Window(end=Moment(DAY_MS, is_relative=True))
        counted_load = count(node.endpoint, None, window, by_topic=True)
        # 24 times in a day, and the first one of each is a message already.
        assert (counted_load.load.total, counted_load.recurring.total) == (2, 46)
        document = answer(counted_load, asked(rates={"*": 10}), NO_EXTRA).document
        assert (document.waiting, document.recurring, document.load.rows) == (2, 46, 48)
        assert document.what_if and document.what_if.queues["*"].rows == 48
        assert any(line.startswith("2 due from") and ", 46 recurring;" in line for line in describe(document))
        mail_document = answer(counted_load, asked(topics=["mail"]), NO_EXTRA).document
        assert (mail_document.waiting, mail_document.recurring, list(mail_document.load.topics)) == (
            1,
            23,
            ["mail"],
        )
        assert count(node.endpoint, None, window).recurring.topics == ("",)


def test_the_time_up_to_which_schedules_are_counted_is_shown() -> None:
    due = (None, TEN_MS)
    cut_load = replace(counted(due), recurring=counted().load, recurring_until_ms=NINE_MS)
    output = list(describe(answer(cut_load, asked(), NO_EXTRA).document))
    assert "recurring schedules have too many times: counted until 2030-01-31T09:00:00Z" in output


def test_without_a_broker_the_count_raises_unavailable() -> None:
    with pytest.raises(Unavailable, match="no broker answers"):
        count(NO_FLIGHT, None, Window())


def lines(**more: object) -> list[str]:
    """Describe the answer of `answered` for people."""
    return list(describe(answered(**more).document))  # type: ignore[arg-type]


def test_bars_then_the_sum_then_peaks_and_topics() -> None:
    nine, ten, total, *rest = lines()
    assert nine.startswith("2030-01-31T09  ███") and nine.endswith(" 100")
    assert ten.startswith("2030-01-31T10  ███") and ten.endswith(" 10")
    assert total == "110 due from 2030-01-31T08:00:00Z; version 7, as of 2030-01-31T08:00:00Z"
    assert rest == [
        "peaks:",
        "  2030-01-31T09:00:00Z  100 in the second, 100 in its minute",
        "  2030-01-31T10:00:00Z  1 in the second, 10 in its minute",
        "topics:",
        "  orders  100 rows, 2030-01-31T09:00:00Z to 2030-01-31T09:00:00Z, at most 100 at 2030-01-31T09:00:00Z",
        "  mail    10 rows, 2030-01-31T10:00:00Z to 2030-01-31T10:00:09Z, at most 1 at 2030-01-31T10:00:00Z",
    ]


def test_empty_bars_are_shown_unless_most_bars_are_empty() -> None:
    minutes = lines(by="minute", by_topic=False, peaks=0)
    assert [line[:16] for line in minutes] == ["2030-01-31T09:00", "2030-01-31T10:00", "110 due from 203"]
    at_one_pm = Extra(rows=1, at=Moment(NINE_MS + 4 * HOUR_MS))
    hours = list(describe(answered(at_one_pm, by_topic=False).document))
    assert [line[:13] for line in hours[:5]] == [f"2030-01-31T{hour:02}" for hour in (9, 10, 11, 12, 13)]
    assert [line.split()[-1] for line in hours[:5]] == ["100", "10", "0", "0", "1"]


def test_lateness_with_and_without_extra_messages() -> None:
    output = lines(extra=EXTRA, rates={"orders": 10, "*": 60}, within_ms=2_000, by_topic=False, peaks=0)
    assert output[2].startswith("110 due from 2030-01-31T08:00:00Z, 60 extra;")
    assert output[3:] == [
        "consumers of orders at 10 a second, as it is:",
        "  lateness: half within 5.0 s, 99 % within 9.9 s, all within 10.0 s",
        "  backlog: at most 100 at 2030-01-31T09:00:00Z, worked off by 2030-01-31T09:00:10Z",
        "consumers of the other topics at 60 a second, as it is:",
        "  lateness: half within 8 ms, 99 % within 16 ms, all within 17 ms",
        "  backlog: at most 1 at 2030-01-31T10:00:00Z, worked off by 2030-01-31T10:00:00Z",
        "all of these, as it is: half within 4.5 s, 99 % within 9.9 s, all within 10.0 s",
        "consumers of orders at 10 a second, with the extra rows:",
        "  lateness: half within 5.0 s, 99 % within 9.9 s, all within 10.0 s",
        "  backlog: at most 100 at 2030-01-31T09:00:00Z, worked off by 2030-01-31T09:00:10Z",
        "consumers of the other topics at 60 a second, with the extra rows:",
        "  lateness: half within 433 ms, 99 % within 1.0 s, all within 1.0 s",
        "  backlog: at most 61 at 2030-01-31T10:00:00Z, worked off by 2030-01-31T10:00:01Z",
        "all of these, with the extra rows: half within 1.5 s, 99 % within 9.8 s, all within 10.0 s",
        "to keep all within 2s, one queue takes 50.0 a second, 50.0 with the extra rows",
    ]


def test_topics_without_a_consumer_rate_are_listed() -> None:
    assert lines(rates={"mail": 5}, by_topic=False)[-1] == "no --consumer-rate for: orders 100"


def test_rows_left_out_of_the_forecast_are_reported() -> None:
    outside = answer(counted(is_whole=False), asked(), Extra(rows=3, at=Moment(0))).document
    output = list(describe(outside))
    assert any(line.startswith("the log no longer has all of its tail of then") for line in output)
    assert "3 extra rows are due outside of this window, and are not counted" in output
    whole = list(describe(answer(counted(), asked(), NONE).document))
    assert not any("no longer" in line or "outside" in line for line in whole)


def test_messages_held_by_paused_campaigns_are_shown() -> None:
    """In an earlier version, the forecast left out a paused campaign, as if it had no messages."""
    with_held = replace(counted(), held={"autumn": 1_000, "spring": 20})
    document = answer(with_held, asked(), NONE).document
    assert document.held == with_held.held
    line = "1,020 more are held by paused campaigns, and are not counted: autumn, spring"
    assert line in list(describe(document))
    assert not any("paused" in line for line in lines())


def test_an_older_forecast_is_compared_with_the_released_messages() -> None:
    output = list(describe(answer(counted(came=90), asked(), NONE).document))
    assert output[-2:] == [
        "until 2030-01-31T09:59:50Z: 100 were foretold, 90 came",
        "  the same in seconds 94.7%, in minutes 94.7%, in hours 94.7%",
    ]
    assert not any("foretold" in line for line in lines())


@pytest.mark.parametrize(
    ("span_ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (2_449, "2.4 s"),
        (200_000, "3 min 20 s"),
        (5 * 3_600_000 + 7 * 60_000, "5 h 7 min"),
        (76 * 3_600_000, "3 d 4 h"),
    ],
)
def test_a_time_span_is_shown_in_suitable_units(span_ms: int, text: str) -> None:
    assert show_span(span_ms) == text


def test_the_loads_of_all_groups_are_added_up(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        send(groups.one.endpoint, 30)
        send(groups.other.endpoint, 20, topic="mail")
        window = Window()
        assert count(groups.endpoint, None, window).version == 0, "of one group"
        groups.add()
        counted_load = count(groups.endpoint, None, window, by_topic=True)
        assert counted_load.version is None and counted_load.versions == {"g1": 0, "g2": 0}
        document = answer(counted_load, asked(), NONE).document
        assert document.waiting == 50 and document.versions == {"g1": 0, "g2": 0}
        assert "versions g1 0, g2 0, as of" in "\n".join(describe(document))
        assert count(f"{groups.endpoint}#g2", None, window).load.total == 20
        with pytest.raises(RequestError, match="version 0: each of the 2 groups has its own"):
            count(groups.endpoint, None, Window(version=0))


pytest.importorskip("matplotlib", reason="the extra `picture` is not installed")


def size(file: Path) -> tuple[int, int]:
    """Read the width and the height of a PNG file, in pixels."""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_picture_shows_the_load_and_with_consumer_rates_also_the_backlog(tmp_path: Path) -> None:
    report.draw(answered(EXTRA, rates={"orders": 10, "*": 60}), tmp_path / "both.png")
    report.draw(answered(by_topic=False), tmp_path / "load.png")
    (wide, high), (_, low) = size(tmp_path / "both.png"), size(tmp_path / "load.png")
    assert wide >= 1_000 and high > low
    report.draw(answer(counted(came=90), asked(), NO_EXTRA), tmp_path / "came.svg")
    assert "came (90)" in (tmp_path / "came.svg").read_text()
    report.draw(answered(topics=["nobody"]), tmp_path / "empty.svg")
    assert "<svg" in (tmp_path / "empty.svg").read_text()


def test_more_bars_than_a_picture_holds_are_drawn_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    by_second = answered(by="second")
    assert report._unit(by_second) == "second"
    monkeypatch.setattr(report, "BARS_DRAWN_MAX", 5)
    assert report._unit(by_second) == "minute"


def test_a_curve_with_too_many_corners_keeps_its_highest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "CORNERS_MAX", 10)
    rows = np.zeros(95)
    rows[42] = 7.0
    at, thin = report._thin_out(np.arange(95.0), rows)
    assert len(at) == len(thin) == 10 and thin.max() == 7


def test_a_picture_with_a_bad_suffix_or_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--picture load\.txt: its name should end in \.png"):
        report.check_picture(Path("load.txt"))
    with pytest.raises(SetupError, match="there is no folder"):
        report.check_picture(tmp_path / "nowhere" / "load.png")
    report.check_picture(tmp_path / "load.png")
