"""Tests of timeball.spark.jobs.campaign: a campaign that has a part in each of two groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node_fixture import RunningNode
from tests.spark.two_groups import two_groups
from tests.table.small_table import table_rows

from timeball.model.errors import NotFound
from timeball.model.limits import HOUR_MS
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs.campaign import CampaignParts, open_parts
from timeball.spark.table_store import Store
from timeball.table.attachment import Attachment

SPRING = "spring"


def attach(node: RunningNode, rows: int) -> None:
    """Attach a part of a campaign with rows that are due in an hour."""
    with Endpoint(node.endpoint, patience_s=5) as broker:
        status, first_seq = broker.status(), broker.reserve(rows)
        written = table_rows([status.now_ms + HOUR_MS] * rows, first_seq=first_seq)
        files = list(Store(status.table.uri).put_rows(written, status.now_ms))
        broker.attach(Attachment(job="bulk", job_id=SPRING, epoch=0, files=files, ranges=[(first_seq, rows)]))


def plan(node: RunningNode, rows: int, *groups: str) -> None:
    """Plan the part of the campaign in the group of `node`. `groups`: all groups that have a part."""
    with Endpoint(node.endpoint, patience_s=5) as broker:
        broker.change_campaign(SPRING, "plan", rows=rows, groups=groups)


def test_all_parts_are_paused_resumed_and_cancelled_as_one(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        groups.add()
        plan(groups.one, 30, "g1", "g2")
        with open_parts(groups.endpoint, SPRING) as parts:
            assert list(parts) == ["g1", "g2"]
            assert CampaignParts(parts).progress().state == "planned", "the other part is not planned yet"
        plan(groups.other, 20, "g1", "g2")
        attach(groups.one, 30)
        with open_parts(groups.endpoint, SPRING) as parts:
            whole = CampaignParts(parts)
            assert whole.progress().state == "planned", "until all parts are attached"
            attach(groups.other, 20)
            progress = whole.progress()
            assert (progress.state, progress.rows, progress.waiting, progress.percent) == (
                "running",
                50,
                50,
                0,
            )
            paused = whole.pause()
            assert (paused.held, paused.repeated, whole.pause().repeated) == (50, False, True)
            assert (whole.progress().state, whole.progress().held) == ("paused", 50)
            assert whole.resume().rows == 50
        with open_parts(f"{groups.endpoint}#g2", SPRING) as parts:
            assert CampaignParts(parts).cancel().newly == 20, "confined to one group"
        with open_parts(groups.other.endpoint, SPRING) as parts:
            done = CampaignParts(parts).cancel()
            assert (done.rows, done.newly, done.cancelled, done.released) == (50, 30, 50, 0)


def test_a_campaign_of_one_group_stays_in_it(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        plan(groups.one, 30)
        groups.add()
        with open_parts(groups.other.endpoint, SPRING) as parts:
            assert list(parts) == ["g1"]
        with open_parts(groups.endpoint, "autumn") as parts:
            assert list(parts) == ["g1", "g2"], "a new one is for all"
            with pytest.raises(NotFound, match="no campaign 'autumn'"):
                CampaignParts(parts).progress()


def test_a_part_whose_group_is_gone_is_not_left_out(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        groups.add()
        plan(groups.one, 30, "g1", "g2", "g3")
        with pytest.raises(NotFound, match="a part in the group 'g3', which is not in the cluster"):
            with open_parts(groups.endpoint, SPRING):
                pass
