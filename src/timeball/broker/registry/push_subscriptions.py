"""Push subscriptions: the broker sends the messages of a topic to a URL, on behalf of a consumer group.

The secrets that sign the requests are separate rows, under `secret/`, so that readers of the log outside the broker do
not get them. After a rotation, the old secret signs beside the new one for a day. Receivers can verify the old
signature until they are given the new secret.
"""

from __future__ import annotations

import secrets
from base64 import b64encode
from typing import Literal

import msgspec

from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.broker.registry.topics import check_name
from timeball.model import limits
from timeball.model.errors import NotFound, OutOfRange, OverLimit
from timeball.model.message import SECRET_PREFIX

SECRET_BYTES = 32
# Standard Webhooks: the prefix shows people, and tools that search for leaked secrets, that this is one.
SECRET_MARK = "whsec_"
OVERLAP_MS = limits.DAY_MS  # the previous secret signs for so long after a rotation
TIMEOUT_MS = 15_000  # Standard Webhooks recommends 15 to 30 s

FilterKind = Literal["tag", "sql"]


class PushSubscription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a subscription's META row. Two subscriptions of one group share its messages."""

    topic: str
    group: str
    url: str  # checked again for each connection (addresses.py)
    filter: str = "*"
    filter_type: FilterKind = "tag"
    in_flight_max: int = 16  # requests at once
    rate_per_s: float | None = None  # requests per second; None: unlimited
    timeout_ms: int = TIMEOUT_MS  # of one request, including its response
    paused: bool = False
    paused_by: Literal["operator", "receiver"] = "operator"  # "receiver": it answered 410 (Gone)

    def check(self) -> None:
        """Raise InvalidName or OutOfRange for an invalid topic, group or bound."""
        check_name(self.topic, limits.TOPIC_BYTES_MAX, "topic")
        check_name(self.group, limits.GROUP_BYTES_MAX, "group")
        if not 1 <= self.in_flight_max <= limits.PUSH_IN_FLIGHT_MAX:
            raise OutOfRange(f"in_flight_max {self.in_flight_max}: 1 to {limits.PUSH_IN_FLIGHT_MAX}")
        if not limits.SECOND_MS <= self.timeout_ms <= limits.PUSH_TIMEOUT_MS_MAX:
            least, most = limits.SECOND_MS, limits.PUSH_TIMEOUT_MS_MAX
            raise OutOfRange(f"timeout of {self.timeout_ms} ms: {least} to {most} ms")
        rate = self.rate_per_s
        # Also refuses NaN, because every comparison with it is false.
        if rate is not None and not 0.001 <= rate <= limits.PUSH_RATE_PER_S_MAX:
            raise OutOfRange(f"rate_per_s {rate}: 0.001 to {limits.PUSH_RATE_PER_S_MAX:g}; null for none")


class PushSecrets(msgspec.Struct, frozen=True):
    """The value of the META row with a subscription's secrets. `previous` also signs until `previous_until_ms`."""

    current: bytes
    previous: bytes = b""  # empty before the first rotation
    previous_until_ms: int = 0

    def at(self, now_ms: int) -> list[bytes]:
        """List the secrets that sign at this time, the newest first."""
        return [self.current, self.previous] if now_ms < self.previous_until_ms else [self.current]


def secret_text(secret: bytes) -> str:
    """Format a secret as receivers get it (Standard Webhooks)."""
    return SECRET_MARK + b64encode(secret).decode()


class PushSubscriptions:
    """All subscriptions, by name. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "push", PushSubscription)
        self._secrets = MetaTable(meta, SECRET_PREFIX + "push", PushSecrets)

    def all(self) -> dict[str, PushSubscription]:
        """List all subscriptions, sorted by name."""
        return dict(sorted(self._table.values.items()))

    def get(self, name: str) -> PushSubscription:
        """Find a subscription. Raises NotFound."""
        subscription = self._table.values.get(name)
        if subscription is None:
            raise NotFound(f"no subscription {name[: limits.GROUP_BYTES_MAX]!r}")
        return subscription

    def find(self, name: str) -> PushSubscription | None:
        """Find a subscription, or None if it does not exist."""
        return self._table.values.get(name)

    def secrets(self, name: str, now_ms: int) -> list[bytes]:
        """List the secrets that sign this subscription's requests now, the newest first."""
        return self._secrets.values[name].at(now_ms)

    def put(
        self, name: str, subscription: PushSubscription, now_ms: int, *, rotates: bool = False
    ) -> bytes | None:
        """Append a new or changed subscription. Returns its new secret, or None if it keeps its secret.

        `rotates`: replace the secret. Raises InvalidName, OutOfRange, OverLimit.
        """
        check_name(name, limits.GROUP_BYTES_MAX, "subscription")
        subscription.check()
        current = self._table.values.get(name)
        if current is None and len(self._table.values) >= limits.PUSH_SUBSCRIPTIONS_MAX:
            raise OverLimit(f"{limits.PUSH_SUBSCRIPTIONS_MAX} subscriptions exist; delete some first")
        new_secret = None
        if current is None or rotates:
            new_secret = secrets.token_bytes(SECRET_BYTES)
            new_secrets = PushSecrets(new_secret)
            if current is not None:
                new_secrets = PushSecrets(new_secret, self._secrets.values[name].current, now_ms + OVERLAP_MS)
            # Before the subscription, so that a crash between the two leaves no subscription that cannot sign.
            self._secrets.put([(name, new_secrets)])
        # An unchanged subscription must not add a row to the log.
        if subscription != current:
            self._table.put([(name, subscription)])
        return new_secret

    def remove(self, name: str) -> None:
        """Delete a subscription and its secrets. Raises NotFound."""
        self.get(name)
        self._table.put([(name, None)])
        self._secrets.put([(name, None)])
