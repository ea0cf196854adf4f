"""Campaigns and push subscriptions over HTTP.

A campaign is a bulk write. Spark plans it, and operators can show, pause, resume and cancel it.
"""

from __future__ import annotations

from collections.abc import Mapping

from timeball.broker.registry.push_subscriptions import PushSubscription
from timeball.broker.service import Broker
from timeball.edges.http import answers_codec, codec
from timeball.edges.http.answers_codec import SubscriptionDeleted
from timeball.edges.http.problems import Answer
from timeball.edges.http.requests import Call, Handler, Paths, check_no_body, read_request
from timeball.edges.http.subscription_codec import SubscribedMany, Subscribing, show_subscription
from timeball.model.access import Verb
from timeball.model.wire import CampaignChange
from timeball.monitoring.push_figures import PushFigures


class Campaigns:
    """Serves the paths of campaigns, to accounts that may administer. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        campaign_path = "/v1/campaigns/{campaign}"
        self.paths: Paths = {
            "/v1/campaigns": {"GET": self._list},
            campaign_path: {"GET": self._get_campaign},
            f"{campaign_path}/pause": {"POST": self._handler_for("pause")},
            f"{campaign_path}/resume": {"POST": self._resume},
            f"{campaign_path}/cancel": {"POST": self._handler_for("cancel")},
        }

    async def _list(self, call: Call) -> Answer:
        campaigns = self._broker.campaigns(caller=call.caller)
        return Answer(
            200, answers_codec.Campaigns([answers_codec.show_campaign(campaign) for campaign in campaigns])
        )

    async def _get_campaign(self, call: Call) -> Answer:
        (campaign,) = self._broker.campaigns(call.path["campaign"], call.caller)
        return Answer(200, answers_codec.show_campaign(campaign))

    def _handler_for(self, change: CampaignChange) -> Handler:
        """Build the handler for a change that has no arguments in its body."""

        async def handle(call: Call) -> Answer:
            await read_request(call, codec.Nothing, self._broker.policy, Verb.ADMIN)
            return await self._change(call, change)

        return handle

    async def _resume(self, call: Call) -> Answer:
        request: codec.Resuming = await read_request(call, codec.Resuming, self._broker.policy, Verb.ADMIN)
        return await self._change(call, "resume", shift=request.shift)

    async def _change(self, call: Call, change: CampaignChange, *, shift: bool = False) -> Answer:
        campaign = call.path["campaign"]
        return Answer(
            200,
            answers_codec.show_campaign(
                await self._broker.change_campaign(campaign, change, shift=shift, caller=call.caller)
            ),
        )


# Push subscriptions. The push edge delivers their messages.


class Subscriptions:
    """Serves the paths of push subscriptions: create, change, show, pause, resume, delete.

    Belongs to the event loop.
    """

    def __init__(self, broker: Broker, figures: Mapping[str, PushFigures]) -> None:
        self._push, self._policy, self._figures = broker.push, broker.policy, figures
        subscription_path = "/v1/subscriptions/{name}"
        self.paths: Paths = {
            "/v1/subscriptions": {"GET": self._list},
            subscription_path: {"GET": self._get, "PUT": self._put, "DELETE": self._delete},
            f"{subscription_path}/pause": {"POST": self._pause},
            f"{subscription_path}/resume": {"POST": self._resume},
        }

    async def _list(self, call: Call) -> Answer:
        subscriptions = self._push.all(call.caller)
        return Answer(
            200,
            SubscribedMany(
                [
                    show_subscription(name, subscription, self._figures.get(name))
                    for name, subscription in subscriptions.items()
                ]
            ),
        )

    async def _get(self, call: Call) -> Answer:
        return self._show(call, self._push.get(call.path["name"], call.caller))

    async def _put(self, call: Call) -> Answer:
        """Create or replace a subscription. A new one is answered with 201 and its secret."""
        name = call.path["name"]
        request: Subscribing = await read_request(call, Subscribing, self._policy, Verb.ADMIN)
        result = await self._push.put(
            name, request.to_subscription(), call.caller, rotates=request.rotate_secret
        )
        answer = show_subscription(name, result.subscription, self._figures.get(name), result.secret)
        return Answer(201 if result.is_new else 200, answer)

    async def _delete(self, call: Call) -> Answer:
        await self._push.delete(call.path["name"], call.caller)
        return Answer(200, SubscriptionDeleted(call.path["name"]))

    async def _pause(self, call: Call) -> Answer:
        await check_no_body(call, self._policy, Verb.ADMIN)
        return self._show(call, await self._push.pause(call.path["name"], call.caller))

    async def _resume(self, call: Call) -> Answer:
        await check_no_body(call, self._policy, Verb.ADMIN)
        return self._show(call, await self._push.resume(call.path["name"], call.caller))

    def _show(self, call: Call, subscription: PushSubscription) -> Answer:
        name = call.path["name"]
        return Answer(200, show_subscription(name, subscription, self._figures.get(name)))
