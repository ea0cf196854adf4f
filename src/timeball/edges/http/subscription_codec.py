"""Push subscriptions as JSON. No I/O."""

from __future__ import annotations

from typing import Literal

import msgspec

from timeball.broker.registry.push_subscriptions import TIMEOUT_MS, FilterKind, PushSubscription
from timeball.model.time_parsing import delay_ms
from timeball.monitoring.figures import PushFigures

State = Literal["delivering", "failing", "paused", "gone"]


class Subscribing(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A subscription to create or to replace. `rotate_secret` replaces the secret of an existing subscription."""

    topic: str
    group: str
    url: str
    filter: str = "*"
    filter_type: FilterKind = "tag"
    in_flight_max: int = 16
    rate_per_s: float | None = None
    timeout: str = f"{TIMEOUT_MS}ms"
    rotate_secret: bool = False

    def to_subscription(self) -> PushSubscription:
        """Convert the request to the broker's type. Raises InvalidDelay."""
        return PushSubscription(
            topic=self.topic,
            group=self.group,
            url=self.url,
            filter=self.filter,
            filter_type=self.filter_type,
            in_flight_max=self.in_flight_max,
            rate_per_s=self.rate_per_s,
            timeout_ms=delay_ms(self.timeout, "timeout"),
        )


class Subscribed(msgspec.Struct, kw_only=True):
    """A subscription, and its figures since the broker's start. `secret` is only shown when it is created."""

    name: str
    topic: str
    group: str
    url: str
    filter: str
    filter_type: FilterKind
    in_flight_max: int
    rate_per_s: float | None
    timeout: str
    state: State
    in_flight: int = 0
    delivered: int = 0  # requests with an answer 2xx
    failed: int = 0  # requests without an answer 2xx
    failures_in_row: int = 0
    last_failure: str | None = None
    secret: str | msgspec.UnsetType = msgspec.UNSET


class SubscribedMany(msgspec.Struct):
    """Subscriptions, ordered by name."""

    subscriptions: list[Subscribed]


def show_subscription(
    name: str, subscription: PushSubscription, figures: PushFigures | None, secret: str | None = None
) -> Subscribed:
    """Build the answer that shows a subscription and its state."""
    state: State = "delivering"
    if subscription.paused:
        state = "gone" if subscription.paused_by == "receiver" else "paused"
    elif figures is not None and figures.is_held:
        state = "failing"
    return Subscribed(
        name=name, topic=subscription.topic, group=subscription.group, url=subscription.url,
        filter=subscription.filter, filter_type=subscription.filter_type,
        in_flight_max=subscription.in_flight_max, rate_per_s=subscription.rate_per_s,
        timeout=_format_timeout(subscription.timeout_ms), state=state,
        in_flight=figures.in_flight if figures is not None else 0,
        delivered=figures.delivered if figures is not None else 0,
        failed=figures.failed if figures is not None else 0,
        failures_in_row=figures.failures if figures is not None else 0,
        last_failure=(figures.last_failure or None) if figures is not None else None,
        secret=msgspec.UNSET if secret is None else secret,
    )  # fmt: skip


def _format_timeout(timeout_ms: int) -> str:
    return f"{timeout_ms}ms" if timeout_ms % 1_000 else f"{timeout_ms // 1_000}s"
