"""Tests of timeball.pipeline.jobs.campaigns: what was decided is there once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from deltalake import DeltaTable

from timeball.errors import InvalidMessage, NotFound, StorageError
from timeball.pipeline.jobs import campaigns
from timeball.pipeline.jobs.campaigns import Campaigns, Event, check_id, last


def event(name: str, seq: int, number: int = 0, campaign: str = "spring", **more: object) -> Event:
    return Event(campaign=campaign, event=name, number=number, at_ms=1_000 + seq, log_seq=seq, **more)


@pytest.fixture
def table(tmp_path: Path) -> Campaigns:
    return Campaigns(str(tmp_path / "pending"))


def test_events_come_back_as_they_went_in_and_in_order(table: Campaigns) -> None:
    assert table.events() == []
    told = [
        event("planned", 5, detail={"topic": "mail", "rejected": 3}),
        event("attached", 8, rows=70, ranges=[(10, 50), (80, 20)]),
        event("pausing", 9, 1),
        event("paused", 9, 1, rows=7, ranges=[(12, 7)]),
        event("resuming", 20, 1),
        event("resumed", 21, 1, rows=7, ranges=[(200, 7)]),
        event("pausing", 21, 2),
    ]
    for each in reversed(told):
        table.record(each)
    table.record(event("planned", 1, campaign="other"))
    assert table.of("spring") == told
    assert len(table.events()) == len(told) + 1
    assert last(told, "pausing", "resumed") == told[-1]
    assert last(told, "paused", number=2) is None


def test_an_event_is_written_once(table: Campaigns) -> None:
    table.record(event("planned", 5))
    version = DeltaTable(table.uri).version()
    table.record(event("planned", 99, rows=4))
    assert DeltaTable(table.uri).version() == version
    assert [e.log_seq for e in table.of("spring")] == [5]


def test_many_at_the_same_time_write_it_once(table: Campaigns) -> None:
    """Some the same, some of their own: nothing is lost, nothing is there twice."""

    def work(number: int) -> None:
        table.record(event("planned", 1))
        table.record(event("pausing", 2, number))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(e.event, e.number) for e in table.of("spring")] == [
        ("planned", 0),
        *(("pausing", n) for n in range(4)),
    ]


def test_a_writer_that_does_not_look_again_would_write_it_twice(table: Campaigns) -> None:
    """The control: Delta itself lets the same transaction pass when it has seen the first."""
    table.record(event("planned", 5))
    assert campaigns._appended(DeltaTable(table.uri), event("planned", 5))
    assert len(table.of("spring")) == 2


def test_an_unknown_campaign_and_a_broken_table(table: Campaigns) -> None:
    with pytest.raises(NotFound, match="no campaign 'spring'"):
        table.of("spring")
    Path(table.uri).mkdir()
    log = Path(table.uri) / "_delta_log"
    log.mkdir()
    (log / "00000000000000000000.json").write_text("nonsense")
    with pytest.raises(StorageError, match="campaigns"):
        table.events()


@pytest.mark.parametrize("good", ["a", "spring-2027", "A.b_c", "x" * 100])
def test_an_id(good: str) -> None:
    assert check_id(good) == good


@pytest.mark.parametrize("bad", ["", "a/b", ".hidden", "_x", "a b", "ü", "x" * 101, "spark-compact", "a\n"])
def test_what_is_no_id(bad: str) -> None:
    with pytest.raises(InvalidMessage, match="campaign"):
        check_id(bad)


def test_what_paused_campaigns_hold() -> None:
    spring = [event("attached", 1, rows=9), event("pausing", 2, 1), event("paused", 3, 1, rows=7)]
    other = [event("attached", 1, campaign="autumn", rows=5)]
    assert campaigns.held(other) == campaigns.held(spring[:2]) == {}
    assert campaigns.held([*other, *spring]) == {"spring": 7}
    assert campaigns.held([*spring, event("resuming", 4, 1)]) == {"spring": 7}
    assert campaigns.held([*spring, event("resumed", 5, 1, rows=7)]) == {}
    assert campaigns.held([*spring, event("cancelled", 6)]) == {}
