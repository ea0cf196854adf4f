"""Campaigns: the last row of each is its state, and it has its ranges from the frame that attaches them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.broker.registry.state_rows import StateRows

from timeball.broker.registry.campaigns import JOB_MS_MAX, CampaignFacts, Campaigns
from timeball.model import limits
from timeball.model.errors import InvalidMessage, NotFound, OutOfRange, OverLimit
from timeball.model.message import Kind, pairs_of
from timeball.table.attachment import Attachment, FileEntry

FILE = FileEntry(
    path="bucket=2030-01/" + "0" * 32 + ".parquet", bucket="2030-01", rows=3, size_bytes=9,
    min_due_ms=50, max_due_ms=70, min_seq=10, max_seq=12,
)  # fmt: skip
ATTACH = Attachment(job="bulk", job_id="spring", epoch=0, files=[FILE], ranges=[(10, 3)])


@pytest.fixture
def campaigns() -> Campaigns:
    return StateRows().opened(Campaigns)


def plan(campaigns: Campaigns, name: str = "spring", rows: int = 3, settled_before_ms: int = 0) -> None:
    """Plan a campaign at 1,000 ms."""
    campaigns.plan(name, rows, 1_000, 5 + len(campaigns.all()), settled_before_ms)


def attach_planned(campaigns: Campaigns) -> None:
    """Attach the files of the planned campaign `spring`."""
    change = campaigns.attached(ATTACH, 2_000)
    assert change is not None
    change.apply()


def test_a_repeated_plan_changes_nothing_and_a_plan_without_rows_is_running_at_once(
    campaigns: Campaigns,
) -> None:
    plan(campaigns)
    plan(campaigns, rows=9)
    assert campaigns.get("spring").rows == 3
    plan(campaigns, "nothing", rows=0)
    assert campaigns.get("nothing").state == "running" and campaigns.get("nothing").is_finished(0)
    assert list(campaigns.all()) == ["spring", "nothing"]


def test_an_attach_makes_a_planned_campaign_running_when_its_row_is_kept(campaigns: Campaigns) -> None:
    assert campaigns.attached(ATTACH, 2_000) is None, "there is no campaign of this id"
    plan(campaigns)
    assert campaigns.attached(msgspec.structs.replace(ATTACH, job="rewrite"), 2_000) is None
    change = campaigns.attached(ATTACH, 2_000)
    assert change is not None and change.rows.column("kind").to_pylist() == [Kind.META]
    [(key, value)] = pairs_of(change.rows)
    assert key == "campaign/spring"
    assert campaigns.get("spring").state == "planned", "the append may be refused"
    change.apply()
    assert msgspec.json.decode(value, type=CampaignFacts) == campaigns.get("spring")
    facts = campaigns.get("spring")
    assert (facts.state, facts.ranges, facts.last_due_ms) == ("running", [(10, 3)], 70)
    assert campaigns.attached(ATTACH, 3_000) is None
    assert [facts.is_finished(ms) for ms in (70, 71)] == [False, True]


def test_get_attached_finds_only_an_attached_campaign_that_is_not_cancelled(campaigns: Campaigns) -> None:
    with pytest.raises(NotFound, match="no campaign 'spring'"):
        campaigns.get_attached("spring")
    with pytest.raises(InvalidMessage, match="campaign 'a/b'"):
        campaigns.get_attached("a/b")
    plan(campaigns)
    with pytest.raises(OutOfRange, match="nothing of it is attached yet"):
        campaigns.get_attached("spring")
    campaigns.put("spring", msgspec.structs.replace(campaigns.get("spring"), state="cancelled"))
    with pytest.raises(InvalidMessage, match="was cancelled"):
        campaigns.get_attached("spring")
    with pytest.raises(InvalidMessage, match="was cancelled"):
        campaigns.check_attach(ATTACH)
    campaigns.check_attach(msgspec.structs.replace(ATTACH, job_id="other"))


def test_at_the_limit_a_finished_campaign_is_deleted_and_without_one_a_plan_is_refused(
    campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CAMPAIGNS_MAX", 2)
    plan(campaigns)
    plan(campaigns, "summer")
    with pytest.raises(OverLimit, match="2 campaigns are not over yet"):
        plan(campaigns, "autumn")
    attach_planned(campaigns)
    plan(campaigns, "autumn", settled_before_ms=71)
    assert list(campaigns.all()) == ["summer", "autumn"]


def test_a_cancelled_campaign_is_deleted_only_when_none_of_its_messages_can_be_delivered(
    campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, its job could still attach its files, or messages would lose the hold of an interrupted cancel."""
    monkeypatch.setattr(limits, "CAMPAIGNS_MAX", 1)

    def is_deleted(**facts: Any) -> bool:
        """Plan another campaign beside a cancelled one with these facts, at the limit of one campaign."""
        cancelled = CampaignFacts(
            state="cancelled", since_ms=1_000, planned_ms=1_000, planned_seq=5, rows=3, **facts
        )
        campaigns.put("spring", cancelled)
        try:
            campaigns.plan("summer", 3, 2_000, 6, 0)
        except OverLimit:
            return False
        return list(campaigns.all()) == ["summer"]

    assert not is_deleted()
    assert not is_deleted(ranges=[(10, 3)], held_from_ms=50)
    assert is_deleted(ranges=[(10, 3)])


def test_a_cancelled_plan_is_deleted_only_after_the_longest_job(
    campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CAMPAIGNS_MAX", 1)
    plan(campaigns)
    campaigns.put("spring", msgspec.structs.replace(campaigns.get("spring"), state="cancelled"))
    with pytest.raises(OverLimit):
        campaigns.plan("summer", 3, 1_000 + JOB_MS_MAX, 6, 0)
    campaigns.plan("summer", 3, 1_001 + JOB_MS_MAX, 6, 0)
    assert list(campaigns.all()) == ["summer"]


@pytest.mark.parametrize("name", ["a", "spring-2027", "A.b_c", "x" * 100])
def test_a_valid_id_is_accepted(campaigns: Campaigns, name: str) -> None:
    plan(campaigns, name)
    assert campaigns.get(name).state == "planned"


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "_x", "a b", "ü", "x" * 101, "spark-compact", "a\n"])
def test_an_invalid_id_is_refused(campaigns: Campaigns, name: str) -> None:
    with pytest.raises(InvalidMessage, match="campaign"):
        plan(campaigns, name)
