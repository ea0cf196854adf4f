"""A siege of a group whose replicas lose the power of their disks: one of them, or all at once."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from pathlib import Path

from tests.cluster.besieged import GroupSiege, replicas_of
from tests.cluster.processes import NodeProcess
from tests.crash.checker import Fault
from tests.crash.kinds_of_state import is_without_disk
from tests.crash.loop_disk import LoopDisk

PAUSE_MS = 20  # of each client, for the starts of nodes


class PoweredGroup(GroupSiege):
    """A group with a disk for each node, mounted at the node's folder."""

    def __init__(self, folder: Path, disks: dict[str, LoopDisk], seed: int) -> None:
        super().__init__(folder, seed)
        self._pause_s = PAUSE_MS / 1_000
        self._disks = disks
        self._copy = folder / "copy"
        self.cuts: Counter[str] = Counter()

    def is_lost(self, error: Exception) -> bool:
        """See Siege."""
        return is_without_disk(error) or super().is_lost(error)

    def strike(self) -> None:
        """Cut the power of the leader, of a follower, or of all nodes, in turn."""
        broker, leader = self.broker, self.broker.leader()
        nodes = list(broker.cluster.nodes.values())
        follower = next(node for node in nodes if node is not leader)
        what, struck = [("all", nodes), ("leader", [leader]), ("all", nodes), ("follower", [follower])][
            self.cuts.total() % 4
        ]
        lives = {node.name: len(replicas_of(node)) for node in struck}
        self._cut(struck)
        self.counts["killed"] += 1
        self.cuts[what] += 1
        if what == "leader":
            broker.epoch = broker.wait_leads(broker.epoch)
        for node in struck:
            self._disks[node.name].restore()
            node.start()
        if what == "all":
            broker.epoch = broker.wait_leads(broker.epoch)
        for node in struck:
            broker.wait_all_count(node, lives[node.name] + 1)
        before = self.counts["acknowledged"]
        self.until(lambda: self.counts["acknowledged"] > before, "an acknowledgement after a cut")

    def compared(self, data: Path, schedule: str = "hour_log") -> list[Fault]:
        """Compare a copy of the folder, because this process may keep a file that it opens mapped."""
        return super().compared(shutil.copytree(data, self._copy), schedule)

    def _cut(self, nodes: list[NodeProcess]) -> None:
        # As in tests/crash/powered.py, none may answer without its disk.
        for node in nodes:
            node.kill(signal.SIGSTOP)
        for node in nodes:
            self._disks[node.name].cut()
        for node in nodes:
            node.kill()
