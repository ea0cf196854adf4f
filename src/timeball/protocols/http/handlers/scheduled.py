"""Scheduled messages over HTTP: where one is, and its cancel or move."""

from __future__ import annotations

from typing import Any

import msgspec

from timeball.broker.service import Broker
from timeball.errors import InvalidMessage
from timeball.protocols.http import codec
from timeball.protocols.http.requests import Answer, Call, Paths, problem, read
from timeball.wire import Content, MessagePlace, Verdict

# Of a cancel or a move: what it was too late for, as a status. A verdict that is not here was granted.
_TOO_LATE = {"not_found": 404, "released": 409, "already_cancelled": 409, "expired": 410}
_WORDS = {
    "not_found": "no scheduled message has this id",
    "released": "too late: it is in its queue",
    "already_cancelled": "it was cancelled before",
    "expired": "it waits no more; what became of it is older than what the broker keeps",
}


class Scheduled:
    """Serves what names one message. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {
            "/v1/messages/{id:path}": {"GET": self._look, "PATCH": self._move, "DELETE": self._cancel}
        }

    async def _look(self, call: Call) -> Answer:
        found = await self._broker.find(call.path["id"], call.query.get("topic"), call.caller)
        if not found:
            return problem(404, "not_found", "no message has this id, or what became of it is no longer kept")
        return Answer(200, {"id": call.path["id"], "messages": [_place(one) for one in found]})

    async def _move(self, call: Call) -> Answer:
        request: codec.Moving = await read(call, codec.Moving)
        if (request.deliver_at is None) == (request.delay is None):
            raise InvalidMessage("give one of deliver_at and delay")
        due_ms, delay_ms = codec.when(request.deliver_at, request.delay)
        return _verdict(
            await self._broker.reschedule(
                ids=[call.path["id"]], topic=call.query.get("topic"), caller=call.caller,
                due_ms=due_ms, delay_ms=delay_ms,
            )
        )  # fmt: skip

    async def _cancel(self, call: Call) -> Answer:
        topic = call.query.get("topic")
        return _verdict(await self._broker.cancel(ids=[call.path["id"]], topic=topic, caller=call.caller))


def _verdict(verdicts: list[Verdict]) -> Answer:
    """Return the answer to a cancel or a move: that of the first of the messages with this id."""
    first = verdicts[0]
    facts: dict[str, Any] = {"verdict": first.verdict}
    if first.at_ms is not None:
        facts["at"] = codec.instant_text(first.at_ms)
    if first.verdict in _TOO_LATE:
        return problem(_TOO_LATE[first.verdict], first.verdict, _WORDS[first.verdict], **facts)
    if first.due_ms is not None:
        facts |= {"due": codec.instant_text(first.due_ms), "due_ms": first.due_ms}
    return Answer(200, {"id": first.subject, "seq": first.seq, **facts})


def _place(found: MessagePlace) -> dict[str, Any]:
    """Return where a message is, with its instants as texts too."""
    place = {name: value for name, value in msgspec.structs.asdict(found).items() if value is not None}
    content: Content | None = place.pop("content", None)
    if content is not None:
        place |= {"keys": content.keys, "properties": content.properties}
        place |= {"tag": content.tag} if content.tag is not None else {}
        place |= codec.shown_body(content.body, content.size_bytes)
    for name in ("due_ms", "at_ms"):
        if name in place:
            place[name.removesuffix("_ms")] = codec.instant_text(place[name])
    return place
