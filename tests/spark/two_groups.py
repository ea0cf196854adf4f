"""Two brokers as two groups of a cluster. The test sets the groups that a node would read from the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.node_fixture import RunningNode, running_node


class TwoGroups:
    """The groups g1 and g2. At first the cluster has only g1."""

    def __init__(self, one: RunningNode, other: RunningNode) -> None:
        self.one, self.other = one, other
        self.set_groups(one)

    @property
    def endpoint(self) -> str:
        """The address that a user names: a node of g1."""
        return self.one.endpoint

    def add(self) -> None:
        """Add g2 to the cluster."""
        self.set_groups(self.one, self.other)

    def set_groups(self, *nodes: RunningNode) -> None:
        """Set the groups of the cluster."""
        reported = [
            {"group": node.settings.group, "addresses": [f"127.0.0.1:{node.settings.port}"]} for node in nodes
        ]
        for node in {self.one, self.other, *nodes}:
            self.tell(node, reported)

    def tell(self, node: RunningNode, groups: list[dict[str, object]] | None) -> None:
        """Set the groups that one node knows."""
        node.node.cluster_status = lambda: {"group": node.settings.group, "groups": groups}

    def leave(self) -> None:
        """Take the first node out of the cluster."""
        self.one.node.cluster_status = dict


@contextmanager
def two_groups(folder: Path, **settings: object) -> Iterator[TwoGroups]:
    """Start both brokers."""
    chosen = {"compact_rows": 0, "grpc_port": -1, **settings}
    with (
        running_node(folder / "g1", group="g1", **chosen) as one,
        running_node(folder / "g2", group="g2", **chosen) as other,
    ):
        yield TwoGroups(one, other)
