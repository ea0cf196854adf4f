"""Changes of push subscriptions, and notifications about them.

Only administrators change subscriptions. An account that may look at the topic and group of a subscription can see it,
but never its secret. A change is durable when the operation returns. The edge that delivers messages registers with
`watch`, and receives the name of each changed subscription.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from timeball.broker.filters.compiler import SQL92, TAG, compile_filter
from timeball.broker.policy import Policy
from timeball.broker.registry.push_subscriptions import (
    FilterKind,
    PushSubscription,
    PushSubscriptions,
    secret_text,
)
from timeball.io.clock import SchedulerClock
from timeball.log.writer import LogWriter
from timeball.model.access import Caller, Verb
from timeball.model.addresses import Allowed
from timeball.model.config import Settings
from timeball.model.errors import NotFound, RequestError

EXPRESSION_TYPES: dict[FilterKind, str] = {"tag": TAG, "sql": SQL92}


class PushPut(NamedTuple):
    """The result of `put`. `secret` is the new secret as text, if one was created. It is not shown again."""

    subscription: PushSubscription
    is_new: bool
    secret: str | None


class PushChanges:
    """The operations on push subscriptions. Belongs to the event loop."""

    def __init__(
        self,
        policy: Policy,
        *,
        settings: Settings,
        clock: SchedulerClock,
        writer: LogWriter,
        push_subscriptions: PushSubscriptions,
    ) -> None:
        self._policy = policy
        self._clock, self._writer = clock, writer
        self._subscriptions, self._allowed_urls = push_subscriptions, Allowed.parse(settings.push_allow)
        self._watcher: Callable[[str], None] | None = None

    def watch(self, changed: Callable[[str], None]) -> None:
        """Call `changed` with the name of each subscription that changes from now on. There is only one watcher."""
        self._watcher = changed

    def all(self, caller: Caller) -> dict[str, PushSubscription]:
        """List the subscriptions whose topic and group the caller may look at, by name."""
        self._policy.allow(caller, Verb.LOOK)
        return {
            name: subscription
            for name, subscription in self._subscriptions.all().items()
            if self._may_look(subscription, caller)
        }

    def get(self, name: str, caller: Caller) -> PushSubscription:
        """Find a subscription. Raises NotFound, also if the caller may not look at it."""
        self._policy.allow(caller, Verb.LOOK)
        subscription = self._subscriptions.get(name)
        if not self._may_look(subscription, caller):
            # The same error in both cases, so it does not reveal names.
            raise NotFound(f"no subscription {name!r}")
        return subscription

    async def put(
        self, name: str, wanted: PushSubscription, caller: Caller, *, rotates: bool = False
    ) -> PushPut:
        """Create or change a subscription. A change keeps its paused state.

        `rotates` creates a new secret. Raises InvalidMessage, InvalidFilter, OutOfRange, OverLimit, RequestError.
        """
        self._policy.allow(caller, Verb.ADMIN)
        self._allowed_urls.check_url(wanted.url)
        # Refuse an invalid filter before any change.
        compile_filter(wanted.filter, EXPRESSION_TYPES[wanted.filter_type])
        self._check_same_filter(name, wanted)
        known = self._subscriptions.find(name)
        if known is not None:
            # A change of the URL must not resume a subscription that an administrator has paused.
            wanted = msgspec.structs.replace(wanted, paused=known.paused, paused_by=known.paused_by)
        new_secret = self._subscriptions.put(name, wanted, self._clock.now_ms(), rotates=rotates)
        await self._notify_and_flush(name)
        return PushPut(wanted, known is None, None if new_secret is None else secret_text(new_secret))

    async def delete(self, name: str, caller: Caller) -> None:
        """Delete a subscription. Its consumer group and the group's offsets stay. Raises NotFound."""
        self._policy.allow(caller, Verb.ADMIN)
        self._subscriptions.remove(name)
        await self._notify_and_flush(name)

    async def pause(
        self, name: str, caller: Caller, by: Literal["operator", "receiver"] = "operator"
    ) -> PushSubscription:
        """Stop sending messages for a subscription. Raises NotFound."""
        self._policy.allow(caller, Verb.ADMIN)
        return await self._set_paused(name, paused=True, paused_by=by)

    async def resume(self, name: str, caller: Caller) -> PushSubscription:
        """Resume sending at once, even if the receiver has just failed. Raises NotFound."""
        self._policy.allow(caller, Verb.ADMIN)
        return await self._set_paused(name, paused=False, paused_by="operator")

    async def _set_paused(
        self, name: str, *, paused: bool, paused_by: Literal["operator", "receiver"]
    ) -> PushSubscription:
        changed = msgspec.structs.replace(self._subscriptions.get(name), paused=paused, paused_by=paused_by)
        self._subscriptions.put(name, changed, self._clock.now_ms())
        await self._notify_and_flush(name)
        return changed

    async def _notify_and_flush(self, name: str) -> None:
        """Notify the watcher of a changed subscription, and wait until the change is durable."""
        if self._watcher is not None:
            # The watcher reads the change from memory at once. The caller waits until it is durable.
            self._watcher(name)
        await self._writer.flushed()

    def _check_same_filter(self, name: str, wanted: PushSubscription) -> None:
        """Raise RequestError if another subscription of this group and topic has a different filter."""
        for other, known in self._subscriptions.all().items():
            is_shared = other != name and (known.group, known.topic) == (wanted.group, wanted.topic)
            # Both share the group's offsets, so each would skip messages that only the other one selects.
            if is_shared and (known.filter, known.filter_type) != (wanted.filter, wanted.filter_type):
                raise RequestError(
                    f"subscription {other!r} of the same group has the filter {known.filter[:200]!r} "
                    f"({known.filter_type}): give both the same, or this one another group"
                )

    def _may_look(self, subscription: PushSubscription, caller: Caller) -> bool:
        """Check whether the caller may look at the topic and the group of a subscription."""
        topic, group = subscription.topic, subscription.group
        return self._policy.allows(caller, Verb.LOOK, topic=topic, group=group)
