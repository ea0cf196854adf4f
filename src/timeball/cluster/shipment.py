"""Data files on their way from a leader to the other replicas: who was told of them, and who has which.

A replica counts for a file while the connection lasts over which it has said that it has the file. Behind the next one
may be another disk, which is told of the files anew. It is another replica then, and what the first one has said, heard
late, does not count for it.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future

from timeball.cluster.leading import have_enough
from timeball.cluster.record import node_of
from timeball.cluster.replica import Replica, Role
from timeball.errors import NotLeader


class Shipment:
    """The files of one attach. Belongs to one thread; `done` may be waited for in any."""

    def __init__(self, sizes: dict[str, int], done: Future[None]) -> None:
        """Begin with files by path, and how long each is; `done` is set when enough replicas have all."""
        self.sizes, self.done = sizes, done
        self._told: set[str] = set()
        self._having: dict[str, set[str]] = defaultdict(set)  # path -> replicas
        self._open = set(sizes)  # files that too few have

    def nodes_to_tell(self, state: Replica) -> list[str]:
        """Return the replicas that are there and do not know of the files yet; they count as told now."""
        peers = state.lead.peers if state.lead else {}
        found = [node for node, peer in peers.items() if peer.acked is not None and node not in self._told]
        self._told.update(found)
        return found

    def has(self, state: Replica, replica: str, path: str, size_bytes: int) -> None:
        """Count a replica (node and incarnation) for a file."""
        if self.sizes.get(path) != size_bytes:
            return
        self._having[path].add(replica)
        if state.lead and have_enough(state, self._having[path]):
            self._open.discard(path)
        self._end_if_done()

    def lose(self, node: str) -> None:
        """Count a replica no more; it is told again when it is back."""
        self._told.discard(node)
        for replicas in self._having.values():
            replicas -= {replica for replica in replicas if node_of(replica) == node}
        self._open = set(self.sizes)

    def look(self, state: Replica) -> None:
        """Count again: the set of replicas may be another one, or this one may lead no more."""
        if state.role is not Role.LEADER or state.lead is None:
            self.fail(NotLeader("this node leads no more; ask again, another one answers soon"))
            return
        self._open = {path for path in self._open if not have_enough(state, self._having[path])}
        self._end_if_done()

    def fail(self, error: BaseException) -> None:
        """End without the files at the others."""
        if not self.done.done():
            self.done.set_exception(error)

    def _end_if_done(self) -> None:
        if not self._open and not self.done.done():
            self.done.set_result(None)
