"""The cluster of the demo: three nodes, of which the leader is killed."""

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
        receipt = ball.send("kept", "x", after="1h", retry=True)
        report = group.kill_leader()
        assert "which led, was killed at noon" in report
        assert ball.get(receipt.id).state == "waiting"
