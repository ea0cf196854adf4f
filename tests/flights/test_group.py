"""The demo's group: three nodes that serve, one of which is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.flights.group import group_in
from tests.cluster.etcd_cluster import need_etcd


@pytest.mark.slow
@pytest.mark.xdist_group("etcd")
def test_another_node_leads_when_the_leader_is_killed(tmp_path: Path) -> None:
    need_etcd()
    with group_in(tmp_path / "data", "hour_log") as group, group.client() as ball:
        before = ball.send("kept", "x", after="1h", retry=True)
        told = group.kill_leader()
        assert "which led, was killed at noon" in told
        assert ball.get(before.id).state == "waiting"
