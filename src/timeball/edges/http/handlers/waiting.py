"""Pending messages over HTTP: pages of them, and how many are due when."""

from __future__ import annotations

from timeball.broker.service import Broker
from timeball.edges.http import waiting_codec
from timeball.edges.http.problems import Answer
from timeball.edges.http.requests import Call, Paths


class WaitingMessages:
    """Serves the paths of many pending messages. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {"/v1/messages": {"GET": self._list}, "/v1/forecast": {"GET": self._count}}

    async def _list(self, call: Call) -> Answer:
        found = await self._broker.listing.page(waiting_codec.wanted(call.query), call.caller)
        return Answer(200, waiting_codec.page(found))

    async def _count(self, call: Call) -> Answer:
        query, (from_ms, to_ms) = call.query, waiting_codec.window(call.query)
        by = waiting_codec.unit(query.get("by", "hour"))
        found = await self._broker.forecast.counted(by, from_ms, to_ms, query.get("topic"), call.caller)
        return Answer(200, waiting_codec.forecast(found))
