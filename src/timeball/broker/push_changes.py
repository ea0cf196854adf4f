"""What operators change of push subscriptions, and who is told of it.

An administrator changes them; an account that may look at a subscription's topic and group sees it, never its secret.
What has changed is durable when a verb returns. The edge that delivers watches: it is told the name each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from timeball.access import Caller, Verb
from timeball.addresses import Allowed
from timeball.broker.components import Components
from timeball.broker.filters.compiler import SQL92, TAG, compile_filter
from timeball.broker.policy import Policy
from timeball.broker.registry.push_subscriptions import FilterKind, PushSubscription, secret_text
from timeball.errors import NotFound, RequestError

EXPRESSION_TYPES: dict[FilterKind, str] = {"tag": TAG, "sql": SQL92}


class PushPut(NamedTuple):
    """A subscription that was put. `secret`: the one made for it, as text; it is not shown again."""

    subscription: PushSubscription
    is_new: bool
    secret: str | None


class PushChanges:
    """The verbs. Belongs to the event loop."""

    def __init__(self, parts: Components, policy: Policy) -> None:
        self._parts, self._policy = parts, policy
        self._kept, self._allowed = parts.push_subscriptions, Allowed.parse(parts.settings.push_allow)
        self._watcher: Callable[[str], None] | None = None

    def watch(self, changed: Callable[[str], None]) -> None:
        """Call this with the name of each subscription that is changed from now on; one may watch."""
        self._watcher = changed

    def all(self, caller: Caller) -> dict[str, PushSubscription]:
        """Return the subscriptions that the caller may look at."""
        self._policy.allow(caller, Verb.LOOK)
        return {name: each for name, each in self._kept.all().items() if self._may_look(each, caller)}

    def get(self, name: str, caller: Caller) -> PushSubscription:
        """Return one; raise NotFound, also for one that the caller may not look at."""
        self._policy.allow(caller, Verb.LOOK)
        found = self._kept.get(name)
        if not self._may_look(found, caller):
            raise NotFound(f"no subscription {name!r}")  # tells a stranger nothing of names
        return found

    async def put(
        self, name: str, wanted: PushSubscription, caller: Caller, *, rotates: bool = False
    ) -> PushPut:
        """Make a subscription or change one, which stays paused or not as it is.

        `rotates`: it gets another secret. Raises InvalidMessage, InvalidFilter, OutOfRange, OverLimit, RequestError.
        """
        self._policy.allow(caller, Verb.ADMIN)
        self._allowed.check_url(wanted.url)
        compile_filter(wanted.filter, EXPRESSION_TYPES[wanted.filter_type])
        self._check_same_filter(name, wanted)
        known = self._kept.find(name)
        if known is not None:
            # Else a change of the URL would start what an operator has stopped.
            wanted = msgspec.structs.replace(wanted, paused=known.paused, paused_by=known.paused_by)
        made = self._kept.put(name, wanted, self._parts.clock.now_ms(), rotates=rotates)
        await self._changed(name)
        return PushPut(wanted, known is None, None if made is None else secret_text(made))

    async def delete(self, name: str, caller: Caller) -> None:
        """Delete a subscription; its group, and how far that has come, stay. Raise NotFound."""
        self._policy.allow(caller, Verb.ADMIN)
        self._kept.remove(name)
        await self._changed(name)

    async def pause(
        self, name: str, caller: Caller, by: Literal["operator", "receiver"] = "operator"
    ) -> PushSubscription:
        """Send nothing more for a subscription; raise NotFound."""
        self._policy.allow(caller, Verb.ADMIN)
        return await self._set(name, paused=True, paused_by=by)

    async def resume(self, name: str, caller: Caller) -> PushSubscription:
        """Go on, also where a receiver that failed would be waited for; raise NotFound."""
        self._policy.allow(caller, Verb.ADMIN)
        return await self._set(name, paused=False, paused_by="operator")

    async def _set(
        self, name: str, *, paused: bool, paused_by: Literal["operator", "receiver"]
    ) -> PushSubscription:
        changed = msgspec.structs.replace(self._kept.get(name), paused=paused, paused_by=paused_by)
        self._kept.put(name, changed, self._parts.clock.now_ms())
        await self._changed(name)
        return changed

    async def _changed(self, name: str) -> None:
        if self._watcher is not None:
            self._watcher(name)  # acts on memory at once; the caller is answered when it is on disk
        await self._parts.writer.flushed()

    def _check_same_filter(self, name: str, wanted: PushSubscription) -> None:
        """Raise RequestError when another subscription shares the messages of this group and wants others of them."""
        for other, each in self._kept.all().items():
            is_shared = other != name and (each.group, each.topic) == (wanted.group, wanted.topic)
            # Each would pass over, for the whole group, what only the other wants.
            if is_shared and (each.filter, each.filter_type) != (wanted.filter, wanted.filter_type):
                raise RequestError(
                    f"subscription {other!r} of the same group has the filter {each.filter[:200]!r} "
                    f"({each.filter_type}): give both the same, or this one another group"
                )

    def _may_look(self, subscription: PushSubscription, caller: Caller) -> bool:
        topic, group = subscription.topic, subscription.group
        return self._policy.allows(caller, Verb.LOOK, topic=topic, group=group)
