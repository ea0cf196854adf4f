"""The Store on etcd: transactions and leases through the JSON gateway, and one watch that only serves as a hint.

A watch begins at the present revision, and callers find earlier changes by reading. So the watch needs no revision to
resume from, and a compaction of etcd cannot break it. An etcd member that is cut off from the others keeps its watches
open without reporting anything. So a watch counts as dead if a read has returned a revision that the watch has not
reported during a whole wait. It is then opened at another member.
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
        self._watch_task: asyncio.Task[None] | None = None
        self._prefix = ""
        self._watched_member = ""  # the member at which the watch is open
        self._changed = asyncio.Condition()
        self._reported_revision = 0  # newest revision that the watch has reported
        self._read_revision = 0  # newest revision of a key among those that transactions have read

    @property
    def requests(self) -> int:
        """The number of requests sent."""
        return self._members.requests

    async def transact(
        self, when: Sequence[Comparison], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> Outcome:
        """Carry out `then` if all of `when` hold, else `otherwise`. Raises LeaseLost for a Put with an ended lease."""
        body = codec.txn_body(when, then, otherwise)
        outcome = await self._members.ask(
            codec.TXN, body, lambda answer: codec.read_txn(answer, then, otherwise)
        )
        for key_values in outcome.reads:
            self._read_revision = max(
                [self._read_revision, *(key_value.revision for key_value in key_values)]
            )
        return outcome

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        """Request a new lease. Returns its id and the granted TTL in seconds."""
        # If the answer is lost, a repeated request leaves an unused lease, which ends by itself.
        return await self._members.ask(codec.GRANT, codec.lease_body(0, ttl_s=ttl_s), codec.read_grant)

    async def renew(self, lease_id: int) -> int:
        """Renew a lease. Returns the granted TTL in seconds. Raises LeaseLost."""
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
        """Read how many seconds of a lease are left. None when it has ended."""
        return await self._members.ask(
            codec.TIME_TO_LIVE, codec.lease_body(lease_id), codec.read_time_to_live
        )

    async def wait(self, prefix: str, after: int, timeout_s: float) -> None:
        """Wait until a key with this prefix may have changed after a revision, or until the timeout."""
        assert self._prefix in ("", prefix), "a store watches one prefix"
        self._prefix = prefix
        if self._watch_task is None:
            self._watch_task = asyncio.create_task(self._watch())
        elif self._watch_task.done():
            self._watch_task.result()  # raises: the task only ends by an error in this program
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._reported_revision > after)
        except TimeoutError:
            if self._reported_revision < self._read_revision and self._watched_member:
                self._members.leave(self._watched_member)
                await self._end_watch()  # the next wait opens a new one

    async def close(self) -> None:
        """Close the watch and the connections."""
        await self._end_watch()
        await self._members.close()

    async def _watch(self) -> None:
        """Watch the prefix for ever, at the next member after each failure."""
        is_failing = False
        while True:
            endpoint = self._watched_member = self._members.preferred
            try:
                revisions = self._members.follow(
                    endpoint, codec.WATCH, codec.watch_body(self._prefix), codec.read_watch
                )
                async with aclosing(revisions):
                    async for revision in revisions:
                        is_failing = False
                        async with self._changed:
                            self._reported_revision = max(self._reported_revision, revision)
                            self._changed.notify_all()
            except (BadAnswer, SetupError) as error:
                if not is_failing:
                    logger.info("watch ended endpoint=%s reason=%s", endpoint, error)
                is_failing = True
            self._members.leave(endpoint)
            await asyncio.sleep(WATCH_PAUSE_S)

    async def _end_watch(self) -> None:
        task, self._watch_task = self._watch_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


# Creates the coordinator that the settings describe, for nodes and for commands.


def create_coordinator(settings: Settings, clock: Clock) -> Coordinator:
    """Create the coordinator for --cluster, --node and --etcd. Raises SetupError."""
    endpoints = [endpoint.strip() for endpoint in settings.etcd.split(",") if endpoint.strip()]
    tls = None
    if any(endpoint.startswith("https") for endpoint in endpoints):
        tls = load_client_tls(settings.etcd_ca, settings.etcd_cert, settings.etcd_key)
    password = ""
    if settings.etcd_user:
        secret = read_secret(settings.etcd_password_file, "--etcd-password-file", forbidden_mode=OTHERS)
        password = secret.decode().strip()
    access = EtcdAccess(endpoints, tls, settings.etcd_user, password)
    store = EtcdStore(access, ttl_ms=settings.lease_ttl_ms)
    return KeyCoordinator(store, clock, cluster=settings.cluster, node=settings.node)
