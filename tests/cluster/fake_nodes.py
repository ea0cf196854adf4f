"""Nodes in the coordinator without processes: each is registered and has a report."""

from __future__ import annotations

from msgspec.structs import replace
from tests.cluster.worlds import LONG_TTL_MS, World, make_group, next_record

from timeball.cluster.coordination.coordinator import Coordinator, Lease, Node
from timeball.cluster.protocol.replica import node_of
from timeball.monitoring.figures import PeerFigures, ReplicaFigures


async def join(
    world: World, replica: str, *, promised: int = 0, group: str = "g1", **figures: object
) -> tuple[Coordinator, Lease]:
    """Register a node and report its figures; return its coordinator, and the lease that carries both."""
    name = node_of(replica)
    coordinator = world.coordinator(name)
    lease = await coordinator.grant(LONG_TTL_MS)
    await coordinator.register(
        Node(name, replica=replica, promised=promised, group=group, version="1"), lease
    )
    report = ReplicaFigures(group, replica, "follower", "", promised=promised, version="1")
    await coordinator.report(replace(report, **figures), lease)
    return coordinator, lease


async def group_of_three(world: World, **leader: object) -> dict[str, tuple[Coordinator, Lease]]:
    """Return three nodes of a group: a leads in epoch 4, and c lacks a row."""
    peers = {"b": PeerFigures("b/1", 10, 0.2), "c": PeerFigures("c/1", 9, -0.4)}
    figures = {
        "role": "leader",
        "epoch": 4,
        "promised": 4,
        "log_seq": 10,
        "committed_seq": 10,
        "peers": peers,
    }
    nodes = {
        "a": await join(world, "a/1", **figures | leader),  # type: ignore[arg-type]
        "b": await join(world, "b/1", log_seq=10, committed_seq=10),
        "c": await join(world, "c/1", log_seq=9, committed_seq=9),
    }
    await led_by(world, nodes["a"])
    return nodes


async def led_by(world: World, node: tuple[Coordinator, Lease]) -> None:
    """Create the group's record, and let a node lead it."""
    coordinator, lease = node
    view = await make_group(world.coordinator("maker"))
    swap = await coordinator.lead("g1", view.revision, next_record(view, "a"), lease)
    assert swap.won
