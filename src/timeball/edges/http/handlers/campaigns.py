"""Campaigns over HTTP: bulk writes to look at, pause, resume and cancel. Spark plans them."""

from __future__ import annotations

from timeball.broker.service import Broker
from timeball.edges.http import answers_codec, codec
from timeball.edges.http.problems import Answer
from timeball.edges.http.requests import Call, Handler, Paths, read
from timeball.model.access import Verb
from timeball.model.wire import CampaignChange


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
