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
    """Serves the live tails of topics. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {"/v1/topics/{topic}/events": {"GET": self._open_stream}}

    async def _open_stream(self, call: Call) -> Stream:
        """Start a live tail, from the header Last-Event-ID on if there is one, else with new messages."""
        topic, tags, last_event_id = (
            call.path["topic"],
            call.query.get("tag", ""),
            call.headers.get("last-event-id"),
        )
        last_offsets = events_codec.parse_event_id(last_event_id) if last_event_id else None
        # Check the request before the first byte is sent, so that a refusal has its own status.
        offsets = self._broker.live_tail.begin(topic, tags, last_offsets, call.caller)
        return Stream(self._chunks(call, topic, tags, offsets), events_codec.EVENTS)

    async def _chunks(
        self, call: Call, topic: str, tags: str, offsets: Offsets
    ) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a live tail: its start, events, and a comment after KEEP_ALIVE_S without events."""
        read_tail = partial(
            self._broker.live_tail.read, topic, tags, encode=events_codec.encode_events, caller=call.caller
        )
        yield events_codec.stream_start(offsets)
        while True:
            try:
                result = await read_tail(offsets, KEEP_ALIVE_S)
            except TimeballError:
                # The topic was deleted, or the account lost its permission. The client reconnects, and that request is
                # refused.
                return
            if result is None:
                yield events_codec.KEEP_ALIVE
                continue
            data, offsets = result
            if data:
                yield data
