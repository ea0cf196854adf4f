"""The coordinator of a single node: it leads every group and needs nothing."""

from __future__ import annotations

import asyncio

import msgspec

from timeball.cluster.coordination.coordinator import (
    NEVER_MS,
    Coordinator,
    HeldLease,
    Node,
    SingleNodeCoordinator,
)
from timeball.cluster.protocol.replica import Record
from timeball.io.clock import ManualClock


def test_a_single_node_always_leads() -> None:
    async def scenario() -> None:
        alone: Coordinator = SingleNodeCoordinator("here", epoch=4)
        lease = await alone.grant(1_000)
        assert await alone.renew(lease) == lease and lease.ends_ms > NEVER_MS // 2
        view = await alone.read("g1")
        record = Record(4, "here", ("here",))
        assert view.record == record and view.holder is not None
        assert view.holder[:2] == ("here", lease.id)
        for swap in (
            await alone.lead("g1", 1, Record(5, "here", ()), lease),
            await alone.change("g1", 1, Record(5, "here", ())),
            await alone.hand_over("g1", 1, Record(5, "there", ()), lease),
        ):
            assert swap == (False, view)
        assert await alone.hold("g1", lease)
        await alone.register(Node("here", {"http": "h:1"}), lease)
        assert await alone.nodes() == {"here": Node("here", {"http": "h:1"})}
        await alone.resign("g1", lease)
        await alone.revoke(lease)
        assert await alone.read("g1") == view and (await alone.read_all()).views == {}
        assert await alone.secret("receipts", b"mine") == b"mine"
        await alone.wait_for_change(0, 0.001)
        await alone.close()

    asyncio.run(scenario())


def test_the_lease_of_a_single_node_never_ends() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        held = HeldLease(SingleNodeCoordinator("here"), clock, Node("here"), 1_000)
        assert await held.renew_or_grant() > 10**9
        clock.advance(10**12)
        assert held.lease is not None

    asyncio.run(scenario())


def test_unknown_fields_of_a_registered_node_are_ignored() -> None:
    found = msgspec.json.decode(b'{"name":"a","addresses":{"flight":"h:1"},"racks":3}', type=Node)
    assert found == Node("a", {"flight": "h:1"})
