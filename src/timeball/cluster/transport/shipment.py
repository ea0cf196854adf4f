"""Data files on their way from a leader to other replicas: the informed nodes, and the replicas that have each file.

A replica counts for a file only while the connection lasts on which it has confirmed the file. The next connection
may come from another disk, which is informed of the files again. That disk is another replica (another incarnation),
and a late confirmation of the old one does not count for it.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future

from timeball.cluster.protocol.leading import have_enough
from timeball.cluster.protocol.record import node_of
from timeball.cluster.protocol.replica import Replica, Role
from timeball.model.errors import NotLeader


class Shipment:
    """The files of one attach. Belongs to one thread, but any thread may wait for `done`."""

    def __init__(self, sizes: dict[str, int], done: Future[None]) -> None:
        """Begin with sizes in bytes by path. `done` is set when enough replicas have all files."""
        self.sizes, self.done = sizes, done
        self._told: set[str] = set()  # nodes
        self._having: dict[str, set[str]] = defaultdict(set)  # path -> replicas
        self._open = set(sizes)  # files that too few replicas have

    def nodes_to_tell(self, state: Replica) -> list[str]:
        """List the connected nodes that have not been informed of the files, and count them as informed from now on."""
        peers = state.lead.peers if state.lead else {}
        found = [node for node, peer in peers.items() if peer.acked is not None and node not in self._told]
        self._told.update(found)
        return found

    def has(self, state: Replica, replica: str, path: str, size_bytes: int) -> None:
        """Count a replica (node and incarnation) for a file, if the size is right."""
        if self.sizes.get(path) != size_bytes:
            return
        self._having[path].add(replica)
        if state.lead and have_enough(state, self._having[path]):
            self._open.discard(path)
        self._end_if_done()

    def lose(self, node: str) -> None:
        """Stop counting a node whose connection has ended. It is informed again when it is back."""
        self._told.discard(node)
        for replicas in self._having.values():
            replicas -= {replica for replica in replicas if node_of(replica) == node}
        self._open = set(self.sizes)

    def look(self, state: Replica) -> None:
        """Count again, because the set of replicas may have changed. Fail when this node leads no more."""
        if state.role is not Role.LEADER or state.lead is None:
            self.fail(NotLeader("this node leads no more; ask again, another one answers soon"))
            return
        self._open = {path for path in self._open if not have_enough(state, self._having[path])}
        self._end_if_done()

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        if not self.done.done():
            self.done.set_exception(error)

    def _end_if_done(self) -> None:
        if not self._open and not self.done.done():
            self.done.set_result(None)
