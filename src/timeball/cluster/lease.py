"""Holds this node's lease: renews it four times a TTL, and takes a new one when it has ended.

The end that counts here is ours: the boot clock when the last successful renewal was *sent*, plus the TTL that was
granted, less a margin. The coordinator counts from when it received that renewal, so it lets go later.

A renewal that fails is tried again at the next beat. While it fails the lease may pass its end here, and come back: a
new leader of etcd's own gives all leases their whole time again.
"""

from __future__ import annotations

import asyncio
import logging

from timeball.clock import Clock
from timeball.cluster.coordinator import Coordinator, Lease, Node
from timeball.errors import LeaseLost, SetupError, Unavailable

BEATS = 4  # renewals in a TTL: two may fail before a holder stops
AGAIN_S = 0.05  # after no answer: the coordinator has tried for as long as it may already
MENDED_S = 1.0  # after an error that only an operator can mend

logger = logging.getLogger(__name__)


class HeldLease:
    """A lease and the node registered with it, for as long as `run` runs. Belongs to the event loop."""

    def __init__(self, coordinator: Coordinator, clock: Clock, node: Node, ttl_ms: int) -> None:
        self._coordinator, self._clock = coordinator, clock
        self._node, self._ttl_ms = node, ttl_ms
        self._lease: Lease | None = None
        self._is_registered = False
        self._failing = ""

    @property
    def lease(self) -> Lease | None:
        """Return the lease, if it is valid now by this node's own clock."""
        held = self._lease
        return held if held is not None and self._clock.boot_ms() < held.ends_ms else None

    async def run(self) -> None:
        """Keep the lease until cancelled."""
        while True:  # noqa: ASYNC110 (time passes, no event comes)
            await asyncio.sleep(await self.beat())

    async def beat(self) -> float:
        """Renew or grant once, register where that is missing, and return the seconds until the next time."""
        try:
            await self._renew()
        except (Unavailable, SetupError) as error:
            if not self._failing:
                logger.warning("lease not renewed reason=%s", error)
            self._failing = str(error)
            return MENDED_S if isinstance(error, SetupError) else AGAIN_S
        if self._failing:
            logger.info("lease renewed again")
        self._failing = ""
        assert self._lease is not None
        # Of what was granted: with etcd's default timings that is 2 s where 1 was asked for.
        next_ms = self._lease.sent_ms + self._lease.ttl_ms // BEATS
        return max(next_ms - self._clock.boot_ms(), 0) / 1_000

    async def release(self) -> None:
        """End the lease at once: what it held is free, and others need not wait for its end."""
        held, self._lease = self._lease, None
        if held is not None:
            await self._coordinator.revoke(held)

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
