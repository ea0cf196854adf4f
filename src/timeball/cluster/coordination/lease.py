"""The lease of this node: renewed four times per TTL, and requested anew when it has ended.

The end of the lease is computed on this node: boot clock when the last successful renewal was *sent*, plus the
granted TTL, minus a margin. The coordinator counts from when it received the renewal, so it ends the lease later.

A failed renewal is repeated. Meanwhile this node may consider the lease ended, and a later renewal makes it valid
again: when etcd elects a new leader of its own, it restarts all leases with their whole TTL.
"""

from __future__ import annotations

import asyncio
import logging

from timeball.cluster.coordination.coordinator import Coordinator, Lease, Node
from timeball.io.clock import Clock
from timeball.model.errors import LeaseLost, SetupError, Unavailable

RENEWALS_PER_TTL = 4  # two renewals may fail before a holder stops
RENEWAL_RETRY_S = 0.05  # pause after no answer; short, because the coordinator has already retried until its deadline
OPERATOR_RETRY_S = 1.0  # pause after an error that only an operator can correct

logger = logging.getLogger(__name__)


class HeldLease:
    """A lease and the node registered with it, kept while `run` runs. Belongs to the event loop."""

    def __init__(self, coordinator: Coordinator, clock: Clock, node: Node, ttl_ms: int) -> None:
        self._coordinator, self._clock = coordinator, clock
        self._node, self._ttl_ms = node, ttl_ms
        self._lease: Lease | None = None
        self._is_registered = False
        self._last_failure = ""

    @property
    def lease(self) -> Lease | None:
        """The lease if it is valid now by this node's clock, else None."""
        lease = self._lease
        return lease if lease is not None and self._clock.boot_ms() < lease.ends_ms else None

    async def run(self) -> None:
        """Keep the lease valid until cancelled."""
        while True:  # noqa: ASYNC110 (time passes, no event comes)
            await asyncio.sleep(await self.renew_or_grant())

    async def renew_or_grant(self) -> float:
        """Renew or request the lease, and register the node with a new one. Returns the seconds until the next call."""
        try:
            await self._renew()
        except (Unavailable, SetupError) as error:
            if not self._last_failure:
                logger.warning("lease not renewed reason=%s", error)
            self._last_failure = str(error)
            return OPERATOR_RETRY_S if isinstance(error, SetupError) else RENEWAL_RETRY_S
        if self._last_failure:
            logger.info("lease renewed again")
        self._last_failure = ""
        assert self._lease is not None
        # Use the granted TTL: with etcd's default timings it is 2 s when 1 s was requested.
        next_ms = self._lease.sent_ms + self._lease.ttl_ms // RENEWALS_PER_TTL
        return max(next_ms - self._clock.boot_ms(), 0) / 1_000

    async def release(self) -> None:
        """End the lease at once, so that other nodes need not wait for its end."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await self._coordinator.revoke(lease)

    async def _renew(self) -> None:
        if self._lease is not None:
            try:
                self._lease = await self._coordinator.renew(self._lease)
            except LeaseLost:
                logger.warning("lease lost lease=%d", self._lease.id)
                self._lease = None
        if self._lease is None:
            self._is_registered = False
            self._lease = await self._coordinator.grant(self._ttl_ms)
        if not self._is_registered:
            await self._coordinator.register(self._node, self._lease)
            self._is_registered = True
