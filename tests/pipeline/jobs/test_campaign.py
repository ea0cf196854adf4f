"""Tests of timeball.pipeline.jobs.campaign: how far, and how it ends, on a real broker."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node_fixture import RunningNode, eventually, running_node
from tests.pipeline.campaigning import attach, campaign_of, released, waiting
from tests.written_again import fill_segment, let_go

from timeball import Timeball
from timeball.config import MIB
from timeball.errors import NotFound
from timeball.limits import HOUR_MS
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs import pause
from timeball.pipeline.jobs.campaign import Campaign, find_attach, must_be_attached


def counts(campaign: Campaign) -> tuple[str, int, int, int, int]:
    """(state, released, cancelled, waiting, held), which make up all rows."""
    found = campaign.progress()
    assert found.rows == found.released + found.cancelled + found.waiting + found.held
    return found.state, found.released, found.cancelled, found.waiting, found.held


def test_progress_from_the_first_to_the_last(node: RunningNode, broker: Endpoint) -> None:
    campaign = campaign_of(node)
    with pytest.raises(NotFound, match="no campaign 'spring'"):
        campaign.progress()
    attach(campaign, 30, after_ms=HOUR_MS)
    found = campaign.progress()
    assert (found.state, found.rows, found.waiting, found.percent, found.whole) == (
        "active",
        30,
        30,
        0.0,
        True,
    )
    due = sorted(waiting(broker).values())
    assert (found.next_due_ms, found.last_due_ms) == (due[0], due[-1])
    with Timeball(node.endpoint) as ball:
        ball.cancel(key="k0")
        assert campaign.progress().next_due_ms == due[1]
        assert counts(campaign) == ("active", 0, 1, 29, 0)
        # What others have in the table is none of its business.
        attach(campaign_of(node, "other"), 5, after_ms=0, step_ms=0)
        eventually(lambda: sum(released(broker).values()) == 5, "the other campaign is out")
    assert counts(campaign) == ("active", 0, 1, 29, 0)
    assert counts(campaign_of(node, "other")) == ("done", 5, 0, 0, 0)


def test_a_cancel_is_definite_and_may_be_repeated(node: RunningNode, broker: Endpoint) -> None:
    campaign = campaign_of(node)
    attach(campaign, 100, after_ms=-20_500, step_ms=1_000)  # some twenty are due already
    eventually(lambda: sum(released(broker).values()) >= 20, "some are released")
    done = campaign.cancel()
    assert done.rows == 100 and done.cancelled == done.newly
    assert done.cancelled + done.released == 100 and done.released >= 20
    assert waiting(broker) == {}
    assert sum(released(broker).values()) == done.released
    again = campaign.cancel()
    assert (again.newly, again.cancelled, again.released) == (0, done.cancelled, done.released)
    assert counts(campaign) == ("cancelled", done.released, done.cancelled, 0, 0)
    assert campaign.progress().percent == 100.0


def test_what_died_between_the_attach_and_its_note_is_found_in_the_log(
    node: RunningNode, broker: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = campaign_of(node)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Campaign, "record_attached", die)
        attach(campaign, 10)
    assert [event.event for event in campaign.table.of("spring")] == ["planned"]
    assert counts(campaign) == ("active", 0, 0, 10, 0)
    assert [event.event for event in campaign.table.of("spring")] == ["planned", "attached"]
    assert campaign.cancel().cancelled == 10


def test_a_campaign_that_never_came_to_its_attach(node: RunningNode) -> None:
    campaign = campaign_of(node)
    campaign.record_planned(10, 1_000, {})
    found = campaign.progress()
    assert (found.state, found.rows, found.waiting, found.percent) == ("planned", 10, 0, 0.0)
    with pytest.raises(Exception, match="nothing of it is attached yet"):
        must_be_attached(campaign.events())
    done = campaign.cancel()
    assert (done.rows, done.newly, done.cancelled) == (0, 0, 0)
    with pytest.raises(Exception, match="was cancelled"):
        must_be_attached(campaign.events())


def test_an_attach_is_found_by_its_own_name_only(node: RunningNode, broker: Endpoint) -> None:
    attach(campaign_of(node, "spring"), 3)
    attach(campaign_of(node, "spring-2"), 4)
    found = find_attach(broker, "spring", 0)
    assert found is not None and found.rows == 3
    assert find_attach(broker, "spring", broker.status().log.durable_seq) is None
    assert find_attach(broker, "sprin", 0) is None


def test_the_books_of_campaigns_whose_log_was_let_go(tmp_path: Path) -> None:
    """What was decided of all stays counted; what happened to one and is told nowhere counts as released."""
    with running_node(tmp_path / "data", segment_bytes=MIB, compact_self=False) as node:
        names = ("plain", "paused", "resumed", "cancelled")
        plain, paused, resumed, cancelled = (campaign_of(node, name) for name in names)
        with Endpoint(node.endpoint) as broker:
            for campaign in (plain, paused, resumed, cancelled):
                attach(campaign, 10, after_ms=-300, step_ms=100 * HOUR_MS)  # the first of each is due
            eventually(lambda: released(broker)["k0"] == len(names), "the first of each is released")
        pause.pause(paused)
        pause.pause(resumed)
        pause.resume(resumed)
        cancelled.cancel()
        before = [counts(campaign) for campaign in (plain, paused, resumed, cancelled)]
        assert before == [
            ("active", 1, 0, 9, 0),
            ("paused", 1, 0, 0, 9),
            ("active", 1, 0, 9, 0),
            ("cancelled", 1, 9, 0, 0),
        ]
        fill_segment(node)
        assert let_go(node) > plain.events()[0].log_seq
        assert [counts(campaign) for campaign in (plain, paused, resumed, cancelled)] == before
        assert not plain.progress().whole and not paused.progress().whole
        assert pause.resume(paused).rows == 9
        assert counts(paused) == ("active", 1, 0, 9, 0)
        assert pause.pause(resumed).held == 9
        assert cancelled.cancel().cancelled == 9
