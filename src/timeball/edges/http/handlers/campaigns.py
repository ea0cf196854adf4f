"""Campaigns over HTTP: bulk writes to look at, pause, resume and cancel. Spark plans them."""

from __future__ import annotations

from collections.abc import Mapping

from timeball.broker.registry.push_subscriptions import PushSubscription
from timeball.broker.service import Broker
from timeball.edges.http import answers_codec, codec
from timeball.edges.http.answers_codec import SubscriptionDeleted
from timeball.edges.http.problems import Answer
from timeball.edges.http.requests import Call, Handler, Paths, check_no_body, read
from timeball.edges.http.subscription_codec import SubscribedMany, Subscribing, subscribed
from timeball.model.access import Verb
from timeball.model.wire import CampaignChange
from timeball.monitoring.push_figures import PushFigures


class Campaigns:
    """Serves campaigns to accounts that administer. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        one = "/v1/campaigns/{campaign}"
        self.paths: Paths = {
            "/v1/campaigns": {"GET": self._list},
            one: {"GET": self._look},
            f"{one}/pause": {"POST": self._changing("pause")},
            f"{one}/resume": {"POST": self._resume},
            f"{one}/cancel": {"POST": self._changing("cancel")},
        }

    async def _list(self, call: Call) -> Answer:
        found = self._broker.campaigns(caller=call.caller)
        return Answer(200, answers_codec.Campaigns([answers_codec.campaign_shown(one) for one in found]))

    async def _look(self, call: Call) -> Answer:
        (found,) = self._broker.campaigns(call.path["campaign"], call.caller)
        return Answer(200, answers_codec.campaign_shown(found))

    def _changing(self, change: CampaignChange) -> Handler:
        async def changed(call: Call) -> Answer:
            await read(call, codec.Nothing, self._broker.policy, Verb.ADMIN)
            return await self._change(call, change)

        return changed

    async def _resume(self, call: Call) -> Answer:
        request: codec.Resuming = await read(call, codec.Resuming, self._broker.policy, Verb.ADMIN)
        return await self._change(call, "resume", shift=request.shift)

    async def _change(self, call: Call, change: CampaignChange, *, shift: bool = False) -> Answer:
        campaign = call.path["campaign"]
        return Answer(
            200,
            answers_codec.campaign_shown(
                await self._broker.change_campaign(campaign, change, shift=shift, caller=call.caller)
            ),
        )


# Paths of push subscriptions: create, change, look at, pause, resume and delete.
#
# The push edge delivers the messages.


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
