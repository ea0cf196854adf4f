"""The Store on etcd: transactions and leases through the JSON gateway, and one watch that only serves as a hint.

Each watch begins at the present revision, and its reader finds earlier changes by reading. So the watch needs no
revision to resume from, and a compaction of etcd cannot break it. A member that is cut off from the others keeps its
watches open without reporting anything. So when a watch has not reported, for a whole wait, a revision that a read
has seen, it is considered dead and opened at another member.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing

from timeball.cluster.coordination import etcd_codec as codec
from timeball.cluster.coordination.coordinator import Coordinator
from timeball.cluster.coordination.etcd_codec import BadAnswer
from timeball.cluster.coordination.etcd_members import EtcdAccess, Members
from timeball.cluster.coordination.keys import KeyCoordinator
from timeball.cluster.coordination.store import Comparison, Operation, Outcome
from timeball.io.clock import Clock
from timeball.io.files import read_secret
from timeball.io.security import OTHERS, load_client_tls
from timeball.model.config import Settings
from timeball.model.errors import LeaseLost, SetupError

WATCH_PAUSE_S = 0.2  # before a watch is opened again

logger = logging.getLogger(__name__)


class EtcdStore:
    """A Store. Belongs to the event loop."""

    def __init__(self, access: EtcdAccess, *, ttl_ms: int) -> None:
        # Attempts are short, because a request that hangs while etcd elects its own leader goes on hanging after the
        # election. A lease is renewed after a quarter of its TTL, so four attempts fit in before its holder stops.
        self._members = Members(access, attempt_s=ttl_ms / 8_000, deadline_s=ttl_ms / 1_000)
        self._watching: asyncio.Task[None] | None = None
        self._prefix = ""
        self._watched = ""  # the member at which the watch is open
        self._changed = asyncio.Condition()
        self._told = 0  # newest revision that the watch has reported
        self._read = 0  # newest revision of a key that a transaction has read

    @property
    def requests(self) -> int:
        """The number of requests sent."""
        return self._members.requests

    async def transact(
        self, when: Sequence[Comparison], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> Outcome:
        """Carry out one of two lists of operations. Raises LeaseLost when a key is put with a lease that has ended."""
        body = codec.txn_body(when, then, otherwise)
        outcome = await self._members.ask(
            codec.TXN, body, lambda answer: codec.read_txn(answer, then, otherwise)
        )
        for found in outcome.reads:
            self._read = max([self._read, *(each.revision for each in found)])
        return outcome

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        """Request a new lease. Return its id and the seconds that were granted."""
        # If the answer is lost, a repeated request leaves an unused lease, which ends by itself.
        return await self._members.ask(codec.GRANT, codec.lease_body(0, ttl_s=ttl_s), codec.read_grant)

    async def renew(self, lease_id: int) -> int:
        """Renew a lease and return the seconds that were granted. Raises LeaseLost."""
        body = codec.lease_body(lease_id)
        return await self._members.ask(
            codec.KEEPALIVE, body, lambda answer: codec.read_renewal(answer, lease_id)
        )

    async def revoke(self, lease_id: int) -> None:
        """End a lease, if it has not ended yet, and delete its keys."""
        try:
            await self._members.ask(codec.REVOKE, codec.lease_body(lease_id), lambda answer: None)
        except LeaseLost:
            pass

    async def time_to_live(self, lease_id: int) -> int | None:
        """Return the seconds that are left of a lease, None when it has ended."""
        return await self._members.ask(
            codec.TIME_TO_LIVE, codec.lease_body(lease_id), codec.read_time_to_live
        )

    async def wait(self, prefix: str, after: int, timeout_s: float) -> None:
        """Wait until a key with this prefix may have changed after a revision, or until the timeout."""
        assert self._prefix in ("", prefix), "a store watches one prefix"
        self._prefix = prefix
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        elif self._watching.done():
            self._watching.result()  # raises: the task only ends by an error in this program
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._told > after)
        except TimeoutError:
            if self._told < self._read and self._watched:
                self._members.leave(self._watched)
                await self._end_watch()  # the next wait opens a new one

    async def close(self) -> None:
        """Close the watch and the connections."""
        await self._end_watch()
        await self._members.close()

    async def _watch(self) -> None:
        is_failing = False
        while True:
            endpoint = self._watched = self._members.preferred
            try:
                told = self._members.follow(
                    endpoint, codec.WATCH, codec.watch_body(self._prefix), codec.read_watch
                )
                async with aclosing(told):
                    async for revision in told:
                        is_failing = False
                        async with self._changed:
                            self._told = max(self._told, revision)
                            self._changed.notify_all()
            except (BadAnswer, SetupError) as error:
                if not is_failing:
                    logger.info("watch ended endpoint=%s reason=%s", endpoint, error)
                is_failing = True
            self._members.leave(endpoint)
            await asyncio.sleep(WATCH_PAUSE_S)

    async def _end_watch(self) -> None:
        task, self._watching = self._watching, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


# Creates the coordinator that the settings describe, for nodes and for commands.


def coordinator_of(settings: Settings, clock: Clock) -> Coordinator:
    """Create the coordinator for --cluster, --node and --etcd. Raises SetupError."""
    endpoints = [each.strip() for each in settings.etcd.split(",") if each.strip()]
    tls = None
    if any(each.startswith("https") for each in endpoints):
        tls = load_client_tls(settings.etcd_ca, settings.etcd_cert, settings.etcd_key)
    password = ""
    if settings.etcd_user:
        secret = read_secret(settings.etcd_password_file, "--etcd-password-file", forbidden_mode=OTHERS)
        password = secret.decode().strip()
    access = EtcdAccess(endpoints, tls, settings.etcd_user, password)
    store = EtcdStore(access, ttl_ms=settings.lease_ttl_ms)
    return KeyCoordinator(store, clock, cluster=settings.cluster, node=settings.node)
