"""A follower's caches: applied in steps from a replica's log, they are what a broker begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node_fixture import running_node

from timeball import Timeball
from timeball.cluster.follower_caches import FollowerCaches
from timeball.cluster.replica_log import ReplicaLog
from timeball.config import Settings
from timeball.files import RealFiles
from timeball.table.catalog import Catalog

NOW_MS = 1_700_000_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a broker with 20 messages and 30 promises, 10 of which were cancelled."""
    with running_node(tmp_path / "data") as node, Timeball(node.endpoint) as ball:
        for n in range(20):
            ball.send("orders", f"now {n}")
        later = [ball.send("orders", f"later {n}", after="1h") for n in range(30)]
        for receipt in later[:10]:
            assert ball.cancel(receipt.id).verdict == "cancelled"
    return tmp_path / "data"


@pytest.mark.parametrize("steps", [1, 7, 1_000])
def test_what_is_applied_in_steps_is_what_waits(folder: Path, steps: int) -> None:
    (folder / "checkpoint").unlink(missing_ok=True)
    files = RealFiles(folder)
    log = ReplicaLog(files, "a", "g1", 1 << 20)
    caches = FollowerCaches(files, log, Settings(data=folder))
    assert caches.applied_seq == 0
    end = log.log().seq
    for seq in range(1, end + 1, max(1, end // steps)):
        caches.apply(seq)
        assert caches.applied_seq <= max(seq, 1)
    applying = caches.apply(end)
    assert caches.applied_seq == end and applying.tables.topics.find_topic("orders") is not None
    found = applying.finish(Catalog(files), NOW_MS)
    assert found.waiting_rows == len(found.waiting) == 20
    log.close()
