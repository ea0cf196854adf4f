"""A live tail of a topic over HTTP, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from timeball.broker.consuming.live_tail import Offsets
from timeball.broker.service import Broker
from timeball.edges.http import events_codec
from timeball.edges.http.requests import Call, Paths, Stream
from timeball.model.errors import TimeballError

KEEP_ALIVE_S = 15.0


class Events:
    """Serves live tails. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {"/v1/topics/{topic}/events": {"GET": self._events}}

    async def _events(self, call: Call) -> Stream:
        topic, tags, last = call.path["topic"], call.query.get("tag", ""), call.headers.get("last-event-id")
        given = events_codec.offsets_of(last) if last else None
        # Check the request before the first byte, so that a refusal has a status.
        offsets = self._broker.live_tail.begin(topic, tags, given, call.caller)
        return Stream(self._parts(call, topic, tags, offsets), events_codec.EVENTS)

    async def _parts(
        self, call: Call, topic: str, tags: str, offsets: Offsets
    ) -> AsyncGenerator[bytes, None]:
        read = partial(
            self._broker.live_tail.read, topic, tags, encode=events_codec.events, caller=call.caller
        )
        yield events_codec.beginning(offsets)
        while True:
            try:
                found = await read(offsets, KEEP_ALIVE_S)
            except TimeballError:
                # The topic was deleted, or the account lost its permission. The client reconnects, and that request is
                # refused.
                return
            if found is None:
                yield events_codec.KEEP_ALIVE
                continue
            data, offsets = found
            if data:
                yield data
