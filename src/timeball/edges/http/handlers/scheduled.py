"""Single scheduled messages over HTTP: look up, cancel and reschedule."""

from __future__ import annotations

from typing import Any

from timeball.broker.service import Broker
from timeball.edges.http import answers_codec, codec, waiting_codec
from timeball.edges.http.problems import Answer, problem
from timeball.edges.http.requests import Call, Paths, read_request
from timeball.model.access import Verb
from timeball.model.errors import InvalidMessage
from timeball.model.wire import UNAVAILABLE, Verdict

# the status for each verdict of a cancel or reschedule that was not carried out; all other verdicts mean success
_REFUSAL_STATUSES = {
    "not_found": 404, "released": 409, "already_cancelled": 409, "expired": 410, UNAVAILABLE: 503,
}  # fmt: skip
_REFUSAL_TEXTS = {
    "not_found": "no scheduled message has this id",
    "released": "too late: it is in its queue",
    "already_cancelled": "it was cancelled before",
    "expired": "it is no longer pending, and the broker no longer keeps its outcome",
    UNAVAILABLE: "a group of the cluster did not answer; ask again",
}


class Scheduled:
    """Serves the path of a single message. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {
            "/v1/messages/{id:path}": {"GET": self._get, "PATCH": self._reschedule, "DELETE": self._cancel}
        }

    async def _get(self, call: Call) -> Answer:
        """Show the messages with an id, the newest first."""
        messages = await self._broker.find(call.path["id"], call.query.get("topic"), call.caller)
        if not messages:
            return problem(
                404, "not_found", "no message has this id, or the broker no longer keeps its outcome"
            )
        answer = answers_codec.Places(
            call.path["id"], [answers_codec.show_message(message) for message in messages]
        )
        return Answer(
            200, answer, size_bytes=sum(message.content.size_bytes for message in messages if message.content)
        )

    async def _reschedule(self, call: Call) -> Answer:
        """Change the due time of a message."""
        request: codec.Moving = await read_request(call, codec.Moving, self._broker.policy, Verb.LOOK)
        due_ms, delay_ms = codec.due_and_delay_ms(request.at, request.after)
        if due_ms is None and delay_ms is None:
            raise InvalidMessage("give one of at and after")
        return _verdict_answer(
            await self._broker.reschedule(
                ids=[call.path["id"]], topic=call.query.get("topic"), caller=call.caller,
                due_ms=due_ms, delay_ms=delay_ms,
            )
        )  # fmt: skip

    async def _cancel(self, call: Call) -> Answer:
        topic = call.query.get("topic")
        return _verdict_answer(
            await self._broker.cancel(ids=[call.path["id"]], topic=topic, caller=call.caller)
        )


def _verdict_answer(verdicts: list[Verdict]) -> Answer:
    """Build the answer to a cancel or reschedule from its first verdict. A refusal is a problem document."""
    verdict = verdicts[0]
    if verdict.verdict not in _REFUSAL_STATUSES:
        return Answer(200, answers_codec.show_verdict(verdict))
    members: dict[str, Any] = {"verdict": verdict.verdict}
    if verdict.at_ms is not None:
        members["at"] = codec.format_time(verdict.at_ms)
    return problem(
        _REFUSAL_STATUSES[verdict.verdict], verdict.verdict, _REFUSAL_TEXTS[verdict.verdict], **members
    )


# Queries for pending messages: pages of messages, and forecasts of how many are due when.


class PendingMessages:
    """Serves the queries for pending messages. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {"/v1/messages": {"GET": self._list}, "/v1/forecast": {"GET": self._forecast}}

    async def _list(self, call: Call) -> Answer:
        page = await self._broker.listing.page(waiting_codec.parse_page_query(call.query), call.caller)
        return Answer(200, waiting_codec.page_answer(page))

    async def _forecast(self, call: Call) -> Answer:
        """Count the due messages by bucket and topic."""
        query, (from_ms, to_ms) = call.query, waiting_codec.parse_window(call.query)
        unit = waiting_codec.parse_unit(query.get("by", "hour"))
        counted = await self._broker.forecast.counted(unit, from_ms, to_ms, query.get("topic"), call.caller)
        return Answer(200, waiting_codec.forecast_answer(counted))
