"""Two brokers that play two groups of a cluster: each is told by hand what a node reads from the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.node_fixture import RunningNode, running_node


class TwoGroups:
    """The groups g1 and g2; at first the cluster has g1 alone."""

    def __init__(self, one: RunningNode, other: RunningNode) -> None:
        self.one, self.other = one, other
        self.set_groups(one)

    @property
    def endpoint(self) -> str:
        """The one address that a user names: of a node of g1."""
        return self.one.endpoint

    def add(self) -> None:
        """Let the cluster have g2 too."""
        self.set_groups(self.one, self.other)

    def set_groups(self, *nodes: RunningNode) -> None:
        """Let the cluster have these groups."""
        told = [
            {"group": node.settings.group, "addresses": [f"127.0.0.1:{node.settings.port}"]} for node in nodes
        ]
        for node in {self.one, self.other, *nodes}:
            self.tell(node, told)

    def tell(self, node: RunningNode, groups: list[dict[str, object]] | None) -> None:
        """Let one node know of these groups."""
        node.node.cluster_status = lambda: {"group": node.settings.group, "groups": groups}

    def leave(self) -> None:
        """Let the first node be in no cluster."""
        self.one.node.cluster_status = dict


@contextmanager
def two_groups(folder: Path, **settings: object) -> Iterator[TwoGroups]:
    """Start both."""
    chosen = {"compact_self": False, "grpc_port": -1, **settings}
    with (
        running_node(folder / "g1", group="g1", **chosen) as one,
        running_node(folder / "g2", group="g2", **chosen) as other,
    ):
        yield TwoGroups(one, other)
