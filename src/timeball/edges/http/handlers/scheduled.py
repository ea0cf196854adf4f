"""Single scheduled messages over HTTP: look up, cancel and reschedule."""

from __future__ import annotations

from typing import Any

from timeball.broker.service import Broker
from timeball.edges.http import answers_codec, codec, waiting_codec
from timeball.edges.http.problems import Answer, problem
from timeball.edges.http.requests import Call, Paths, read
from timeball.model.access import Verb
from timeball.model.errors import InvalidMessage
from timeball.model.wire import UNAVAILABLE, Verdict

# The status for each verdict of a cancel or reschedule that was not carried out. All other verdicts mean success.
_NOT_GRANTED = {
    "not_found": 404, "released": 409, "already_cancelled": 409, "expired": 410, UNAVAILABLE: 503,
}  # fmt: skip
_WORDS = {
    "not_found": "no scheduled message has this id",
    "released": "too late: it is in its queue",
    "already_cancelled": "it was cancelled before",
    "expired": "it waits no more; what became of it is older than what the broker keeps",
    UNAVAILABLE: "a group of the cluster did not answer; ask again",
}


class Scheduled:
    """Serves the paths of single messages. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {
            "/v1/messages/{id:path}": {"GET": self._look, "PATCH": self._move, "DELETE": self._cancel}
        }

    async def _look(self, call: Call) -> Answer:
        found = await self._broker.find(call.path["id"], call.query.get("topic"), call.caller)
        if not found:
            return problem(404, "not_found", "no message has this id, or what became of it is no longer kept")
        shown = answers_codec.Places(call.path["id"], [answers_codec.place_shown(one) for one in found])
        return Answer(200, shown, size_bytes=sum(one.content.size_bytes for one in found if one.content))

    async def _move(self, call: Call) -> Answer:
        request: codec.Moving = await read(call, codec.Moving, self._broker.policy, Verb.LOOK)
        due_ms, delay_ms = codec.when(request.at, request.after)
        if due_ms is None and delay_ms is None:
            raise InvalidMessage("give one of at and after")
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
    """Build the answer to a cancel or reschedule from the verdict of the first message with this id."""
    first = verdicts[0]
    if first.verdict not in _NOT_GRANTED:
        return Answer(200, answers_codec.granted(first))
    facts: dict[str, Any] = {"verdict": first.verdict}
    if first.at_ms is not None:
        facts["at"] = codec.instant_text(first.at_ms)
    return problem(_NOT_GRANTED[first.verdict], first.verdict, _WORDS[first.verdict], **facts)


# Pending messages over HTTP: pages of them, and how many are due when.


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
