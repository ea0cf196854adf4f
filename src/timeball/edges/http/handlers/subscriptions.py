"""Paths of push subscriptions: create, change, look at, pause, resume and delete.

The push edge delivers the messages.
"""

from __future__ import annotations

from collections.abc import Mapping

from timeball.broker.registry.push_subscriptions import PushSubscription
from timeball.broker.service import Broker
from timeball.edges.http.answers_codec import SubscriptionDeleted
from timeball.edges.http.problems import Answer
from timeball.edges.http.requests import Call, Paths, check_no_body, read
from timeball.edges.http.subscription_codec import SubscribedMany, Subscribing, subscribed
from timeball.model.access import Verb
from timeball.monitoring.push_figures import PushFigures


class Subscriptions:
    """The handlers, by path and method. Belongs to the event loop."""

    def __init__(self, broker: Broker, figures: Mapping[str, PushFigures]) -> None:
        self._push, self._policy, self._figures = broker.push, broker.policy, figures
        one = "/v1/subscriptions/{name}"
        self.paths: Paths = {
            "/v1/subscriptions": {"GET": self._list},
            one: {"GET": self._get, "PUT": self._put, "DELETE": self._delete},
            f"{one}/pause": {"POST": self._pause},
            f"{one}/resume": {"POST": self._resume},
        }

    async def _list(self, call: Call) -> Answer:
        kept = self._push.all(call.caller)
        return Answer(
            200,
            SubscribedMany([subscribed(name, one, self._figures.get(name)) for name, one in kept.items()]),
        )

    async def _get(self, call: Call) -> Answer:
        return self._shown(call, self._push.get(call.path["name"], call.caller))

    async def _put(self, call: Call) -> Answer:
        name = call.path["name"]
        wanted: Subscribing = await read(call, Subscribing, self._policy, Verb.ADMIN)
        put = await self._push.put(name, wanted.wanted(), call.caller, rotates=wanted.rotate_secret)
        shown = subscribed(name, put.subscription, self._figures.get(name), put.secret)
        return Answer(201 if put.is_new else 200, shown)

    async def _delete(self, call: Call) -> Answer:
        await self._push.delete(call.path["name"], call.caller)
        return Answer(200, SubscriptionDeleted(call.path["name"]))

    async def _pause(self, call: Call) -> Answer:
        await check_no_body(call, self._policy, Verb.ADMIN)
        return self._shown(call, await self._push.pause(call.path["name"], call.caller))

    async def _resume(self, call: Call) -> Answer:
        await check_no_body(call, self._policy, Verb.ADMIN)
        return self._shown(call, await self._push.resume(call.path["name"], call.caller))

    def _shown(self, call: Call, kept: PushSubscription) -> Answer:
        name = call.path["name"]
        return Answer(200, subscribed(name, kept, self._figures.get(name)))
