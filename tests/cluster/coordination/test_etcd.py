"""The store of etcd beyond the contract (test_coordinator.py, test_store.py): its watch, leases in time, its bounds."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cluster.etcd_cluster import EtcdCluster
from tests.cluster.worlds import World, wait_until, world_of
from tests.ports import free_ports

from timeball.cluster.coordination.etcd import EtcdAccess, EtcdStore
from timeball.cluster.coordination.store import (
    KeyValue,
    LeaseIs,
    Put,
    Read,
    RevisionIs,
    Store,
)
from timeball.model.errors import LeaseLost, Unavailable

pytestmark = pytest.mark.xdist_group("etcd")

VALUE_BYTES = 256 * 1024  # the values of nodes and groups have some hundred bytes


@pytest.fixture
def run(etcd: EtcdCluster) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    """Return a function that runs a scenario with a new cluster in etcd."""

    async def within(scenario: Callable[[World], Awaitable[None]]) -> None:
        async with world_of(etcd.endpoints) as world:
            await scenario(world)

    return lambda scenario: asyncio.run(within(scenario))


Run = Callable[[Callable[[World], Awaitable[None]]], None]


def test_etcd_grants_renews_and_ends_leases(run: Run) -> None:
    async def scenario(world: World) -> None:
        store = world.store()
        lease_id, granted_s = await store.grant(1)
        assert granted_s == 1, "with an election timeout of 500 ms"
        assert await store.renew(lease_id) == 1
        long_id, granted_s = await store.grant(3_600)
        left_s = await store.time_to_live(long_id)
        assert granted_s == 3_600 and left_s is not None and 3_000 < left_s <= 3_600
        await store.revoke(long_id)
        assert await store.time_to_live(long_id) is None
        with pytest.raises(LeaseLost):
            await store.transact((), [Put(f"{world.cluster}/a", b"", long_id)])
        await wait_until(lambda: is_gone(store, lease_id))

    run(scenario)


async def is_gone(store: Store, lease_id: int) -> bool:
    """Check whether a lease has ended."""
    return await store.time_to_live(lease_id) is None


def test_a_key_that_is_put_without_its_lease_stays(run: Run) -> None:
    async def scenario(world: World) -> None:
        store, key = world.store(), f"{world.cluster}/a"
        lease_id, _ = await store.grant(60)
        await store.transact((), [Put(key, b"1", lease_id)])
        assert (await store.transact([LeaseIs(key, lease_id)], [Put(key, b"2")])).succeeded
        await store.revoke(lease_id)
        ((key_value,),) = (await store.transact((), [Read(key)])).reads
        assert key_value.value == b"2" and key_value.lease_id == 0

    run(scenario)


def test_a_value_of_the_largest_size_goes_through(run: Run) -> None:
    async def scenario(world: World) -> None:
        store, key, value = world.store(), f"{world.cluster}/a", bytes(range(256)) * (VALUE_BYTES // 256)
        outcome = await store.transact([RevisionIs(key, 0)], [Put(key, value), Read(key)])
        assert outcome.succeeded and outcome.reads[0][0].value == value
        await store.transact((), [Put(key, b"")])

    run(scenario)


@asynccontextmanager
async def watched(store: Store, prefix: str) -> AsyncIterator[list[KeyValue]]:
    """Yield the entries below a prefix, which are read again only when the watch reports a change."""
    outcome = await store.transact((), [Read(prefix, is_prefix=True)])
    entries = outcome.reads[0]

    async def wait() -> None:
        after = outcome.revision
        while True:
            await store.wait(prefix, after, 3_600)
            # A change made meanwhile is in this read, and no wait reports it.
            now = await store.transact((), [Read(prefix, is_prefix=True)])
            entries[:], after = now.reads[0], now.revision

    task = asyncio.create_task(wait())
    try:
        yield entries
    finally:
        task.cancel()
        await asyncio.wait([task])


async def has_values(entries: list[KeyValue], *values: bytes) -> bool:
    """Check whether entries have exactly these values."""
    return [entry.value for entry in entries] == list(values)


def test_a_watch_reports_puts_and_leases_that_end(run: Run) -> None:
    async def scenario(world: World) -> None:
        prefix, one, other = f"{world.cluster}/", world.store(), world.store()
        async with watched(one, prefix) as entries:
            for value in (b"1", b"2", b"3"):
                lease_id, _ = await other.grant(60)
                await other.transact((), [Put(prefix + "a", value, lease_id)])
                await wait_until(partial(has_values, entries, value))
                await other.revoke(lease_id)
                await wait_until(partial(has_values, entries))

    run(scenario)


def test_many_waits_share_one_watch_request(run: Run) -> None:
    async def scenario(world: World) -> None:
        store = world.store()
        assert isinstance(store, EtcdStore)
        prefix = f"{world.cluster}/"
        after = (await store.transact((), [Read(prefix, is_prefix=True)])).revision
        before = store.requests
        await asyncio.gather(*(store.wait(prefix, after + 10**6, 0.2) for _ in range(20)))
        for _ in range(5):
            await store.wait(prefix, after + 10**6, 0.01)
        assert store.requests == before + 1

    run(scenario)


def test_a_watch_that_reports_nothing_is_opened_at_another_member(etcd: EtcdCluster) -> None:
    """A member that answers requests but reports no changes, like a member that is cut off from the others."""

    async def scenario() -> None:
        async with world_of(etcd.endpoints) as world, deaf_member(etcd.endpoints[0]) as deaf:
            store = EtcdStore(EtcdAccess([deaf, etcd.endpoints[1]]), ttl_ms=20_000)
            world.stores.append(store)
            other, prefix = world.store(), f"{world.cluster}/"
            after = (await store.transact((), [Read(prefix, is_prefix=True)])).revision
            await store.wait(prefix, after, 0.05)
            await other.transact((), [Put(prefix + "a", b"")])
            await store.wait(prefix, after, 0.05)  # neither reported nor known
            assert store._members.preferred == deaf
            await store.transact((), [Read(prefix, is_prefix=True)])
            await store.wait(prefix, after, 0.05)  # known by the read, and still not reported
            assert store._members.preferred == etcd.endpoints[1]
            async with watched(store, prefix) as entries:
                await other.transact((), [Put(prefix + "a", b"again")])
                await wait_until(partial(has_values, entries, b"again"))

    asyncio.run(scenario())


@asynccontextmanager
async def deaf_member(endpoint: str) -> AsyncIterator[str]:
    """Forward requests to a member, but stop each watch after its first line."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    tasks = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member_reader, member_writer = await asyncio.open_connection(host, int(port))
        is_watch = False

        async def forward_requests() -> None:
            nonlocal is_watch
            while part := await reader.read(65_536):
                is_watch |= b"/v3/watch" in part
                member_writer.write(part)

        async def forward_answers() -> None:
            parts = 0
            while part := await member_reader.read(65_536):
                parts += 1
                if not is_watch or parts == 1:
                    writer.write(part)

        directions = [asyncio.create_task(forward_requests()), asyncio.create_task(forward_answers())]
        tasks.update(directions)
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        for open_writer in (member_writer, writer):
            open_writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in tasks:
            task.cancel()


def test_a_loss_of_etcd_s_data_leaves_no_wait_that_ends_at_once(tmp_path: Path) -> None:
    """Its revision goes back: below the revision that the watch has reported, and that of the keys that were read."""
    with EtcdCluster(tmp_path / "etcd", size=1) as etcd:

        async def scenario() -> None:
            async with world_of(etcd.endpoints) as world:
                store, other, prefix = world.store(), world.store(), f"{world.cluster}/"
                for number in range(20):
                    outcome = await store.transact(
                        (), [Put(prefix + "a", bytes([number])), Read(prefix + "a")]
                    )
                await store.wait(prefix, 0, BOUND_S)  # until the watch reports
                await asyncio.to_thread(wipe, etcd)
                await wait_until(lambda: other.transact((), [Put(prefix + "a", b"again")]))
                now = await store.transact((), [Read(prefix, is_prefix=True)])
                assert now.revision < outcome.revision
                await store.wait(prefix, now.revision - 1, BOUND_S)  # until a new watch reports
                async with watched(store, prefix) as entries:
                    requests = store.requests
                    for value in (b"1", b"2", b"3"):
                        await other.transact((), [Put(prefix + "a", value)])
                        await wait_until(partial(has_values, entries, value))
                    # A read for each change, and one that found no change. A watch may have been opened.
                    assert store.requests <= requests + 5

        asyncio.run(scenario())


def wipe(etcd: EtcdCluster) -> None:
    """Start all members again with empty folders."""
    for member in etcd.members:
        member.kill()
        shutil.rmtree(etcd.folder / member.name)
        member.start()
    etcd.wait_ready()


def test_waiting_without_members_ends_by_its_timeout() -> None:
    async def scenario() -> None:
        store = EtcdStore(EtcdAccess([f"http://127.0.0.1:{free_ports(1)[0]}"]), ttl_ms=400)
        for _ in range(3):
            await store.wait("tb/", 0, 0.1)
        with pytest.raises(Unavailable):
            await store.transact((), [Read("tb/", is_prefix=True)])
        await store.close()

    asyncio.run(scenario())
