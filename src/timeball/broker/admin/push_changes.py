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
        self._kept, self._allowed = push_subscriptions, Allowed.parse(settings.push_allow)
        self._watcher: Callable[[str], None] | None = None

    def watch(self, changed: Callable[[str], None]) -> None:
        """Call `changed` with the name of each subscription that changes from now on. There is only one watcher."""
        self._watcher = changed

    def all(self, caller: Caller) -> dict[str, PushSubscription]:
        """List the subscriptions that the caller may look at."""
        self._policy.allow(caller, Verb.LOOK)
        return {name: each for name, each in self._kept.all().items() if self._may_look(each, caller)}

    def get(self, name: str, caller: Caller) -> PushSubscription:
        """Return a subscription. Raises NotFound, also if the caller may not look at it."""
        self._policy.allow(caller, Verb.LOOK)
        found = self._kept.get(name)
        if not self._may_look(found, caller):
            # The same error in both cases, so it does not reveal names.
            raise NotFound(f"no subscription {name!r}")
        return found

    async def put(
        self, name: str, wanted: PushSubscription, caller: Caller, *, rotates: bool = False
    ) -> PushPut:
        """Create or change a subscription. A change keeps its paused state.

        `rotates` creates a new secret. Raises InvalidMessage, InvalidFilter, OutOfRange, OverLimit, RequestError.
        """
        self._policy.allow(caller, Verb.ADMIN)
        self._allowed.check_url(wanted.url)
        # Refuse an invalid filter before any change.
        compile_filter(wanted.filter, EXPRESSION_TYPES[wanted.filter_type])
        self._check_same_filter(name, wanted)
        known = self._kept.find(name)
        if known is not None:
            # Otherwise a change of the URL would resume a subscription that an administrator has paused.
            wanted = msgspec.structs.replace(wanted, paused=known.paused, paused_by=known.paused_by)
        # the new secret, or None
        made = self._kept.put(name, wanted, self._clock.now_ms(), rotates=rotates)
        await self._changed(name)
        return PushPut(wanted, known is None, None if made is None else secret_text(made))

    async def delete(self, name: str, caller: Caller) -> None:
        """Delete a subscription. Its consumer group and the group's offsets stay. Raises NotFound."""
        self._policy.allow(caller, Verb.ADMIN)
        self._kept.remove(name)
        await self._changed(name)

    async def pause(
        self, name: str, caller: Caller, by: Literal["operator", "receiver"] = "operator"
    ) -> PushSubscription:
        """Stop sending messages for a subscription. Raises NotFound."""
        self._policy.allow(caller, Verb.ADMIN)
        return await self._set(name, paused=True, paused_by=by)

    async def resume(self, name: str, caller: Caller) -> PushSubscription:
        """Resume sending, without waiting for a receiver that failed before. Raises NotFound."""
        self._policy.allow(caller, Verb.ADMIN)
        return await self._set(name, paused=False, paused_by="operator")

    async def _set(
        self, name: str, *, paused: bool, paused_by: Literal["operator", "receiver"]
    ) -> PushSubscription:
        changed = msgspec.structs.replace(self._kept.get(name), paused=paused, paused_by=paused_by)
        self._kept.put(name, changed, self._clock.now_ms())
        await self._changed(name)
        return changed

    async def _changed(self, name: str) -> None:
        if self._watcher is not None:
            # The watcher reads the change from memory at once; the caller waits until it is durable.
            self._watcher(name)
        await self._writer.flushed()

    def _check_same_filter(self, name: str, wanted: PushSubscription) -> None:
        """Raise RequestError if another subscription of this group and topic has a different filter."""
        for other, each in self._kept.all().items():
            is_shared = other != name and (each.group, each.topic) == (wanted.group, wanted.topic)
            # Each subscription would skip, for the whole group, messages that only the other one selects.
            if is_shared and (each.filter, each.filter_type) != (wanted.filter, wanted.filter_type):
                raise RequestError(
                    f"subscription {other!r} of the same group has the filter {each.filter[:200]!r} "
                    f"({each.filter_type}): give both the same, or this one another group"
                )

    def _may_look(self, subscription: PushSubscription, caller: Caller) -> bool:
        topic, group = subscription.topic, subscription.group
        return self._policy.allows(caller, Verb.LOOK, topic=topic, group=group)
